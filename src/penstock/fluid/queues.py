"""Mean and tail bounds of queues in front of a stage (WAIT, appendices C, D and F)."""

from __future__ import annotations

import math

import numpy as np


def mean_excess(variance: float, drift: float, iterations: float = math.inf) -> float:
    """Bound E[max(0, X_1, X_1 + X_2, …)] over `iterations` steps with E[X] = −drift ≤ 0.

    Kingman's Var / (2 drift), or σ √iterations where that is less: the mean is Σ E[S_k⁺]/k with
    E[S_k⁺] ≤ E|S_k|/2 ≤ σ √k / 2 (lemma C.4). At zero drift (equality in eq. 7) only the latter
    holds. Raises ValueError for a negative drift."""
    if drift < 0:
        raise ValueError("the queue grows without bound: more arrives than is served")
    kingman = variance / (2 * drift) if drift > 0 else math.inf
    return min(kingman, math.sqrt(variance * iterations))


def tail_exponent(before: float, here: float, survival: float) -> float:
    """Return θ_k of eq. 13: the positive root of (1 − p + p e^θ)^before = e^(θ here).

    before: n_{k−1}, prompts that leave the previous segment at once; here: n_k; survival: p_k,
    probability that one of them enters the next. Returns math.inf where n_k ≥ n_{k−1}: such a queue
    never exceeds n_k. Raises ValueError where n_k ≤ n_{k−1} p_k."""
    drift = here - before * survival
    if not 0 < survival <= 1:
        raise ValueError(f"a share of prompts that go on lies in (0, 1], not {survival}")
    if drift <= 0:
        raise ValueError(
            f"a threshold of {here:g} after one of {before:g} is too low: {before * survival:g} "
            "prompts go on at a time, and their queue would grow without bound"
        )
    if here >= before:
        return math.inf
    from scipy.optimize import brentq  # takes half a second, which a server's start need not

    log_stop, log_go = math.log1p(-survival), math.log(survival)

    def log_moment(theta: float) -> float:
        return before * float(np.logaddexp(log_stop, log_go + theta)) - theta * here

    # The function is ≤ 0 at the lower bound (lemma D.2), and ≥ 0 at the upper one, as log(1 − p + p
    # e^θ) > log p + θ.
    low = tail_exponent_bound(before, here, survival)
    high = max(before * -log_go / (before - here), low) * (1 + 1e-9) + 1e-12
    if log_moment(low) >= 0:
        return low
    return float(brentq(log_moment, low, high, xtol=1e-14, rtol=1e-12))


def tail_exponent_bound(before: float, here: float, survival: float) -> float:
    """Return 8 (n_k − n_{k−1} p_k) / n_{k−1} ≤ θ_k (lemma D.2, eq. 15).

    Theorem B.2 prints n_k below the line, which is not a lower bound."""
    return 8 * (here - before * survival) / before


def queue_limit(before: float, here: float, survival: float, log_odds: float) -> float:
    """Return c_k, which a segment's queue exceeds with probability exp(−log_odds) per iteration.

    log_odds = ln((L − 1) S / δ) gives probability 1 − δ over L segments and S iterations."""
    return here + log_odds / tail_exponent(before, here, survival)
