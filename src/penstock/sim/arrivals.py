"""Arrival processes: renewal processes whose rate may change with time."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.sim.traces import WorkloadError


class RateChange(NamedTuple):
    """Factor on the rate from `start` to `end`, in seconds since the first arrival."""

    start: float
    end: float
    factor: float


@dataclass(frozen=True, slots=True)
class ArrivalProcess:
    """Renewal process with gamma gaps of coefficient of variation `cv`; 1 is Poisson."""

    cv: float = 1.0
    rate_changes: tuple[RateChange, ...] = ()

    def __post_init__(self) -> None:
        if not 0.001 <= self.cv <= 100:
            raise WorkloadError(f"a coefficient of variation is from 0.001 to 100, not {self.cv:g}")
        for change in self.rate_changes:
            if not 0 <= change.start < change.end:
                raise WorkloadError(
                    f"a rate change must end after it starts, at 0 s or later, "
                    f"not {change.start:g} to {change.end:g} s"
                )
            if not (math.isfinite(change.factor) and change.factor > 0):
                raise WorkloadError(f"a rate factor must be over 0, not {change.factor:g}")
        for before, after in itertools.pairwise(self.rate_changes):
            if after.start < before.end:
                raise WorkloadError(
                    f"rate changes must be in order of time and not overlap: one starts at "
                    f"{after.start:g} s, the one before ends at {before.end:g} s"
                )

    def times(self, num: int, rate: float, rng: np.random.Generator) -> NDArray[np.float64]:
        """Return `num` sorted arrival times in seconds from 0, `rate` a second on average.

        The same state of `rng` at another rate scales the gaps. Raises: WorkloadError."""
        check_positive("rate", rate)
        shape = self.cv**-2
        gaps = rng.standard_gamma(shape, size=num) / shape
        gaps[0] = 0.0
        with np.errstate(over="ignore"):
            times = self._undo_changes(np.cumsum(gaps) / rate)
        if not np.isfinite(times[-1]):
            raise WorkloadError(f"the rate {rate:g} is too small for {num} arrivals")
        return times

    def _undo_changes(self, nominal: NDArray[np.float64]) -> NDArray[np.float64]:
        times = nominal.copy()
        real_end, nominal_end = 0.0, 0.0
        for start, end, factor in self.rate_changes:
            nominal_start = nominal_end + start - real_end
            nominal_end = nominal_start + (end - start) * factor
            real_end = end
            inside = (nominal >= nominal_start) & (nominal < nominal_end)
            times[inside] = start + (nominal[inside] - nominal_start) / factor
            if math.isfinite(end):
                after = nominal >= nominal_end
                times[after] = end + (nominal[after] - nominal_end)
        return times


_NUMBER = r"(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
_CHANGE = re.compile(rf"({_NUMBER})-({_NUMBER})?x({_NUMBER})", re.IGNORECASE)
SYNTAX = "poisson or gamma:CV, each with rate changes such as poisson@600-1200x2"


def parse_arrivals(text: str) -> ArrivalProcess | None:
    """Parse an arrival process; None if the text does not name one.

    - `poisson`; `gamma:CV`, for example `gamma:2`;
    - either of them followed by rate changes `@START-ENDxFACTOR`, separated by commas:
      `poisson@600-1200x2` doubles the rate from 600 s to 1200 s, `gamma:2@0-60x0.5,300-x3` halves
      it during the first minute and triples it from 300 s on. Raises: WorkloadError."""
    head, at, changes = text.partition("@")
    kind, colon, cv = head.partition(":")
    if kind not in ("poisson", "gamma"):
        return None
    if (kind == "gamma") != bool(colon) or (colon and not re.fullmatch(_NUMBER, cv)):
        raise WorkloadError(f"unknown arrivals {text!r}; choose {SYNTAX}")
    found = []
    for part in changes.split(",") if at else ():
        match = _CHANGE.fullmatch(part)
        if match is None:
            raise WorkloadError(f"unknown rate change {part!r}; it is written START-ENDxFACTOR")
        start, end, factor = match.groups()
        found.append(RateChange(float(start), float(end) if end else math.inf, float(factor)))
    return ArrivalProcess(float(cv) if colon else 1.0, tuple(found))


def check_positive(what: str, value: float) -> None:
    """Raises: WorkloadError unless `value` is finite and over 0."""
    if not (math.isfinite(value) and value > 0):
        raise WorkloadError(f"the {what} must be a finite number over 0, not {value:g}")
