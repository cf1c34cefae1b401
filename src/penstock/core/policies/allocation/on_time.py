"""Drafts that keep requests within the latency their clients ask for, and serve tenants by weight.

A request at x tokens a second that needs r to be in time, for R more tokens, is worth

    U'(X) [ x + v r Φ((x / r − 1) / σ) ],  σ² = 1/R + ρ²

where Φ is the probability that it ends in time: tokens come about as in a Poisson stream, and steps
take as long as now give or take ρ. U' = weight · X^(−a) is the slope of the tenants' fair utility
at the average rate X of theirs (GoodSpeed eq. 5). x = μ(S) / T: μ expected tokens a round, T the
mean step with what drafts of length S add to it. The sum over all requests is maximised.

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

_LEAST_SECONDS = 1e-6
_NUM_TOTALS = 16
"""Numbers of draft tokens that are compared, and again between the best one's neighbours."""
_STEP_WEIGHT = 0.03
_UNSTEADY = 0.3
"""Relative deviation of what steps take in the mean over the rest of a request, from what they take
now: load comes and goes."""
_FORBIDDEN = -1e30


class OnTime(AllocationPolicy):
    """Expected tokens, and more for those that are in time."""

    name: ClassVar[str] = "on_time"
    weighs_time: ClassVar[bool] = True

    @dataclass(frozen=True, slots=True)
    class Options:
        """k_max: most draft tokens for one request in a round.
        value: of a token that is in time, beyond that of any token (v).
        fairness: exponent a of the utility, U' = weight · x^(−a): 0 total, 1 proportional."""

        k_max: MaxDraftTokens = 8
        value: NonNegativeFloat = 4.0
        fairness: Fairness = 1.0

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._averages = GoodputAverages()
        self._steps = _MeanStep()

    def observe(self, outcomes: Sequence[Outcome], now: float) -> None:
        self._averages.observe(tokens_by_tenant(outcomes))
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
        """What draft lengths of the candidates are worth in this step; `allocate` looks for the
        best ones."""
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
    """What rates are worth.

    tokens: [requests, lengths] expected in a round, by the draft's length; limits: longest draft.
    utility: U' of each; rate: needed to be in time, 0 where it cannot be or has no target; left:
    tokens to which that applies. value: v. others: U' of those that do not draft, together."""

    tokens: FloatArray
    limits: IntArray
    utility: FloatArray
    rate: FloatArray
    left: FloatArray
    value: float
    others: float

    def of(self, plans: IntArray, steps: FloatArray) -> FloatArray:
        """[plans]: of all together. plans: draft lengths [plans, requests]; steps: seconds of a
        step of each."""
        rates = self.tokens[np.arange(len(self.limits)), plans] / steps[:, None]
        total = rates @ self.utility
        rows = np.flatnonzero(self.rate)
        if len(rows):
            total += self._in_time(rates[:, rows], rows) @ self.utility[rows]
        return np.asarray(total)

    def _in_time(self, rates: FloatArray, rows: IntArray) -> FloatArray:
        """v r Φ of some requests, which are the last axis of their rates."""
        # A quarter of a second of imports, once; every server looks this file's options up.
        from scipy.special import ndtr

        needed = self.rate[rows]
        surplus = (rates / needed - 1) / np.sqrt(1 / self.left[rows] + _UNSTEADY**2)
        return np.asarray(self.value * needed * ndtr(surplus))

    def slopes(self, step: float) -> FloatArray:
        """[requests, lengths]: of the concave majorant of each request's worth over the length of
        its draft, at each token of it, if steps take so long: a token alone may be worth nothing,
        and three of them a request in time."""
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
    """The best lengths, [requests], of those that take the steepest slopes first, for several
    totals and, because all wait for the longest draft, several longest lengths."""
    num, longest = slopes.shape
    order = np.argsort(-slopes, axis=None, kind="stable")
    order = order[slopes.ravel()[order] > 0]
    owners, places = order // longest, order % longest
    caps = sorted({longest, *(2**i for i in range(longest.bit_length()))})
    bought = [owners[places < cap][:budget] for cap in caps]

    def best_of(totals: list[tuple[int, int]]) -> tuple[float, tuple[int, int], IntArray]:
        """Of pairs of a cap's index and a total."""
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
    """What weighs its sources itself is granted all that there is room for."""
    left = view.room.budget - int(lengths.sum())
    for i, candidate in enumerate(candidates):
        drafter = view.drafters.get(candidate.drafter)
        if drafter is not None and drafter.is_chained:
            more = min(left, int(limits[i] - lengths[i]))
            lengths[i] += more
            left -= more
    return lengths


class _Load:
    """Seconds of a step by the drafts in it: drafting and verifying."""

    def __init__(self, candidates: Sequence[DraftCandidate], view: View) -> None:
        self._times = view.learn.times
        self._num_rows = view.room.num_rows
        self._beside = view.beside
        self._columns: dict[str, list[int]] = {}
        for i, candidate in enumerate(candidates):
            self._columns.setdefault(candidate.drafter, []).append(i)

    def seconds(self, plans: IntArray) -> FloatArray:
        """[plans]: of draft lengths [plans, candidates]."""
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
    """A step to be composed. base: its seconds without drafts; typical: those of steps in the mean,
    as which it counts."""

    worth: _Worth
    load: _Load
    base: float
    typical: float

    def seconds(self, plans: IntArray) -> FloatArray:
        """[plans]: of a typical step with draft lengths [plans, candidates]."""
        longer = self.load.seconds(np.atleast_2d(plans)) - self.base
        return np.maximum(self.typical + longer, _LEAST_SECONDS)

    def value(self, plans: IntArray) -> FloatArray:
        """[plans]: what they are worth."""
        steps = self.seconds(plans)
        return self.worth.of(plans, steps) + self.worth.others / steps


class _MeanStep:
    """Mean seconds of a step without drafts, prompts included, and the drafts of the last one."""

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._planned: tuple[float, float] | None = None
        self._ended_at = 0.0
        self._lengths: dict[str, int] = {}

    def planned(
        self, now: float, drafting: float, candidates: Sequence[DraftCandidate], lengths: IntArray
    ) -> None:
        """A step that begins now, with drafts that take so long."""
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
        """Of those that drafted in the last step; 0 for the others."""
        return np.array([self._lengths.get(c.state.request.id, 0) for c in candidates])


POLICY = OnTime
