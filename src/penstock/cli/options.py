"""Options shared by several commands. Policy names come from the registry."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.core.policies.bundles import AUTO, BUNDLES
from penstock.core.policies.registry import policy_names


def policy_option(kind: str, what: str) -> typer.models.OptionInfo:
    """Return an option that takes the name of a policy. what: start of its help."""
    known = ", ".join(policy_names(kind))
    made: typer.models.OptionInfo = typer.Option(
        metavar="NAME", help=f"{what}: {known}. Default: the bundle's."
    )
    return made


def with_options_of(command: Callable[..., Any], **added: Any) -> inspect.Signature:
    """Return the signature of a command with keyword-only parameters, and these options added."""
    known = inspect.signature(command, eval_str=True).parameters.values()
    own = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in added.items()
    ]
    return inspect.Signature([*(p.replace(kind=p.KEYWORD_ONLY) for p in known), *own])


BUNDLE_OPTION: typer.models.OptionInfo = typer.Option(
    metavar="NAME",
    show_default=False,
    help=f"Bundle of the four policies: {', '.join(BUNDLES)}. [{AUTO}]",
)
PolicyOption = Annotated[str | None, BUNDLE_OPTION]
PartOption = Annotated[str | None, typer.Option(metavar="NAME", hidden=True)]
"""A policy in place of the bundle's."""

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]

# --- commands that load models ------------------------------------------------------------------

NATIVE, VLLM = "native", "vllm"

_TARGET_HELP = (
    "Checkpoint folder, GGUF file, bundled target, or a model of the hub: owner/name[@revision], "
    "owner/name:QUANT. Default: the bundled family."
)

TargetArgument = Annotated[str | None, typer.Argument(help=_TARGET_HELP, show_default=False)]
TargetsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[TARGET]...",
        help=f"{_TARGET_HELP} Several are served behind one address, each by its name.",
        show_default=False,
    ),
]
TargetOption = Annotated[str | None, typer.Option(metavar="NAME|PATH", help=_TARGET_HELP)]
DrafterOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=PATH",
        help="A drafter; may be repeated. A bare NAME is a bundled one, `ngram`, `suffix`, or "
        "`mtp` (the target's own head); `ngram+MODEL` adds look-up; `auto` "
        "fetches a small model of the target's family from the hub.",
    ),
]
NoSpeculationOption = Annotated[
    bool, typer.Option("--no-speculation", help="No speculative decoding: load no drafters.")
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        metavar=f"{NATIVE}|{VLLM}",
        help=f"Engine of the target: Penstock's own, or vLLM if installed. [{NATIVE}]",
    ),
]
DtypeOption = Annotated[
    str | None, typer.Option(metavar="TYPE", help="auto, float32, bfloat16 or float16. [auto]")
]
KvDtypeOption = Annotated[
    str | None,
    typer.Option(
        metavar="TYPE", help="auto, or int8: keys and values in 8 bits, on the CPU. [auto]"
    ),
]
DeviceOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="cpu, cpu:CORES as in cpu:0-3, cuda or cuda:N. [cpu]"),
]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any setting of the configuration file, as in vllm.tensor_parallel=2 or "
        "selection=lbss; may be repeated. Values are YAML; `engine.` may be omitted.",
    ),
]
BatchOption = Annotated[str, typer.Option(help="Batch sizes, separated by commas.")]
TemperatureOption = Annotated[float, typer.Option(min=0, help="0 is greedy.")]
TextSeedOption = Annotated[
    int | None,
    typer.Option(min=0, max=2**64 - 1, help="The same seed gives the same text."),
]
StatsOption = Annotated[
    bool, typer.Option("--stats", help="Print speed and acceptance on standard error.")
]

# --- commands that simulate ---------------------------------------------------------------------

WorkersOption = Annotated[
    int | None,
    typer.Option(min=1, help="Parallel processes. Default: one per core."),
]
RayOption = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT|auto", help="Run on a Ray cluster; needs penstock[ray]."),
]
SeedsOption = Annotated[
    int, typer.Option(min=1, metavar="N", help="Number of seeds, from --seed on.")
]
PlotOption = Annotated[Path | None, typer.Option(metavar="FILE.png", help="Plot to this file.")]

PIPELINE_HELP = (
    "off: draft, then verify. N: micro-batches, drafted and verified in turn. auto: off or N by "
    "measured times. async: verify the drafts that are ready. Default: the bundle's."
)
