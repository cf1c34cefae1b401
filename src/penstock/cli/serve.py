"""`penstock serve`: the OpenAI-compatible server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.failures import one_line


def serve(
    target: Annotated[
        str | None,
        typer.Argument(help="Checkpoint folder or bundled target. Default: the bundled family."),
    ] = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=PATH",
            help="A drafter; may be repeated. A bare NAME is a bundled one or `ngram`.",
        ),
    ] = None,
    admission: Annotated[str | None, typer.Option(help="Admission policy.")] = None,
    selection: Annotated[str | None, typer.Option(help="Drafter selection policy.")] = None,
    allocation: Annotated[
        str | None,
        typer.Option(
            help="Draft-length policy. Default: renewal with --drafters-listen, otherwise "
            "throughput."
        ),
    ] = None,
    verification: Annotated[
        str | None,
        typer.Option(
            metavar="coupled|ratio",
            help="For all requests. Default: coupled for requests with a seed and with "
            "--drafters-listen, ratio for others.",
        ),
    ] = None,
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="Load no drafters.")
    ] = False,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16.")] = None,
    kv_tokens: Annotated[
        int | None, typer.Option(help="KV memory in tokens. Default: a share of what is free.")
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Step times from `penstock profile measure`. Default: measured at the start.",
        ),
    ] = None,
    drafters_listen: Annotated[
        str | None,
        typer.Option(
            "--drafters-listen",
            metavar="HOST:PORT",
            help="Let draft servers connect here; no local drafter is loaded unless one is named.",
        ),
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="PEM certificate shown to draft servers.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM key of that certificate.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="PEM authority that must have signed draft servers' ones.")
    ] = None,
    pipeline: Annotated[
        str | None,
        typer.Option(
            metavar="off|N|auto|async",
            help="Verify in rounds, in N micro-batches beside which drafters work, whichever of "
            "these is best, or whatever is ready. Default: off; async with --drafters-listen.",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with settings; options take precedence.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. [127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one. [8000]")] = None,
) -> None:
    """Serve a target, with drafters, by the OpenAI API."""
    import asyncio
    import logging

    from penstock.api import server
    from penstock.cli.models import with_models
    from penstock.config import ConfigError, parse_config, read_yaml
    from penstock.serving.client import EngineFailed

    logging.basicConfig(format="penstock: %(levelname)s: %(message)s")
    with one_line(ConfigError, EngineFailed):
        settings = read_yaml(config) if config is not None else {}
        engine = _given(
            settings.pop("engine", {}),
            verification=verification,
            dtype=dtype,
            kv_tokens=kv_tokens,
            profile=profile,
            pipeline=pipeline,
        )
        tls = _given({}, certificate=tls_certificate, key=tls_key, client_ca=tls_client_ca)
        drafters = _given(settings.pop("drafters", {}), listen=drafters_listen, tls=tls or None)
        policies = {"admission": admission, "selection": selection, "allocation": allocation}
        for kind, name in policies.items():
            if name is not None and engine.get(kind, {}).get("name") != name:
                engine[kind] = {"name": name}
        if drafters:
            settings["drafters"] = drafters
            engine = {
                "drafters": {},
                "pipeline": "async",
                "verification": "coupled",
                "allocation": {"name": "renewal"},
                **engine,
            }
        engine = with_models(engine, target, drafter or (), speculate=not no_speculation)
        parsed = parse_config({**_given(settings, host=host, port=port), "engine": engine})
        asyncio.run(server.serve(parsed, _announce, announce_drafters=_announce_drafters))


def _given(settings: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Settings, with the options that were given in their place."""
    return {**settings, **{name: value for name, value in options.items() if value is not None}}


def _announce_drafters(address: str) -> None:
    print(f"penstock: draft servers connect to {address}", flush=True)


def _announce(address: str) -> None:
    print(f"penstock: serving on {address}", flush=True)
