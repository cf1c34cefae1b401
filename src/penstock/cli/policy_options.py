"""Policies by name, for every command that takes them; their names are those of their files."""

from __future__ import annotations

import typer

from penstock.core.registry import policy_names


def policy_option(kind: str, what: str) -> typer.models.OptionInfo:
    """An option that takes the name of a policy. what: what such a policy decides."""
    known = ", ".join(policy_names(kind))
    made: typer.models.OptionInfo = typer.Option(metavar="NAME", help=f"{what}: {known}.")
    return made
