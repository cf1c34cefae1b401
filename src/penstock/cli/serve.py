"""`penstock serve`: the OpenAI-compatible server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.engine_options import DEVICE_HELP, DTYPE_HELP, NoSpeculationOption
from penstock.cli.failures import one_line
from penstock.cli.policy_options import policy_option

TargetArgument = Annotated[
    str | None,
    typer.Argument(help="Checkpoint folder or bundled target. Default: the bundled family."),
]
DrafterOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=PATH",
        help="A drafter; may be repeated. A bare NAME is a bundled one or `ngram`.",
    ),
]
AdmissionOption = Annotated[
    str | None, policy_option("admission", "Admission policy, by default vllm_v1")
]
SelectionOption = Annotated[
    str | None, policy_option("selection", "Drafter selection policy, by default single")
]
AllocationOption = Annotated[
    str | None,
    policy_option(
        "allocation",
        "Draft-length policy, by default renewal with --drafters-listen, otherwise throughput",
    ),
]
FairnessOption = Annotated[
    bool | None,
    typer.Option("--fairness/--no-fairness", help="Between tenants, by weight. [--fairness]"),
]
VerificationOption = Annotated[
    str | None,
    typer.Option(
        metavar="coupled|ratio",
        help="For all requests. Default: coupled for requests with a seed and with "
        "--drafters-listen, ratio for others.",
    ),
]
DtypeOption = Annotated[str | None, typer.Option(help=DTYPE_HELP)]
DeviceOption = Annotated[str | None, typer.Option(help=f"{DEVICE_HELP} [cpu]")]
MaxModelLenOption = Annotated[
    int | None,
    typer.Option(help="Most tokens of a request, prompt and output. Default: the target's own."),
]
ServedModelNameOption = Annotated[
    str | None, typer.Option(help="Name of the model in the API. Default: the target folder's.")
]
ApiKeyOption = Annotated[
    list[str] | None,
    typer.Option(
        envvar="PENSTOCK_API_KEY",
        help="Key that clients must send, as those of the default tenant; may be repeated.",
    ),
]
KvTokensOption = Annotated[
    int | None, typer.Option(help="KV memory in tokens. Default: a share of what is free.")
]
ProfileOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Step times from `penstock profile measure`. Default: measured at the start.",
    ),
]
DraftersListenOption = Annotated[
    str | None,
    typer.Option(
        "--drafters-listen",
        metavar="HOST:PORT",
        help="Let draft servers connect here; no local drafter is loaded unless one is named.",
    ),
]
TlsCertificateOption = Annotated[
    Path | None, typer.Option(help="PEM certificate shown to draft servers.")
]
TlsKeyOption = Annotated[Path | None, typer.Option(help="PEM key of that certificate.")]
TlsClientCaOption = Annotated[
    Path | None, typer.Option(help="PEM authority that must have signed draft servers' ones.")
]
PipelineOption = Annotated[
    str | None,
    typer.Option(
        metavar="off|N|auto|async",
        help="Verify in rounds, in N micro-batches beside which drafters work, whichever of "
        "these is best, or whatever is ready. Default: off; async with --drafters-listen.",
    ),
]
ConfigOption = Annotated[
    Path | None, typer.Option(help="YAML file with settings; options take precedence.")
]
HostOption = Annotated[str | None, typer.Option(help="Address to listen on. [127.0.0.1]")]
CorsOriginOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="ORIGIN",
        help="Let web pages from here call the API, as https://chat.example; may be repeated.",
    ),
]
PortOption = Annotated[int | None, typer.Option(help="Port; 0 takes a free one. [8000]")]

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
    admission: AdmissionOption = None,
    selection: SelectionOption = None,
    allocation: AllocationOption = None,
    fairness: FairnessOption = None,
    verification: VerificationOption = None,
    no_speculation: NoSpeculationOption = False,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    max_model_len: MaxModelLenOption = None,
    kv_tokens: KvTokensOption = None,
    profile: ProfileOption = None,
    drafters_listen: DraftersListenOption = None,
    tls_certificate: TlsCertificateOption = None,
    tls_key: TlsKeyOption = None,
    tls_client_ca: TlsClientCaOption = None,
    pipeline: PipelineOption = None,
    config: ConfigOption = None,
    host: HostOption = None,
    port: PortOption = None,
    served_model_name: ServedModelNameOption = None,
    api_key: ApiKeyOption = None,
    cors_origin: CorsOriginOption = None,
) -> None:
    """Serve a target, with drafters, by the OpenAI API."""
    import asyncio

    from penstock.cli.models import settings_in, with_models
    from penstock.config import ConfigError, parse_config, read_yaml
    from penstock.serving.process import EngineFailed

    with one_line(ConfigError, EngineFailed):
        settings = read_yaml(config) if config is not None else {}
        engine = _given(
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
        _name_policies(engine, admission=admission, selection=selection, allocation=allocation)
        _add_keys(engine, api_key or ())
        if drafters:
            settings["drafters"] = drafters
            engine = {**_WITH_DRAFT_SERVERS, **engine}
        engine = with_models(engine, target, drafter or (), speculate=not no_speculation)
        settings = _given(
            settings,
            host=host,
            port=port,
            served_model_name=served_model_name,
            cors_origins=cors_origin or None,
        )
        parsed = parse_config({**settings, "engine": engine})

        # What takes seconds to import comes after everything that can be wrong.
        from penstock.api import server
        from penstock.api.http import configure_logging

        configure_logging()
        asyncio.run(server.serve(parsed, _announce, announce_drafters=_announce_drafters))


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
    from penstock.config import DEFAULT_TENANT

    if keys:
        tenants = settings_in(engine.get("tenants"), "engine.tenants")
        default = settings_in(tenants.get(DEFAULT_TENANT), f"engine.tenants.{DEFAULT_TENANT}")
        own = {**default, "api_keys": [*default.get("api_keys", ()), *keys]}
        engine["tenants"] = {**tenants, DEFAULT_TENANT: own}


def _announce_drafters(address: str) -> None:
    print(f"penstock: draft servers connect to {address}", flush=True)


def _announce(address: str) -> None:
    print(f"penstock: serving on {address}", flush=True)
