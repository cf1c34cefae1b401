"""`penstock serve`: the OpenAI-compatible server."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import options as cli
from penstock.cli.terminal import announce, one_line

if TYPE_CHECKING:
    from penstock.config import PolicyConfig

_log = logging.getLogger(__name__)


def serve(
    targets: cli.TargetsArgument = None,
    drafter: cli.DrafterOption = None,
    no_speculation: cli.NoSpeculationOption = False,
    engine: cli.EngineOption = None,
    dtype: cli.DtypeOption = None,
    kv_dtype: cli.KvDtypeOption = None,
    device: cli.DeviceOption = None,
    kv_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", help="KV cache in tokens. Default: a quarter of free memory."),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Most prompt and output tokens of a request. Default: the target's own.",
        ),
    ] = None,
    policy: cli.PolicyOption = None,
    admission: cli.PartOption = None,
    selection: cli.PartOption = None,
    allocation: cli.PartOption = None,
    pipeline: cli.PartOption = None,
    drafters_listen: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Accept draft servers here; local drafters must then be named.",
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(metavar="HOST", help="Address to listen on. [127.0.0.1]")
    ] = None,
    port: Annotated[int | None, typer.Option(metavar="PORT", help="0: a free port. [8000]")] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Model name in the API; may be repeated: answers have the first. Default: the "
            "target's own.",
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            envvar="PENSTOCK_API_KEY",
            help="Required API key, of the default tenant. May be repeated.",
        ),
    ] = None,
    state: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER|none",
            help="Where what was learned is kept for the next start. [~/.cache/penstock/state]",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            envvar="PENSTOCK_CONFIG",
            help="YAML file with settings; PENSTOCK_* variables and options take precedence. "
            "SIGHUP reloads its tenants.",
        ),
    ] = None,
    settings: cli.SettingsOption = None,
) -> None:
    """Serve one or several target models over the OpenAI API, with speculative decoding."""
    options = dict(locals())
    import asyncio

    from penstock.serving.fork_context import preload

    if not (config or settings) and device in (None, "cpu") and engine in (None, cli.NATIVE):
        # Importing PyTorch takes as long as the rest of the start-up, so it runs in parallel.
        preload()
    from penstock.cli.settings import in_force, of_pulled
    from penstock.config import ConfigError
    from penstock.serving.process import EngineFailed, is_forked

    with one_line(ConfigError, EngineFailed):
        parsed = in_force(options, download=True)
        if parsed.engine.vllm is not None and parsed.engine.vllm.node_rank > 0:
            from penstock.engine.backends import run_vllm_node

            run_vllm_node(parsed.engine, announce)
        if is_forked(parsed.engine):
            preload()
        # Slow imports come after validation.
        from penstock.api import server
        from penstock.serving.logs import configure_logging

        configure_logging(parsed.log_format)
        _warn_of_idling(parsed.engine.admission)
        asyncio.run(
            server.serve(
                parsed,
                lambda address: announce(f"serving on {address}"),
                announce_drafters=lambda address: announce(f"draft servers connect to {address}"),
                tell=announce,
                read_again=None if config is None else lambda: in_force(options),
                pulled=lambda name, progress: of_pulled(options, name, progress),
            )
        )


def _warn_of_idling(admission: PolicyConfig) -> None:
    """Warn of a policy that may never answer a lone client."""
    if admission.make("admission").may_idle:
        _log.warning(
            "--admission %s may wait for other requests before it continues, so a client that is "
            "alone may get no answer; its option gated: true, or --admission fluid_guided, always "
            "serves",
            admission.name,
        )
