"""The laboratory's commands of the program `penstock`."""

from __future__ import annotations

import typer

from lab.reproduce import reproduce
from lab.zoo.commands import app as zoo


def add(app: typer.Typer) -> None:
    """Add them to the program. Both import what they need when they run, so that help is fast."""
    app.command()(reproduce)
    app.add_typer(zoo, name="zoo")
