"""What an experiment is, and how much of it is run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from lab.common.claims import ClaimVerdict
from penstock.sim.parallel import HERE, Workers

_R = TypeVar("_R")


class LabError(ValueError):
    """An experiment cannot be made. The message is one line."""


class Skipped(Exception):
    """What an experiment needs is not there. The message is one line."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is simulated.

    arrivals: requests of a run that decides whether a load is sustained. tolerance: relative width
    at which a bisection for the capacity ends. curve_arrivals: requests or rounds of a run that
    decides nothing alone. shares: loads of a curve, over the fluid bound. tries: thresholds that a
    search may try beside the most promising. seeds: repetitions where a mean is estimated.
    """

    arrivals: int
    tolerance: float
    curve_arrivals: int
    shares: tuple[float, ...]
    tries: int
    seeds: int

    @property
    def repetitions(self) -> int:
        """Seeds of runs that take seconds: five at least, but in a trial."""
        return max(5, self.seeds) if self.seeds > 1 else 2


FULL = Effort(60_000, 0.005, 20_000, (0.1, 0.25, 0.4, 0.55, 0.7, 0.85, 0.95, 1.05), 12, 12)
# Fewer arrivals would not do: literal WAIT on the low workload serves 1,300 requests at once.
QUICK = Effort(20_000, 0.03, 4_000, (0.1, 0.5, 0.9, 1.05), 2, 4)


@dataclass(frozen=True, slots=True)
class Trial:
    """One run: where its files go, how much to simulate, the folder of measurements (None: there
    is none), whom to tell what is being done, who does it, and the folder of the models that live
    experiments run (None: the bundled ones), and their device."""

    out: Path
    effort: Effort = FULL
    data: Path | None = None
    tell: Callable[[str], None] = lambda _: None
    workers: Workers = HERE
    family: Path | None = None
    device: str = "cpu"

    def kept(self, name: str) -> Path:
        """The file of what a live experiment has measured so far: where it was cut, it goes on."""
        return self.out / f"{name}.kept.jsonl"

    def each(
        self,
        call: Callable[..., _R],
        items: Iterable[tuple[Any, ...]],
        what: Callable[..., str] | None = None,
    ) -> Iterator[_R]:
        """`call(*item)` by the workers, for each item in order; before its result, `what(*item)` is
        told, where that is something new, with how many results there are of how many."""
        listed, told = list(items), ""
        found = self.workers.map(functools.partial(_call, call), listed)
        for num_done, item in enumerate(listed):
            if what is not None and (line := what(*item)) != told:
                told = line
                self.tell(f"{line} ({num_done} of {len(listed)} runs done)")
            yield next(found)

    def by_cell(
        self,
        call: Callable[..., _R],
        cells: Iterable[tuple[Any, ...]],
        seeds: Iterable[int],
        *given: Any,
        what: Callable[..., str] | None = None,
    ) -> dict[Any, list[_R]]:
        """`call(*cell, *given, seed)` by the workers: by cell, [seeds]."""
        listed, numbers = list(cells), list(seeds)
        items = [(*cell, *given, seed) for cell in listed for seed in numbers]
        found = self.each(call, items, what)
        return {cell: [next(found) for _ in numbers] for cell in listed}


def _call(call: Callable[..., _R], item: tuple[Any, ...]) -> _R:
    return call(*item)


@dataclass(frozen=True, slots=True)
class Experiment:
    """A figure or table. `run` writes NAME.csv, NAME.png and NAME.svg, and returns a verdict for
    each claim. is_live: it runs models, of any family.

    Raises, from `run`: Skipped, LabError, OSError.
    """

    name: str
    title: str
    run: Callable[[Trial], list[ClaimVerdict]]
    is_live: bool = False
