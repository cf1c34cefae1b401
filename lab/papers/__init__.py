"""The papers' figures and tables again, and what goes beyond them: one file each.

A module of this folder is an experiment by its `EXPERIMENT`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

from lab.common.experiment import Experiment, LabError


@functools.cache
def experiments() -> dict[str, Experiment]:
    """Name to experiment, sorted by name."""
    modules = (f"{__name__}.{info.name}" for info in pkgutil.iter_modules(__path__))
    found: list[Experiment] = [importlib.import_module(name).EXPERIMENT for name in modules]
    return {e.name: e for e in sorted(found, key=lambda e: e.name)}


def experiments_named(name: str) -> list[Experiment]:
    """The experiment of that name, or every one for `all`. Raises: LabError."""
    known = experiments()
    if name == "all":
        return list(known.values())
    if name not in known:
        raise LabError(f"unknown reproduction {name!r}; choose from all, {', '.join(known)}")
    return [known[name]]
