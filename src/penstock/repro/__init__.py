"""The papers' figures and tables again. One file each, found by its folder: a module here that has
an `ENTRY` is one; the other modules are what entries share.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.repro.claims import Control, Finding, Outcome, Verdict, check, judge

__all__ = [
    "FULL",
    "QUICK",
    "Control",
    "Effort",
    "Entry",
    "Finding",
    "Outcome",
    "ReproError",
    "Run",
    "Skipped",
    "Verdict",
    "check",
    "entries",
    "entries_named",
    "judge",
]


class ReproError(ValueError):
    """A reproduction cannot be made. The message is one line."""


class Skipped(Exception):
    """What an entry needs is not there. The message is one line."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is simulated.

    arrivals: requests of a run that decides whether a load is sustained. tolerance: relative width
    at which a bisection for the capacity ends. curve_arrivals: requests of a point of a curve.
    shares: loads of a curve, over the largest capacity in it. tries: thresholds that a search
    may try beside the most promising. seeds: repetitions where a mean is estimated.
    """

    arrivals: int
    tolerance: float
    curve_arrivals: int
    shares: tuple[float, ...]
    tries: int
    seeds: int


FULL = Effort(60_000, 0.005, 20_000, (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.95, 1.05), 12, 12)
# Fewer arrivals would not do: literal WAIT on the low workload serves 1,300 requests at once.
QUICK = Effort(20_000, 0.03, 4_000, (0.1, 0.4, 0.7, 0.9, 1.05), 2, 4)


@dataclass(frozen=True, slots=True)
class Run:
    """One reproduction: where its files go, how much to simulate, the folder of measurements (None:
    there is none), and whom to tell what is being done."""

    out: Path
    effort: Effort = FULL
    data: Path | None = None
    tell: Callable[[str], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class Entry:
    """A figure or table. `run` writes NAME.csv and NAME.png and returns a verdict for each claim.

    Raises, from `run`: Skipped, ReproError, OSError.
    """

    name: str
    title: str
    run: Callable[[Run], list[Verdict]]


@functools.cache
def entries() -> dict[str, Entry]:
    """Name to entry, sorted by name."""
    found: dict[str, Entry] = {}
    for info in pkgutil.iter_modules(__path__):
        entry = getattr(importlib.import_module(f"{__name__}.{info.name}"), "ENTRY", None)
        if entry is not None:
            found[entry.name] = entry
    return dict(sorted(found.items()))


def entries_named(name: str) -> list[Entry]:
    """The entry of that name, or every one for `all`. Raises: ReproError."""
    known = entries()
    if name == "all":
        return list(known.values())
    if name not in known:
        raise ReproError(f"unknown reproduction {name!r}; choose from all, {', '.join(known)}")
    return [known[name]]
