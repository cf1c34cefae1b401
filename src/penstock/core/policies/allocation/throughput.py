"""Draft lengths that maximise tokens per second under measured step times: no fairness.

The longest drafts are bought in order of survival probability, and the purchase stops where the
expected tokens per second of the whole step are greatest; where speculation does not pay that is
at nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from penstock.core.learn.times import round_seconds
from penstock.core.policies.allocation import AllocationPolicy, Grant
from penstock.core.policies.allocation.parts.unused import fade_unused
from penstock.core.policies.options import MaxDraftTokens, NonNegativeFloat
from penstock.core.state import RequestState
from penstock.core.view import DraftCandidate, View

_LEAST_OVERHEAD_S = 1e-6
"""Keeps the rate finite where nothing was measured yet."""

_IDLE_ROUNDS = 8
"""Where nothing was worth drafting for some requests, it is looked at again after so many steps of
the same requests: their estimates hardly move meanwhile."""

Purchase = tuple[float, int, int]


class Throughput(AllocationPolicy):
    """As much speculation as the step-time model says is worth its time."""

    name: ClassVar[str] = "throughput"

    @dataclass(frozen=True, slots=True)
    class Options:
        """k_max: most draft tokens for one request in a round.
        margin: speculate only where it is expected to gain this share more: the best of many
            estimates is likely to be too high."""

        k_max: MaxDraftTokens = 8
        margin: NonNegativeFloat = 0.05

    def __init__(self, options: Options) -> None:
        self.options = options
        self._idle: tuple[tuple[str, str], ...] = ()
        self._num_idle = 0

    def reserve(self, state: RequestState) -> int:
        return self.options.k_max

    def allocate(self, candidates: Sequence[DraftCandidate], view: View) -> list[Grant]:
        drafting = tuple((c.state.request.id, c.drafter) for c in candidates)
        if drafting == self._idle and self._num_idle < _IDLE_ROUNDS:
            self._num_idle += 1
            return [Grant(0)] * len(candidates)
        purchases = self._purchases(candidates, view)
        lengths = [0] * len(candidates)
        for _, index, length in purchases[: self._num_worthwhile(candidates, purchases, view)]:
            lengths[index] = length
        # What weighs its sources itself is granted all that there is room for, in every round.
        chained = {name for name, drafter in view.drafters.items() if drafter.is_chained}
        for _, index, length in purchases if chained else ():
            if candidates[index].drafter in chained:
                lengths[index] = length
        fade_unused(candidates, lengths, view, self._num_idle or 1)
        self._idle, self._num_idle = () if any(lengths) else drafting, 1
        return [Grant(n) for n in lengths]

    def _purchases(self, candidates: Sequence[DraftCandidate], view: View) -> list[Purchase]:
        """What the budget can buy, likeliest first: minus the probability that the draft token is
        accepted, its candidate, and the length that the draft then has. Survival falls along a
        draft, so token s + 1 is never bought before token s."""
        survival_of = view.learn.acceptance.survival
        longest = [min(c.limit, self.options.k_max) for c in candidates]
        purchases: list[Purchase] = []
        for group, budget in view.budgets(candidates, longest):
            own = []
            for index in group:
                candidate = candidates[index]
                survival = survival_of(
                    candidate.state.request.id, candidate.drafter, longest[index]
                )
                own += [(-g, index, length) for length, g in enumerate(survival, 1)]
            own.sort()
            purchases += own[:budget]
        purchases.sort()
        return purchases

    def _num_worthwhile(
        self, candidates: Sequence[DraftCandidate], purchases: Sequence[Purchase], view: View
    ) -> int:
        """How many purchases make the most expected tokens per second of the whole step."""
        verify = view.learn.times.target
        draft = _DraftSeconds(candidates, view)
        tokens = float(view.room.num_sampled)
        # What all purchases together could add; costs only rise, so that tells when to stop.
        most = tokens - sum(p[0] for p in purchases)
        times = view.learn.times
        overhead = max(times.overhead, _LEAST_OVERHEAD_S)
        seconds = round_seconds(verify(view.room.num_rows), host=overhead)
        best, best_rate = 0, (1 + self.options.margin) * tokens / seconds
        for num_bought, (negative_survival, index, length) in enumerate(purchases, 1):
            if most < best_rate * seconds:
                break
            tokens -= negative_survival
            drafting = draft.lengthen(candidates[index].drafter, length)
            host = overhead + times.draft_overhead
            positions = view.room.num_rows + num_bought
            seconds = round_seconds(verify(positions), inside=drafting, host=host)
            rate = tokens / seconds
            if rate > best_rate:
                best, best_rate = num_bought, rate
        return best


class _DraftSeconds:
    """Seconds of drafting as drafts grow: every drafter takes a step for each token of its longest
    draft, priced by how many requests it drafts for. Drafters inside the step work one after the
    other, those beside it at the same time."""

    def __init__(self, candidates: Sequence[DraftCandidate], view: View) -> None:
        curve_of = view.learn.times.curve_of
        drafters = dict.fromkeys(c.drafter for c in candidates)
        self._beside = view.beside
        self._inside = 0.0
        self._longest = 0.0
        self._curves = {d: curve_of(d) for d in drafters}
        self._seconds = dict.fromkeys(drafters, 0.0)
        self._batch = dict.fromkeys(drafters, 0)
        self._steps = dict.fromkeys(drafters, 0)

    def lengthen(self, drafter: str, length: int) -> float:
        """Seconds of all drafting, once a draft of this drafter is `length` tokens long."""
        if not 1 < length <= self._steps[drafter]:
            self._batch[drafter] += length == 1
            steps = self._steps[drafter] = max(self._steps[drafter], length)
            seconds = steps * self._curves[drafter](self._batch[drafter])
            if drafter in self._beside:
                self._longest = max(self._longest, seconds)
            else:
                self._inside += seconds - self._seconds[drafter]
            self._seconds[drafter] = seconds
        return self._inside + self._longest


POLICY = Throughput
