"""Draft lengths that share a verification budget: GoodSpeed eq. 5.

A draft of S tokens yields 1 + Σ_{s ≤ S} G(s) tokens in expectation. The survival G(s) is the
probability that at least s of them are accepted. G falls with s, so taking the largest weighted
gains first is optimal."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def geometric_lengths(
    weights: Sequence[float] | FloatArray,
    rates: Sequence[float] | FloatArray,
    budget: int,
    limits: Sequence[int] | IntArray | None = None,
) -> tuple[IntArray, float]:
    """Maximise Σ w_i Σ_{s ≤ S_i} G_i(s) with Σ S_i ≤ `budget`, for G_i(s) = rates[i]^s.

    Returns the lengths [clients] and the price: the largest weighted gain that the budget refused,
    or 0. limits: longest draft of each client; None: only the budget. Tokens without gain are not
    granted. Ties go to the earlier client."""
    lengths = [0] * len(weights)
    heap = [
        (-w * r, i, r)
        for i, (w, r) in enumerate(zip(weights, rates, strict=True))
        if w * r > 0 and (limits is None or limits[i] > 0)
    ]
    heapq.heapify(heap)
    for _ in range(budget):
        if not heap:
            break
        loss, i, rate = heap[0]
        lengths[i] += 1
        if limits is None or lengths[i] < limits[i]:
            heapq.heapreplace(heap, (loss * rate, i, rate))
        else:
            heapq.heappop(heap)
    return np.array(lengths, dtype=np.int64), float(-heap[0][0]) if heap else 0.0
