"""Figures of `benchmarks.fairness`: intervals over seeds, verdict lines, Jain's index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.repro.goodspeed_rounds import FloatArray

SEEDS = range(5)
STUDENT_T = 2.776
CLIENTS = 8
Figures = dict[str, Any]


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95% interval, of one value for each of five seeds."""
    return float(np.mean(values)), STUDENT_T * float(np.std(values, ddof=1)) / len(values) ** 0.5


def line(passed: bool, what: str) -> str:
    return f"[{'pass' if passed else 'MISS'}] {what}"


def jain(rates: FloatArray) -> float:
    """Jain's index: 1 where all are equal, 1/N where one has everything."""
    return float(rates.sum() ** 2 / (len(rates) * (rates**2).sum()))
