"""Draft lengths that share a verification budget: GoodSpeed eq. 5.

A draft of S tokens yields 1 + Σ_{s ≤ S} G(s) tokens in expectation. The survival G(s) is the
probability that at least s of them are accepted. G falls with s, so taking the largest weighted
gains first is optimal."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_HEAP_UNITS = 250
"""Largest number of clients and tokens for the heap; above it array operations are faster."""
_ALMOST_SURE = 1 - 1e-12
"""Acceptance rates are cut off here, so that their logarithm is not 0."""
_SAMPLED = 10_000
"""Number of clients above which the price search starts from a sample of them."""
_STRIDE = 16
"""One client in so many is sampled."""
_NEWTON_STEPS = 30
"""Limit on Newton steps; a few suffice."""
_ROWS = 6
"""Rows of the working table of `_Geometric`."""


class DraftLengths(NamedTuple):
    """Draft tokens of each client, and the largest weighted gain that the budget refused (or 0)."""

    lengths: list[int]
    price: float


def draft_lengths(
    weights: Sequence[float], survival: Sequence[Sequence[float]], budget: int
) -> DraftLengths:
    """Maximise Σ w_i Σ_{s ≤ S_i} G_i(s) with Σ S_i ≤ `budget` (eq. 5 for any survival curve).

    survival: G_i(1), G_i(2), … of each client, falling; a curve's length is the client's limit.
    Tokens without gain are not granted. Ties go to the earlier client."""
    units = min(budget, sum(map(len, survival)))
    if units + len(weights) <= _HEAP_UNITS:
        return _greedy(weights, survival, budget)
    return _partitioned(weights, survival, budget)


def _greedy(
    weights: Sequence[float], survival: Sequence[Sequence[float]], budget: int
) -> DraftLengths:
    lengths = [0] * len(weights)
    heap = [
        (-weight * curve[0], i)
        for i, (weight, curve) in enumerate(zip(weights, survival, strict=True))
        if curve and weight * curve[0] > 0
    ]
    heapq.heapify(heap)
    for _ in range(budget):
        if not heap:
            break
        i = heap[0][1]
        lengths[i] = taken = lengths[i] + 1
        if taken < len(survival[i]) and survival[i][taken] > 0:
            heapq.heapreplace(heap, (-weights[i] * survival[i][taken], i))
        else:
            heapq.heappop(heap)
    return DraftLengths(lengths, -heap[0][0] if heap else 0.0)


def _partitioned(
    weights: Sequence[float], survival: Sequence[Sequence[float]], budget: int
) -> DraftLengths:
    counts = [len(curve) for curve in survival]
    owners = np.repeat(np.arange(len(weights)), counts)
    gains = np.concatenate([np.asarray(curve, dtype=np.float64) for curve in survival])
    gains *= np.repeat(np.asarray(weights, dtype=np.float64), counts)
    wanted = gains > 0
    owners, gains = owners[wanted], gains[wanted]
    price = 0.0
    if len(gains) > budget:
        # Equal gains keep their order: the sort is stable.
        order = np.argsort(-gains, kind="stable")
        price = float(gains[order[budget]])
        owners = owners[order[:budget]]
    return DraftLengths(np.bincount(owners, minlength=len(weights)).tolist(), price)


def geometric_lengths(
    weights: Sequence[float] | FloatArray,
    rates: Sequence[float] | FloatArray,
    budget: int,
    limits: Sequence[int] | IntArray | None = None,
) -> tuple[IntArray, float]:
    """Return `draft_lengths` for geometric survival G_i(s) = rates[i]^s.

    Returns the lengths [clients] and the price. limits: longest draft of each client; None: only
    the budget. For many clients the price is found by Newton steps on the real-valued problem, then
    the remaining tokens are partitioned."""
    if len(weights) + budget <= _HEAP_UNITS:
        return _geometric_greedy(weights, rates, budget, limits)
    given = np.asarray(weights, dtype=np.float64)
    # One block for all arrays: many large ones would each cost page faults.
    table = np.empty((_ROWS, len(given)))
    rate = np.minimum(np.asarray(rates, dtype=np.float64), _ALMOST_SURE, out=table[1])
    cap = None if limits is None else np.minimum(np.asarray(limits, dtype=np.float64), budget + 1)
    if given.min(initial=1.0) <= 0 or rate.min(initial=1.0) <= 0:
        useless = (given <= 0) | (rate <= 0)
        cap = np.where(useless, 0.0, budget + 1 if cap is None else cap)
        given = np.where(useless, 1.0, given)
        rate[useless] = 0.5
    if not len(given) or (cap is not None and cap.sum() <= budget):
        return (np.zeros(len(given)) if cap is None else cap).astype(np.int64), 0.0
    np.log(given, out=table[0])
    np.negative(np.log(rate, out=rate), out=rate)
    return _Geometric(table, cap).share(budget)


def _geometric_greedy(
    weights: Sequence[float] | FloatArray,
    rates: Sequence[float] | FloatArray,
    budget: int,
    limits: Sequence[int] | IntArray | None,
) -> tuple[IntArray, float]:
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


class _Geometric:
    """Weighted gains on a logarithmic scale.

    Token s of client i is worth its log weight − s·decay. At log price p a client drafts all tokens
    worth p or more, up to its cap."""

    def __init__(self, table: FloatArray, cap: FloatArray | None = None) -> None:
        """Take `table`: log weights and decays in the first two rows, the others scratch."""
        rows: list[FloatArray] = list(table)
        self._log_weight, self._decay, self._speed, self._reach, self._lengths, self._gains = rows
        np.divide(1.0, self._decay, out=self._speed)
        self._cap = cap

    def share(self, budget: int) -> tuple[IntArray, float]:
        """Return lengths that sum to the budget, and the price. The caps must sum to more."""
        # Rounding down leaves about half a token per client. Aim low, so that tokens remain to be
        # given rather than taken back.
        margin = len(self._decay) ** 0.5
        price = self._real_price(budget - margin, 0.5 * margin)
        lengths = self._at(price)
        left = budget - int(lengths.sum())
        push = 2 * margin / self._speed.sum()
        while left < 0:
            price, push = price + push, 2 * push
            lengths = self._at(price)
            left = budget - int(lengths.sum())
        gains = self._give(lengths, left)
        return lengths.astype(np.int64), math.exp(gains.max())

    def _real_price(self, total: float, tolerance: float) -> float:
        """Return the log price at which real-valued drafts, rounded down, sum to about `total`."""
        if len(self._decay) > _SAMPLED:
            # A sample of the clients gives the price to within one or two Newton steps.
            cap = None if self._cap is None else self._cap[::_STRIDE]
            few = np.empty((_ROWS, len(self._decay[::_STRIDE])))
            few[0], few[1] = self._log_weight[::_STRIDE], self._decay[::_STRIDE]
            share = few.shape[1] / len(self._decay)
            price = _Geometric(few, cap)._real_price(total * share, tolerance * share)
        else:
            price = (self._log_weight.dot(self._speed) - total) / self._speed.sum()
        lengths, reach = self._lengths, self._reach
        np.multiply(self._log_weight, self._speed, out=reach)
        reach -= 0.5
        inside = np.empty(reach.shape, dtype=np.bool_)
        for _ in range(_NEWTON_STEPS):
            np.multiply(self._speed, -price, out=lengths)
            lengths += reach
            np.greater(lengths, 0, out=inside)
            if self._cap is not None:
                inside &= lengths < self._cap
                np.minimum(lengths, self._cap, out=lengths)
            over = np.maximum(lengths, 0.0, out=lengths).sum() - total
            slope = self._speed.dot(inside)
            if abs(over) <= tolerance or not slope:
                break
            price += over / slope
        return float(price)

    def _at(self, price: float) -> FloatArray:
        lengths = np.subtract(self._log_weight, price, out=self._lengths)
        lengths *= self._speed
        np.floor(lengths, out=lengths)
        if self._cap is not None:
            np.minimum(lengths, self._cap, out=lengths)
        return np.maximum(lengths, 0.0, out=lengths)

    def _give(self, lengths: FloatArray, left: int) -> FloatArray:
        """Give `left` more tokens, the most valuable first, and return the remaining log gains."""
        gains = np.add(lengths, 1, out=self._gains)
        gains *= self._decay
        np.subtract(self._log_weight, gains, out=gains)
        if self._cap is not None:
            gains[lengths >= self._cap] = -np.inf
        while left > 0:
            if len(gains) <= left:
                takers = np.arange(len(gains))
            else:
                takers = np.argpartition(gains, len(gains) - left)[len(gains) - left :]
            first = gains[takers]
            second = first - self._decay[takers]
            if self._cap is not None:
                second[lengths[takers] + 1 >= self._cap[takers]] = -np.inf
            # A token worth less than another taker's second one must wait.
            taken = first >= second.max()
            taken &= first > -np.inf
            who = takers[taken]
            lengths[who] += 1
            gains[who] = second[taken]
            left -= len(who)
        return gains
