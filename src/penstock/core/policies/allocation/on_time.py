"""Draft lengths that meet clients' latency targets and serve tenants by weight.

A request at x tokens a second that needs r to be in time, for R more tokens, is worth

    U'(X) [ x + v r Φ((x / r − 1) / σ) ],  σ² = 1/R + ρ²

where Φ is the probability that it ends in time: tokens are a Poisson stream, and step times vary by
ρ. U' = weight · X^(−a) is the slope of the tenants' fair utility at their average rate X (GoodSpeed
eq. 5). x = μ(S) / T: μ expected tokens a round, T the mean step plus what drafts of length S add to
it. The sum over all requests is maximised.

The question is AdaServe's (arXiv 2501.12162); v is the multiplier of a constraint, as in gradient
scheduling (Neely's virtual queues), that counts at a request's end only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.core.latency import remaining
from penstock.core.learn.acceptance import MOST_POSITIONS
from penstock.core.learn.times import round_seconds
from penstock.core.policies.allocation.parts.drafters import fade_unused
from penstock.core.policies.allocation.parts.gradient import (
    Fairness,
    GoodputAverages,
    tokens_by_tenant,
)
from penstock.core.policies.base import AllocationPolicy, DraftCandidate, View
from penstock.core.policies.options import MaxDraftTokens, NonNegativeFloat
from penstock.core.state import Grant, Outcome

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_LEAST_SECONDS = 1e-6  # keeps rates finite
_NUM_TOTALS = 16  # numbers of draft tokens compared, and again between the best one's neighbours
_STEP_WEIGHT = 0.03  # weight of a step in the mean; chosen by hand
_UNSTEADY = 0.3
"""Relative deviation of the mean step over a request's rest from the present one. Chosen by
hand."""
_FORBIDDEN = -1e30  # below any worth


class OnTime(AllocationPolicy):
    """Maximises expected tokens, with more weight for those in time."""

    name: ClassVar[str] = "on_time"
    weighs_time: ClassVar[bool] = True

    @dataclass(frozen=True, slots=True)
    class Options:
        k_max: MaxDraftTokens = 8  # most draft tokens for one request
        value: NonNegativeFloat = 4.0  # of a token in time, beyond that of any token (v)
        fairness: Fairness = 1.0  # exponent a of the utility

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._averages = GoodputAverages()
        self._steps = _MeanStep()

    def on_step(self, outcomes: Sequence[Outcome], now: float) -> None:
        self._averages.add_tokens(tokens_by_tenant(outcomes))
        self._steps.ended(now)

    def allocate(self, candidates: Sequence[DraftCandidate], view: View) -> list[Grant]:
        if not candidates:
            return []
        step = self._step(candidates, view)
        budget = min(view.room.budget, int(step.worth.limits.sum()))
        lengths = np.zeros(len(candidates), dtype=np.int64)
        if budget:
            before = self._steps.lengths(candidates)
            lengths = _best(step.worth.slopes(float(step.seconds(before)[0])), budget, step.value)
        lengths = _with_chained(lengths, step.worth.limits, candidates, view)
        drafting = float(step.seconds(lengths)[0] - step.typical)
        self._steps.planned(view.now, drafting, candidates, lengths)
        fade_unused(candidates, lengths.tolist(), view)
        return [Grant(n) for n in lengths.tolist()]

    def objective(
        self, candidates: Sequence[DraftCandidate], view: View
    ) -> Callable[[Sequence[int]], float]:
        """Return the worth of draft lengths in this step, which `allocate` maximises."""
        step = self._step(candidates, view)
        return lambda lengths: float(step.value(np.array([lengths], dtype=np.int64))[0])

    def _step(self, candidates: Sequence[DraftCandidate], view: View) -> _TypicalStep:
        load = _Load(candidates, view)
        base = float(load.seconds(np.zeros((1, len(candidates)), dtype=np.int64))[0])
        typical = base if self._steps.seconds is None else self._steps.seconds
        return _TypicalStep(self._worth(candidates, view), load, base, typical)

    def _worth(self, candidates: Sequence[DraftCandidate], view: View) -> _Worth:
        most = min(self.options.k_max, MOST_POSITIONS)
        limits = np.array([min(c.limit, most) for c in candidates], dtype=np.int64)
        slopes = self._averages.slopes(candidates, view, self.options.fairness)
        survival_of = view.learn.acceptance.survival
        tokens = np.ones((len(candidates), int(limits.max(initial=0)) + 1))
        for row, candidate in enumerate(candidates):
            survival = survival_of(candidate.state.request.id, candidate.drafter, int(limits[row]))
            tokens[row, 1 : len(survival) + 1] += np.cumsum(survival)
        lengths = view.learn.lengths
        lengths.survival(np.array([c.state.num_output_tokens for c in candidates]))
        left = [remaining(c.state, view.now, lengths.mean_residual) for c in candidates]
        utility = np.array([slopes[c.state.request.tenant] for c in candidates])
        num_others = max(0, view.room.num_sampled - len(candidates))
        return _Worth(
            tokens,
            limits,
            utility,
            np.array([0.0 if one is None else one.rate for one in left]),
            np.array([0.0 if one is None else one.tokens for one in left]),
            self.options.value,
            num_others * float(utility.mean()),
        )


class _Worth(NamedTuple):
    """Worth of token rates."""

    tokens: FloatArray  # [requests, lengths] expected in a round, by draft length
    limits: IntArray  # longest draft
    utility: FloatArray  # U' by request
    rate: FloatArray  # needed to be in time; 0 without a target or hope
    left: FloatArray  # tokens to which that applies
    value: float  # v
    others: float  # U' of all requests that do not draft

    def of_plans(self, plans: IntArray, steps: FloatArray) -> FloatArray:
        """Return the worth [plans] of draft lengths [plans, requests] at their steps' seconds."""
        rates = self.tokens[np.arange(len(self.limits)), plans] / steps[:, None]
        total = rates @ self.utility
        rows = np.flatnonzero(self.rate)
        if len(rows):
            total += self._in_time(rates[:, rows], rows) @ self.utility[rows]
        return np.asarray(total)

    def _in_time(self, rates: FloatArray, rows: IntArray) -> FloatArray:
        """Return v r Φ of the requests `rows`, in the shape of their rates."""
        # Importing SciPy takes 0.25 s, and every server looks up this file's options.
        from scipy.special import ndtr

        needed = self.rate[rows]
        surplus = (rates / needed - 1) / np.sqrt(1 / self.left[rows] + _UNSTEADY**2)
        return np.asarray(self.value * needed * ndtr(surplus))

    def slopes(self, step: float) -> FloatArray:
        """Return slopes [requests, lengths] of the concave majorant of worth over draft length."""
        rates = self.tokens / step
        rows = np.flatnonzero(self.rate)
        if len(rows):
            rates[rows] += self._in_time(rates[rows].T, rows).T
        worth = rates * self.utility[:, None]
        lengths = np.arange(worth.shape[1])
        worth[lengths > self.limits[:, None]] = _FORBIDDEN
        chords = (worth[:, None, :] - worth[:, :, None]) / np.where(
            lengths > lengths[:, None], lengths - lengths[:, None], 1
        )
        found = [chords[:, :s, s:].max(axis=2).min(axis=1) for s in lengths[1:]]
        slopes = np.stack(found, axis=1) if found else np.empty((len(worth), 0))
        slopes[lengths[1:] > self.limits[:, None]] = _FORBIDDEN
        return slopes


def _best(slopes: FloatArray, budget: int, value: Callable[[IntArray], FloatArray]) -> IntArray:
    """Return the best lengths [requests], by steepest slopes for several totals and caps."""
    num, longest = slopes.shape
    order = np.argsort(-slopes, axis=None, kind="stable")
    order = order[slopes.ravel()[order] > 0]
    owners, places = order // longest, order % longest
    caps = sorted({longest, *(2**i for i in range(longest.bit_length()))})
    bought = [owners[places < cap][:budget] for cap in caps]

    def best_of(totals: list[tuple[int, int]]) -> tuple[float, tuple[int, int], IntArray]:
        plans = np.stack([np.bincount(bought[i][:n], minlength=num) for i, n in totals])
        values = value(plans)
        found = int(values.argmax())
        return float(values[found]), totals[found], plans[found]

    def between(index: int, low: int, high: int) -> list[tuple[int, int]]:
        totals = np.linspace(low, high, _NUM_TOTALS + 1).astype(np.int64)
        return [(index, n) for n in np.unique(totals).tolist()]

    roughly = best_of([pair for i, all_ in enumerate(bought) for pair in between(i, 0, len(all_))])
    index, total = roughly[1]
    apart = -(-len(bought[index]) // _NUM_TOTALS)
    if apart < 2:
        return roughly[2]
    low, high = max(0, total - apart), min(len(bought[index]), total + apart)
    finely = best_of(between(index, low, high))
    return max(roughly, finely, key=lambda found: found[0])[2]


def _with_chained(
    lengths: IntArray, limits: IntArray, candidates: Sequence[DraftCandidate], view: View
) -> IntArray:
    """Grant chained drafters, which weigh their sources themselves, all remaining room."""
    left = view.room.budget - int(lengths.sum())
    for i, candidate in enumerate(candidates):
        drafter = view.drafters.get(candidate.drafter)
        if drafter is not None and drafter.is_chained:
            more = min(left, int(limits[i] - lengths[i]))
            lengths[i] += more
            left -= more
    return lengths


class _Load:
    """Seconds of a step, drafting and verifying, by the drafts in it."""

    def __init__(self, candidates: Sequence[DraftCandidate], view: View) -> None:
        self._times = view.learn.times
        self._num_rows = view.room.num_rows
        self._beside = view.beside
        self._columns: dict[str, list[int]] = {}
        for i, candidate in enumerate(candidates):
            self._columns.setdefault(candidate.drafter, []).append(i)

    def seconds(self, plans: IntArray) -> FloatArray:
        """Return seconds [plans] of draft lengths [plans, candidates]."""
        times, num = self._times, plans.sum(axis=1)
        inside, beside = np.zeros(len(plans)), np.zeros(len(plans))
        for name, columns in self._columns.items():
            own = plans[:, columns]
            one = times.curve_of(name).at((own > 0).sum(axis=1))
            drafting = own.max(axis=1) * one
            if name in self._beside:
                beside = np.maximum(beside, drafting)
            else:
                inside += drafting
        verify = times.target.at(self._num_rows + num)
        inside += np.where(num > 0, times.draft_overhead, 0.0)
        return round_seconds(inside + verify, beside=beside, host=times.overhead)


@dataclass(frozen=True, slots=True)
class _TypicalStep:
    """Mean step with its drafts; `base`: seconds of this one without drafts."""

    worth: _Worth
    load: _Load
    base: float
    typical: float

    def seconds(self, plans: IntArray) -> FloatArray:
        """Return seconds [plans] of a typical step with draft lengths [plans, candidates]."""
        longer = self.load.seconds(np.atleast_2d(plans)) - self.base
        return np.maximum(self.typical + longer, _LEAST_SECONDS)

    def value(self, plans: IntArray) -> FloatArray:
        """Return the worth [plans]."""
        steps = self.seconds(plans)
        return self.worth.of_plans(plans, steps) + self.worth.others / steps


class _MeanStep:
    """Mean seconds of a step without drafts, prompts included, and the last step's drafts."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._planned: tuple[float, float] | None = None
        self._ended_at = 0.0
        self._lengths: dict[str, int] = {}

    def planned(
        self, now: float, drafting: float, candidates: Sequence[DraftCandidate], lengths: IntArray
    ) -> None:
        """Note a step that begins now, with `drafting` seconds for its drafts."""
        self._planned = (now, drafting)
        ids = (c.state.request.id for c in candidates)
        self._lengths = dict(zip(ids, lengths.tolist(), strict=True))

    def ended(self, now: float) -> None:
        if self._planned is not None:
            begun, drafting = self._planned
            seconds = max(now - max(begun, self._ended_at) - drafting, _LEAST_SECONDS)
            known = seconds if self.seconds is None else self.seconds
            self.seconds = known + _STEP_WEIGHT * (seconds - known)
            self._planned = None
        self._ended_at = now

    def lengths(self, candidates: Sequence[DraftCandidate]) -> IntArray:
        """Return the draft lengths in the last step, 0 for requests without."""
        return np.array([self._lengths.get(c.state.request.id, 0) for c in candidates])


POLICY = OnTime
