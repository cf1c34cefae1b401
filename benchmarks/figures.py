"""What benchmarks print of several values: a mean with its interval, and whether a bar is met."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from scipy.stats import t


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its interval at 95% by Student's t; 0 for a single value, of
    which nothing can be said."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, 0.0
    error = statistics.stdev(values) / len(values) ** 0.5
    return mean, float(t.ppf(0.975, len(values) - 1)) * error


def line(passed: bool, what: str) -> str:
    return f"[{'pass' if passed else 'MISS'}] {what}"
