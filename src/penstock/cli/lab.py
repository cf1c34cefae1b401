"""`penstock reproduce` and `penstock zoo`: commands of the lab, in clones of the repository."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import typer

_CLONE = Path(__file__).parents[3]
_UNKNOWN = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


def add_commands(app: typer.Typer) -> None:
    """Add the lab's commands; without a clone, commands that refer to it."""
    if (_CLONE / "lab" / "commands.py").is_file():
        sys.path.append(str(_CLONE))
        importlib.import_module("lab.commands").add(app)
        return
    for name, what in (
        ("reproduce", "Reproduce a paper's figure or table; from a clone."),
        ("zoo", "Train the bundled models; from a clone."),
    ):
        app.command(name, help=what, context_settings=_UNKNOWN)(_not_here)


def _not_here(context: typer.Context) -> None:
    raise typer.BadParameter(
        f"`penstock {context.info_name}` runs from a clone of Penstock's repository (its folder "
        "`lab`), which this installation does not have"
    )
