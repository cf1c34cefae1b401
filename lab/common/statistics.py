"""Means with their intervals of 95%: the same for all experiments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from penstock.sim.capacity import Estimate

FloatArray = npt.NDArray[np.float64]
_T = TypeVar("_T")

SEEDS = range(5)
"""Fixed beforehand, wherever nothing else is said."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its interval of 95% by Student's t: endless for a single value, of which nothing
    can be said."""

    mean: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half the width; 0 for a single value."""
        half = self.high - self.mean
        return half if math.isfinite(half) else 0.0

    @property
    def times(self) -> str:
        """As a factor."""
        return f"{self.mean:.2f}× ({self.low:.2f} to {self.high:.2f})"

    def __str__(self) -> str:
        return f"{self.mean:.2f} ({self.low:.2f} to {self.high:.2f})"


def plus_minus(found: Interval) -> str:
    """With one digit of the half-width, two where it begins with a one, and at most four digits of
    the mean."""
    if not found.half:
        return f"{found.mean:.4g}"
    magnitude = math.floor(math.log10(found.half))
    wanted = (1 if found.half < 2 * 10**magnitude else 0) - magnitude
    most = 3 - math.floor(math.log10(abs(found.mean) or 1))
    digits = max(0, min(wanted, most))
    return f"{found.mean:,.{digits}f} ± {found.half:.{digits}f}"


def interval(values: Sequence[float] | FloatArray) -> Interval:
    """Of a mean."""
    found = Estimate.from_values(values)
    half = math.inf if math.isnan(found.half) else found.half
    return Interval(found.mean, found.mean - half, found.mean + half)


def ratio(numerator: Sequence[float] | FloatArray, rival: Sequence[float] | FloatArray) -> Interval:
    """Geometric mean of ratios, pair by pair."""
    logs = interval(np.log(np.asarray(numerator) / np.asarray(rival)))
    return Interval(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high))


def made_while_busy(
    first: FloatArray, ended: FloatArray, tokens: FloatArray, clients: int
) -> tuple[float, float]:
    """Tokens that came while every client had a request, and until when.

    first, ended, tokens: [requests]; times are from the common start, and tokens come evenly. The
    end, where some clients have nothing left to ask, would weigh on whoever serves some of them
    faster than others."""
    until = float(np.sort(ended)[-min(clients, len(ended))])
    shares = np.clip((until - first) / np.maximum(ended - first, 1e-9), 0.0, 1.0)
    came = (first <= until) + (tokens - 1) * shares
    return float(came.sum()), until


def rotated(items: Sequence[_T], turn: int) -> list[_T]:
    """In another order in each turn: whoever is first in one is last in the next."""
    first = turn % len(items)
    return [*items[first:], *items[:first]]
