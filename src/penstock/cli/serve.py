"""`penstock serve`: the OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.engines import (
    NATIVE,
    DistributedBackendOption,
    EngineArgOption,
    EngineOption,
    PipelineParallelOption,
    QuantizationOption,
    TensorParallelOption,
    with_engine,
)
from penstock.cli.options import (
    DEVICE_HELP,
    DTYPE_HELP,
    PIPELINE_HELP,
    DrafterOption,
    NoSpeculationOption,
    TargetArgument,
    policy_option,
)
from penstock.cli.terminal import announce, one_line

_WITH_DRAFT_SERVERS = {
    "drafters": {},
    "pipeline": "async",
    "verification": "coupled",
    "allocation": {"name": "renewal"},
}
"""Settings of the engine where draft servers may connect, unless others are given."""


def serve(
    target: TargetArgument = None,
    drafter: DrafterOption = None,
    admission: Annotated[
        str | None, policy_option("admission", "Admission policy, by default vllm_v1")
    ] = None,
    selection: Annotated[
        str | None, policy_option("selection", "Drafter selection policy, by default single")
    ] = None,
    allocation: Annotated[
        str | None,
        policy_option(
            "allocation",
            "Draft-length policy, by default renewal with --drafters-listen, otherwise throughput",
        ),
    ] = None,
    fairness: Annotated[
        bool | None,
        typer.Option(
            "--fairness/--no-fairness",
            help="Share the server by the tenants' weights. [--fairness]",
        ),
    ] = None,
    verification: Annotated[
        str | None,
        typer.Option(
            metavar="coupled|ratio",
            help="How the draft tokens of all requests are verified.\n\n"
            "coupled: compared with the target's own seeded sample.\n\n"
            "ratio: by rejection sampling.\n\n"
            "Default: coupled for requests with a seed and with --drafters-listen, else ratio.",
        ),
    ] = None,
    no_speculation: NoSpeculationOption = False,
    engine: EngineOption = None,
    tensor_parallel: TensorParallelOption = None,
    pipeline_parallel: PipelineParallelOption = None,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --engine vllm: machines that its workers are divided between; start this "
            "command on each, with its --node-rank. [1]",
        ),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="With --nodes: which one this is. The server is on node 0; the others only have "
            "workers. [0]",
        ),
    ] = None,
    master: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="With --nodes: an address of node 0, where they all meet."
        ),
    ] = None,
    distributed_backend: DistributedBackendOption = None,
    quantization: QuantizationOption = None,
    engine_arg: EngineArgOption = None,
    dtype: Annotated[str | None, typer.Option(help=DTYPE_HELP)] = None,
    device: Annotated[str | None, typer.Option(help=f"{DEVICE_HELP} [cpu]")] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            help="Most tokens of a request, prompt and output. Default: the target's own."
        ),
    ] = None,
    kv_tokens: Annotated[
        int | None, typer.Option(help="KV cache size in tokens. Default: a share of free memory.")
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
            metavar="HOST:PORT",
            help="Let draft servers connect here; no local drafter is loaded unless one is named.",
        ),
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="TLS for draft servers: this server's certificate, PEM.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="TLS for draft servers: the certificate's key, PEM.")
    ] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="TLS for draft servers: the CA of their certificates, PEM.")
    ] = None,
    pipeline: Annotated[
        str | None,
        typer.Option(
            metavar="off|N|auto|async",
            help=f"{PIPELINE_HELP}\n\nDefault: off; async with --drafters-listen.",
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML file with settings; options take precedence.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. [127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="Port; 0 takes a free one. [8000]")] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="Name of the model in the API. Default: the target's own.")
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="PENSTOCK_API_KEY",
            help="API key of the default tenant; clients must then send one. May be repeated.",
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="CORS: let web pages of this origin call the API, as https://chat.example; may be "
            "repeated.",
        ),
    ] = None,
) -> None:
    """Serve a target model over the OpenAI API, with speculative decoding by drafters."""
    import asyncio

    from penstock.serving.fork_context import preload

    if config is None and device in (None, "cpu") and engine in (None, NATIVE):
        # PyTorch takes as long as all that this process has to do until it starts an engine.
        preload()
    from penstock.cli.models import settings_in, with_models
    from penstock.config import ConfigError, parse_config, read_yaml
    from penstock.serving.process import EngineFailed, is_forked

    with one_line(ConfigError, EngineFailed):
        settings = read_yaml(config) if config is not None else {}
        models = _given(
            settings_in(settings.pop("engine", None), "engine"),
            fairness=fairness,
            verification=verification,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            kv_tokens=kv_tokens,
            profile=profile,
            pipeline=pipeline,
        )
        tls = _given({}, certificate=tls_certificate, key=tls_key, client_ca=tls_client_ca)
        drafters = settings_in(settings.pop("drafters", None), "drafters")
        drafters = _given(drafters, listen=drafters_listen, tls=tls or None)
        _name_policies(models, admission=admission, selection=selection, allocation=allocation)
        _add_keys(models, api_key or ())
        if drafters:
            settings["drafters"] = drafters
            models = {**_WITH_DRAFT_SERVERS, **models}
        models = with_engine(
            models,
            engine,
            engine_arg,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            distributed_backend=distributed_backend,
            nodes=nodes,
            node_rank=node_rank,
            master=master,
            quantization=quantization,
        )
        models = with_models(models, target, drafter or (), speculate=not no_speculation)
        settings = _given(
            settings,
            host=host,
            port=port,
            served_model_name=served_model_name,
            cors_origins=cors_origin or None,
        )
        parsed = parse_config({**settings, "engine": models})
        if parsed.engine.vllm is not None and parsed.engine.vllm.node_rank > 0:
            from penstock.engine.backends import run_vllm_node

            run_vllm_node(parsed.engine, announce)
        if is_forked(parsed.engine):
            preload()
        # What takes seconds to import here comes after everything that can be wrong.
        from penstock.api import server
        from penstock.api.http import configure_logging

        configure_logging()
        asyncio.run(
            server.serve(
                parsed,
                lambda address: announce(f"serving on {address}"),
                announce_drafters=lambda address: announce(f"draft servers connect to {address}"),
            )
        )


def _given(settings: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Settings, with the options that were given in their place. Null is as if it were absent."""
    given = {name: value for name, value in options.items() if value is not None}
    return {name: value for name, value in {**settings, **given}.items() if value is not None}


def _name_policies(engine: dict[str, Any], **names: str | None) -> None:
    """Put the policies that were given in their places; one of the same name keeps its options.

    Raises: ConfigError.
    """
    from penstock.cli.models import settings_in

    for kind, name in names.items():
        if name is None:
            continue
        if settings_in(engine.get(kind), f"engine.{kind}").get("name") != name:
            engine[kind] = {"name": name}


def _add_keys(engine: dict[str, Any], keys: Sequence[str]) -> None:
    """Let these keys stand for the default tenant. Raises: ConfigError."""
    from penstock.cli.models import settings_in
    from penstock.config import DEFAULT_TENANT, hash_of_key

    if keys:
        tenants = settings_in(engine.get("tenants"), "engine.tenants")
        default = settings_in(tenants.get(DEFAULT_TENANT), f"engine.tenants.{DEFAULT_TENANT}")
        own = {**default, "api_keys": [*default.get("api_keys", ()), *map(hash_of_key, keys)]}
        engine["tenants"] = {**tenants, DEFAULT_TENANT: own}
