"""Weighted max-min fair shares."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def max_min_shares(total: float, demands: FloatArray, weights: FloatArray) -> FloatArray:
    """Return shares of `total` by progressive filling.

    All levels share / weight rise together, and a share stops at its demand. demands, weights:
    [claimants], not negative and positive. Shares sum to the lesser of `total` and the demands."""
    shares = np.zeros(len(demands))
    left, weight = float(total), float(weights.sum())
    for i in np.argsort(demands / weights, kind="stable"):
        shares[i] = min(float(demands[i]), left * float(weights[i]) / weight)
        left, weight = left - shares[i], weight - float(weights[i])
    return shares


def jain_index(values: FloatArray) -> float | None:
    """Return (Σ x)² / (n Σ x²): 1 for equal values, 1/n for a single one; None if all are 0.

    Source: Jain, Chiu and Hawe, DEC-TR-301 (1984)."""
    squares = float((values**2).sum())
    return float(values.sum()) ** 2 / (len(values) * squares) if squares else None
