"""Which engine computes the target, and its own options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

NATIVE, VLLM = "native", "vllm"

EngineOption = Annotated[
    str | None,
    typer.Option(
        metavar=f"{NATIVE}|{VLLM}",
        help="What computes the target: Penstock's own kernels, or vLLM, which must be installed. "
        f"[{NATIVE}]",
    ),
]
TensorParallelOption = Annotated[
    int | None,
    typer.Option(min=1, help="With --engine vllm: workers that share each layer. [1]"),
]
PipelineParallelOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="With --engine vllm: groups of workers, one after the other, each with a part of the "
        "layers. [1]",
    ),
]
DistributedBackendOption = Annotated[
    str | None,
    typer.Option(
        metavar="mp|ray",
        help="With --engine vllm: what starts its workers: this program, or a Ray cluster. [mp]",
    ),
]
QuantizationOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="With --engine vllm: its name for the weights' format."),
]
EngineArgOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY=VALUE",
        help="With --engine vllm: any other of its engine's arguments, as in enforce_eager=true; "
        "may be repeated.",
    ),
]


def with_engine(
    settings: dict[str, Any],
    engine: str | None,
    engine_args: Sequence[str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The settings of an engine with what the command line says of vLLM.

    options: by the names of `VllmConfig`; None is not given. Raises: ConfigError.
    """
    from penstock.cli.models import settings_in
    from penstock.config import ConfigError, each_once

    if engine not in (None, NATIVE, VLLM):
        raise ConfigError(f"--engine is {engine!r}; allowed: {NATIVE}, {VLLM}")
    if engine == NATIVE:
        settings = {name: value for name, value in settings.items() if name != VLLM}
    elif engine == VLLM:
        settings = {**settings, VLLM: settings_in(settings.get(VLLM), f"engine.{VLLM}")}
    own = {name: value for name, value in options.items() if value is not None}
    args = each_once(map(_argument, engine_args or ()), "--engine-arg")
    if not (own or args):
        return settings
    if VLLM not in settings:
        names = [f"--{name.replace('_', '-')}" for name in own]
        given = ", ".join([*names, *(["--engine-arg"] if args else [])])
        raise ConfigError(f"{given}: for vLLM's engine alone; add --engine vllm")
    known = settings_in(settings[VLLM], f"engine.{VLLM}")
    if args:
        own["args"] = {**settings_in(known.get("args"), f"engine.{VLLM}.args"), **args}
    return {**settings, VLLM: {**known, **own}}


def _argument(text: str) -> tuple[str, Any]:
    """A value is read as YAML: true, 3, [1, 2] and {a: 1} are what they look like.

    Raises: ConfigError.
    """
    from penstock.config import ConfigError, yaml_value

    name, given, value = text.partition("=")
    if not (name and given):
        raise ConfigError(f"--engine-arg is {text!r}; allowed: KEY=VALUE, as in enforce_eager=true")
    return name.strip().lstrip("-").replace("-", "_"), yaml_value(value, f"--engine-arg {name}")
