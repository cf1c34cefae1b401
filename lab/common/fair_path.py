"""Fair optimum x* (GoodSpeed eqs. 1, 2), and the fluid sample path towards it (Lemma 2).

The achievable region (eq. 2) is the convex hull of the expected goodputs of whole draft lengths.
Expected goodput is concave in a client's length, so real-valued lengths on the linear interpolation
yield the hull's efficient boundary. No convex solver is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.fluid.fair import FloatArray, IntArray, geometric_lengths

_BISECTIONS = 100
"""Halvings of the price interval; they exhaust the precision of a float64."""
_FIRST_REACH = 32
"""Draft length that is tried first; it is doubled until no client reaches it."""
_TURNS = 60
"""Iterations of Frank and Wolfe."""


class FairOptimum(NamedTuple):
    """Goodput x* in tokens per round, mean draft lengths, and the multiplier of the budget.

    goodput, lengths: [clients]. price: value of one more draft token per round."""

    goodput: FloatArray
    lengths: FloatArray
    price: float


def expected_goodput(
    rates: Sequence[float] | FloatArray, lengths: Sequence[int] | IntArray
) -> FloatArray:
    """Return μ = (1 − α^(S+1)) / (1 − α) tokens per round, broadcast over `lengths`."""
    rate = np.minimum(np.asarray(rates, dtype=np.float64), 1 - 1e-12)
    return np.asarray((1 - rate ** (np.asarray(lengths) + 1)) / (1 - rate))


def fair_optimum(
    rates: Sequence[float] | FloatArray,
    budget: float,
    weights: Sequence[float] | FloatArray | None = None,
    fairness: float = 1.0,
    limits: Sequence[int] | IntArray | None = None,
) -> FairOptimum:
    """Return x* = argmax Σ v_i U(x_i) over the region of eq. 2, for geometric survival.

    rates: acceptance α_i in [0, 1). budget: C, draft tokens per round. weights: v_i, by default 1.
    fairness: exponent a of the utility. limits: longest drafts, by default only the budget."""
    rate = np.asarray(rates, dtype=np.float64)
    longest = int(np.max(limits)) if limits is not None and len(rate) else int(np.ceil(budget))
    reach = min(longest, _FIRST_REACH)
    while True:
        survival = rate[:, None] ** np.arange(1, reach + 1)
        if limits is not None:
            survival[np.arange(reach) >= np.asarray(limits)[:, None]] = 0.0
        found = fair_optimum_of(survival, budget, weights, fairness)
        if reach >= longest or found.lengths.max(initial=0.0) < reach:
            return found
        reach = min(longest, 2 * reach)


def fair_optimum_of(
    survival: FloatArray,
    budget: float,
    weights: Sequence[float] | FloatArray | None = None,
    fairness: float = 1.0,
) -> FairOptimum:
    """Return `fair_optimum` for survival curves G_i(s), shape [clients, longest draft], falling.

    Bisects on the multiplier λ. Piece s of client i has slope G_i(s). It is taken wholly where v_i
    G_i(s) / x^a is at least λ at its end, and up to x = (v_i G_i(s) / λ)^(1/a) where that holds at
    its beginning only."""
    knots = np.hstack([np.ones((len(survival), 1)), 1 + np.cumsum(survival, axis=1)])
    value = survival if weights is None else survival * np.asarray(weights)[:, None]
    at_start = value * knots[:, :-1] ** -fairness
    at_end = value * knots[:, 1:] ** -fairness
    useful = (value > 0).sum(axis=1).astype(np.float64)
    if useful.sum() <= budget or not useful.any():
        return FairOptimum(_between(knots, useful), useful, 0.0)

    def lengths_at(price: float) -> FloatArray:
        whole = (at_end >= price).sum(axis=1)
        rows = np.flatnonzero(whole < survival.shape[1])
        pieces = whole[rows]
        inside = at_start[rows, pieces] > price
        rows, pieces = rows[inside], pieces[inside]
        lengths: FloatArray = whole.astype(np.float64)
        goodput = (value[rows, pieces] / price) ** (1 / fairness) if fairness else 0.0
        lengths[rows] += (goodput - knots[rows, pieces]) / survival[rows, pieces]
        return lengths

    low = float(at_end[at_end > 0].min()) / 2
    high = float(at_start.max()) * 2
    for _ in range(_BISECTIONS):
        middle = (low * high) ** 0.5
        if lengths_at(middle).sum() > budget:
            low = middle
        else:
            high = middle
    few, many = lengths_at(high), lengths_at(low)
    # Equal gains at the budget's edge are shared in equal parts.
    gap = many.sum() - few.sum()
    part = (budget - few.sum()) / gap if gap > 0 else 0.0
    lengths = few + min(1.0, part) * (many - few)
    return FairOptimum(_between(knots, lengths), lengths, high)


def _between(knots: FloatArray, lengths: FloatArray) -> FloatArray:
    """Return the goodput of real-valued lengths on the interpolation."""
    rows = np.arange(len(knots))
    whole = np.minimum(lengths.astype(np.int64), knots.shape[1] - 2)
    start, end = knots[rows, whole], knots[rows, whole + 1]
    return np.asarray(start + (lengths - whole) * (end - start))


def fair_optimum_of_rounds(rates: FloatArray, budget: int) -> FloatArray:
    """Return x*, the mean goodputs [clients], for known acceptance `rates` [rounds, clients].

    Fair over all rounds together. By Frank and Wolfe: the marginal gains over the goodputs so far
    decide each round's draft tokens, and their yields are mixed with the goodputs so far."""
    survival = rates[:, :, None] ** np.arange(1, budget + 1)
    rounds = np.arange(len(rates))[:, None]
    found = np.ones(rates.shape[1])
    for turn in range(_TURNS):
        gains = (survival / found[:, None]).reshape(len(rates), -1)
        best = np.argpartition(-gains, budget - 1, axis=1)[:, :budget]
        taken = np.zeros_like(gains)
        taken[rounds, best] = survival.reshape(gains.shape)[rounds, best]
        yields = 1 + taken.reshape(survival.shape).sum(axis=2).mean(axis=0)
        found += (yields - found) * 2 / (turn + 2)
    return found


class FluidPath(NamedTuple):
    """Path x(t): times [points] in units of 1/β rounds, goodput [points, clients]."""

    times: FloatArray
    goodput: FloatArray


def fluid_path(
    start: Sequence[float] | FloatArray,
    rates: Sequence[float] | FloatArray,
    budget: int,
    duration: float,
    step: float = 1e-3,
    weights: Sequence[float] | FloatArray | None = None,
    fairness: float = 1.0,
) -> FluidPath:
    """Return the fluid sample path x' = v − x, where v maximises ∇U(x) · v (Lemma 2).

    v jumps between the region's corners, and the path slides along its edges. Euler steps of length
    `step` (Algorithm 1 with known acceptance and β = `step`) stay within O(`step`) of it. start:
    x(0), positive."""
    x = np.array(start, dtype=np.float64)
    given = np.ones_like(x) if weights is None else np.asarray(weights, dtype=np.float64)
    rate = np.asarray(rates, dtype=np.float64)
    count = round(duration / step)
    goodput = np.empty((count + 1, len(x)))
    goodput[0] = x
    for point in range(1, count + 1):
        lengths, _ = geometric_lengths(given * x**-fairness, rate, budget)
        x = x + step * (expected_goodput(rate, lengths) - x)
        goodput[point] = x
    return FluidPath(np.linspace(0.0, count * step, count + 1), goodput)
