"""Draft lengths that maximise tokens per second under measured step times (design 4.4, a = 0).

The longest drafts are bought in order of survival probability, and the purchase stops where the
expected tokens per second of the whole step are greatest; where speculation does not pay that is
at nothing.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from penstock.core.allocation import DraftCandidate, StepWork
from penstock.core.state import RequestState


class Throughput:
    """As much speculation as the step-time model says is worth its time."""

    name: ClassVar[str] = "throughput"

    @dataclass(frozen=True, slots=True)
    class Options:
        """k_max: most draft tokens for one request in a round.
        overhead: seconds a round costs beside drafting and verifying."""

        k_max: int = 8
        overhead: float = 3e-4

        def __post_init__(self) -> None:
            if self.k_max < 0 or self.overhead < 0:
                raise ValueError(
                    f"k_max and overhead must not be negative, not {self.k_max}, {self.overhead}"
                )

    def __init__(self, options: Options) -> None:
        self.options = options

    def reserve(self, state: RequestState) -> int:
        return self.options.k_max

    def allocate(self, candidates: Sequence[DraftCandidate], work: StepWork) -> list[int]:
        order = self._purchases(candidates, work)
        lengths = [0] * len(candidates)
        best = list(lengths)
        best_rate = self._rate(candidates, lengths, 0.0, work)
        gain = 0.0
        for index, survival in order:
            lengths[index] += 1
            gain += survival
            rate = self._rate(candidates, lengths, gain, work)
            if rate > best_rate:
                best_rate, best = rate, list(lengths)
        for candidate, length in zip(candidates, best, strict=True):
            if length == 0:
                work.estimators.acceptance.fade(candidate.state.request.id, candidate.drafter)
        return best

    def _purchases(
        self, candidates: Sequence[DraftCandidate], work: StepWork
    ) -> list[tuple[int, float]]:
        """(candidate, probability that this draft token is accepted), greatest first. Survival
        falls along a draft, so greedy order never buys token s + 1 before token s."""
        heap = []
        for index, candidate in enumerate(candidates):
            rate = work.estimators.acceptance.mean(candidate.state.request.id, candidate.drafter)
            limit = min(candidate.limit, self.options.k_max)
            if limit > 0:
                heap.append((-rate, index, limit, rate))
        heapq.heapify(heap)
        order: list[tuple[int, float]] = []
        while heap and len(order) < work.budget:
            survival, index, left, rate = heap[0]
            order.append((index, -survival))
            if left > 1:
                heapq.heapreplace(heap, (survival * rate, index, left - 1, rate))
            else:
                heapq.heappop(heap)
        return order

    def _rate(
        self,
        candidates: Sequence[DraftCandidate],
        lengths: Sequence[int],
        gain: float,
        work: StepWork,
    ) -> float:
        times = work.estimators.step_times
        seconds = self.options.overhead + times.target(work.num_rows + sum(lengths))
        batch = Counter(c.drafter for c, n in zip(candidates, lengths, strict=True) if n)
        for drafter, size in batch.items():
            steps = max(n for c, n in zip(candidates, lengths, strict=True) if c.drafter == drafter)
            seconds += steps * times.draft_seconds(drafter, size)
        return (work.num_sampled + gain) / seconds


POLICY = Throughput
