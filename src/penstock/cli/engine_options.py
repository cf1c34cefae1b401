"""Options of the commands that load models."""

from __future__ import annotations

from typing import Annotated

import typer

DTYPE_HELP = "auto, float32, bfloat16 or float16."
DEVICE_HELP = "cpu, cuda or cuda:N."

TargetArgument = Annotated[
    str | None, typer.Argument(help="Checkpoint folder or bundled target.", show_default=False)
]
DrafterOption = Annotated[
    list[str] | None,
    typer.Option(help="NAME=PATH, a bundled drafter's name, or ngram; repeatable."),
]
NoSpeculationOption = Annotated[bool, typer.Option("--no-speculation", help="Load no drafters.")]
DtypeOption = Annotated[str, typer.Option(help=DTYPE_HELP)]
DeviceOption = Annotated[str, typer.Option(help=DEVICE_HELP)]
BatchOption = Annotated[str, typer.Option(help="Batch sizes, separated by commas.")]
