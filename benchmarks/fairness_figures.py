"""Figures of `benchmarks.fairness`: intervals over seeds, verdict lines, Jain's index."""

from __future__ import annotations

from typing import Any

from penstock.repro.goodspeed_rounds import FloatArray

SEEDS = range(5)
CLIENTS = 8
Figures = dict[str, Any]


def jain(rates: FloatArray) -> float:
    """Jain's index: 1 where all are equal, 1/N where one has everything."""
    return float(rates.sum() ** 2 / (len(rates) * (rates**2).sum()))
