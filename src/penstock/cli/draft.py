"""`penstock draft`: a draft server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from penstock.cli.terminal import announce, one_line
from penstock.core.policies.options import LONGEST_DRAFT

if TYPE_CHECKING:
    from penstock.serving.link import Endpoint


def draft(
    connect: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address of the verification server.")
    ],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH",
            help="A bundled drafter, a checkpoint folder, a GGUF file, a hub name or `ngram`. "
            "Default: a bundled drafter.",
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Serve the OpenAI API here. Default: no port.",
        ),
    ] = None,
    token: Annotated[
        str | None,
        typer.Option(help="Bearer token for the verification server.", envvar="PENSTOCK_TOKEN"),
    ] = None,
    cert: Annotated[Path | None, typer.Option(help="TLS: this server's certificate, PEM.")] = None,
    key: Annotated[Path | None, typer.Option(help="TLS: the certificate's key, PEM.")] = None,
    ca: Annotated[
        Path | None, typer.Option(help="TLS: CA of the verification server's certificate, PEM.")
    ] = None,
    max_draft_tokens: Annotated[
        int, typer.Option(min=1, max=LONGEST_DRAFT, help="Most draft tokens per step.")
    ] = 16,
    no_assignments: Annotated[
        bool,
        typer.Option("--no-assignments", help="Draft only for requests to this server's own API."),
    ] = False,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="cpu, cpu:CORES as in cpu:0-3, cuda or cuda:N.")
    ] = "cpu",
    weights: Annotated[
        Literal["stored", "int4"],
        typer.Option(
            help="int4: round matrices of more than 6 bits to 4 bits on loading, for faster drafts "
            "and a slightly lower acceptance rate."
        ),
    ] = "stored",
    log_format: Annotated[
        Literal["text", "json"],
        typer.Option(help="json: one object per line, including every HTTP request."),
    ] = "text",
) -> None:
    """Draft for a verification server, and serve the OpenAI API through it."""
    import asyncio

    from penstock.cli.models import drafter_checkpoint
    from penstock.config import NGRAM, ConfigError, checked_device

    with one_line(ConfigError):
        if no_assignments and listen is None:
            raise ConfigError("--no-assignments without --listen leaves nothing to draft for")
        address = None if listen is None else _listen_address(listen)
        name, folder = drafter_checkpoint(model)
        endpoint = _endpoint(connect, token, cert, key, ca)
        try:
            checked_device(device)
        except ValueError as error:
            raise ConfigError(f"--device: {error}") from error

    # Slow imports come after validation.
    from penstock.api.edge import DraftSettings, serve_drafts
    from penstock.engine.backends import resolved_cores
    from penstock.engine.lanes import use_cores
    from penstock.engine.models.checkpoint import CheckpointError
    from penstock.serving.drafting import DrafterOptions
    from penstock.serving.link import LinkRefused
    from penstock.serving.logs import configure_logging

    configure_logging(log_format)
    with one_line(ConfigError, CheckpointError, LinkRefused):
        # Before any other thread: all of them inherit it.
        use_cores(resolved_cores(device))
        options = DrafterOptions(
            name=name,
            model=folder,
            uses_model=name != NGRAM,
            device=device,
            weights=weights,
            max_draft_tokens=max_draft_tokens,
            takes_assignments=not no_assignments,
        )
        asyncio.run(serve_drafts(DraftSettings(endpoint, options, address), announce))


def _endpoint(
    connect: str, token: str | None, cert: Path | None, key: Path | None, ca: Path | None
) -> Endpoint:
    from penstock.config import ConfigError
    from penstock.serving.link import Endpoint
    from penstock.transport.service import channel_credentials

    if not connect.rpartition(":")[0]:
        raise ConfigError(f"--connect takes HOST:PORT, not {connect!r}")
    if not _host_and_port("--connect", connect)[1]:
        raise ConfigError(f"--connect takes a port from 1 to 65535, not {connect!r}")
    if token is not None and not (token.isascii() and token.isprintable() and token.strip()):
        raise ConfigError("--token must be printable ASCII characters")
    if (cert is None) != (key is None):
        raise ConfigError("--cert and --key belong together; one of them is missing")
    if cert is None and ca is None:
        return Endpoint(connect, token=token)
    _check_certificates(cert, key, ca)
    return Endpoint(connect, channel_credentials(ca, cert, key), token)


def _check_certificates(cert: Path | None, key: Path | None, ca: Path | None) -> None:
    """Check files with which gRPC would fail silently. Raises: ConfigError."""
    import ssl

    from penstock.config import ConfigError

    context = ssl.create_default_context()
    for path in (ca, cert, key):
        try:
            if path is not None:
                path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    try:
        if ca is not None:
            context.load_verify_locations(ca)
    except ssl.SSLError as error:
        raise ConfigError(f"--ca: {ca} holds no certificates in PEM format") from error
    try:
        if cert is not None:
            context.load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        raise ConfigError(
            f"--cert, --key: {cert} and {key} are no certificate and its unencrypted key in PEM "
            "format"
        ) from error


def _listen_address(text: str) -> tuple[str, int]:
    host, port = _host_and_port("--listen", text)
    return host or "127.0.0.1", port


def _host_and_port(option: str, text: str) -> tuple[str, int]:
    from penstock.config import ConfigError

    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise ConfigError(f"{option}: {port!r} in {text!r} is no port; ports go up to 65535")
    return host.strip("[]"), int(port)
