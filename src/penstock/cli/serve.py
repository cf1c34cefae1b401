"""`penstock serve`: the OpenAI-compatible server."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.engines import (
    NATIVE,
    DistributedBackendOption,
    EngineArgOption,
    EngineOption,
    PipelineParallelOption,
    QuantizationOption,
    TensorParallelOption,
)
from penstock.cli.options import (
    DEVICE_HELP,
    DRAFTER_WEIGHTS_HELP,
    DTYPE_HELP,
    PIPELINE_HELP,
    DrafterOption,
    NoSpeculationOption,
    TargetArgument,
    allocation_option,
    policy_option,
)
from penstock.cli.terminal import announce, one_line

if TYPE_CHECKING:
    from penstock.config import PolicyConfig

_log = logging.getLogger(__name__)


def serve(
    target: TargetArgument = None,
    drafter: DrafterOption = None,
    admission: Annotated[
        str | None, policy_option("admission", "Admission policy, by default vllm_v1")
    ] = None,
    selection: Annotated[
        str | None, policy_option("selection", "Drafter selection policy, by default single")
    ] = None,
    allocation: Annotated[str | None, allocation_option("--drafters-listen")] = None,
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
    drafter_weights: Annotated[
        str | None,
        typer.Option(metavar="stored|int4", help=f"{DRAFTER_WEIGHTS_HELP} [stored]"),
    ] = None,
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
        Path | None,
        typer.Option(
            envvar="PENSTOCK_CONFIG",
            help="YAML file with settings; PENSTOCK_* variables and options take precedence. "
            "SIGHUP has it read again, for tenants.",
        ),
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
    log_format: Annotated[
        str | None,
        typer.Option(
            metavar="text|json",
            help="json: one object a line, and a line for every HTTP request. [text]",
        ),
    ] = None,
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Send a trace of every request there, by OTLP over HTTP; needs penstock[otel].",
        ),
    ] = None,
) -> None:
    """Serve a target model over the OpenAI API, with speculative decoding by drafters."""
    options = dict(locals())
    import asyncio

    from penstock.serving.fork_context import preload

    if config is None and device in (None, "cpu") and engine in (None, NATIVE):
        # PyTorch takes as long as all that this process has to do until it starts an engine.
        preload()
    from penstock.cli.settings import in_force
    from penstock.config import ConfigError
    from penstock.serving.process import EngineFailed, is_forked

    with one_line(ConfigError, EngineFailed):
        parsed = in_force(options)
        if parsed.engine.vllm is not None and parsed.engine.vllm.node_rank > 0:
            from penstock.engine.backends import run_vllm_node

            run_vllm_node(parsed.engine, announce)
        if is_forked(parsed.engine):
            preload()
        # What takes seconds to import here comes after everything that can be wrong.
        from penstock.api import server
        from penstock.serving.logs import configure_logging

        configure_logging(parsed.log_format)
        _warn_of_idling(parsed.engine.admission)
        asyncio.run(
            server.serve(
                parsed,
                lambda address: announce(f"serving on {address}"),
                announce_drafters=lambda address: announce(f"draft servers connect to {address}"),
                read_again=None if config is None else lambda: in_force(options),
            )
        )


def _warn_of_idling(admission: PolicyConfig) -> None:
    """Say where the policy may leave a client without an answer, and what to take instead."""
    if admission.make("admission").may_idle:
        _log.warning(
            "--admission %s may wait for other requests before it goes on, and then answers no "
            "client that is alone; its option gated: true, or --admission fluid_guided, always "
            "serves",
            admission.name,
        )
