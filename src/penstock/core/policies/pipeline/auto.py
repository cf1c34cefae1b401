"""Drafts inside the target's step, beside it, or in micro-batches, by step times."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from penstock.core.policies.base import Pipeline, View
from penstock.core.policies.options import Probability
from penstock.core.policies.pipeline.asynchronous import Asynchronous
from penstock.core.policies.pipeline.micro_batches import MicroBatches
from penstock.core.policies.pipeline.parts.planner import (
    MIN_GAIN,
    MOST_MICRO_BATCHES,
    Round,
    best_num,
    cycle_seconds,
    round_of,
    spin_num,
)
from penstock.core.state import RequestState
from penstock.core.types import StepResult

# Chosen by hand.
_MIN_CHANGED_SHARE = 0.1
"""Share of the batch that must have come, gone or changed drafters for a new decision."""
_LENGTH_WEIGHT = 0.1  # of a draft in the mean draft length
_DECIDE_EVERY_STEPS = 64  # steps to the next decision if nothing changed


class Auto(Pipeline):
    """Uses the number of micro-batches with the shortest predicted cycle.

    num: 0: local drafters draft inside the target's step; 1: beside it, as draft servers always do;
    the target waits as in `async`. More: micro-batches, not with draft servers. The prediction of
    lanes is corrected by what their rounds took."""

    name: ClassVar[str] = "auto"

    @dataclass(frozen=True, slots=True)
    class Options:
        # Spin's heuristic (`spin_num`) in place of the cycle, in lanes from the start.
        drop: Probability | None = None

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._is_spin = options.drop is not None
        self.num = int(self._is_spin)
        self._inner = self._new_inner()
        self._lengths: dict[str, float] = {}
        self._decided: dict[str, float] = {}
        self._num_steps = 0
        self._last_end = math.inf
        self._predicted = 0.0

    @property
    def drafts_beside(self) -> bool:
        return self.num > 0

    def divide(self, states: Sequence[RequestState]) -> None:
        self._inner.divide(states)

    def next_drafts(self, lane: str, due: Sequence[RequestState]) -> Sequence[RequestState]:
        return self._inner.next_drafts(lane, due)

    def hold_until(
        self, ready: Sequence[RequestState], pending: Sequence[RequestState], view: View
    ) -> float | None:
        return self._inner.hold_until(ready, pending, view)

    def joins(self, state: RequestState) -> bool:
        return self._inner.joins(state)

    def stepped(self, running: Iterable[RequestState], view: View, result: StepResult) -> None:
        if not (self._is_spin or any(d.has_lane for d in view.drafters.values())):
            return
        self._num_steps += 1
        running = list(running)
        self._compare(result, view, is_idle=not running)
        drafter_of = {s.request.id: s.drafter for s in running if s.num_output_tokens > 1}
        for verdict in result.verdicts:
            drafter = verdict.drafter or drafter_of.get(verdict.request_id)
            if drafter is not None:
                length = self._lengths.setdefault(drafter, verdict.num_proposed)
                length += _LENGTH_WEIGHT * (verdict.num_proposed - length)
                self._lengths[drafter] = length
        drafting = [s for s in running if s.is_decoding and s.drafter in self._lengths]
        loads = Counter(s.drafter for s in drafting if s.drafter in view.drafters)
        positions = {n: num * (1 + self._lengths[n]) for n, num in loads.items() if n is not None}
        if positions and self._has_changed(positions):
            self._decided, self._num_steps = positions, 0
            work = round_of(drafting, view.drafters, view.learn, self._lengths)
            self._decide(work, view.learn.times.slower_beside)

    def _compare(self, result: StepResult, view: View, *, is_idle: bool) -> None:
        """Note how far a step, with the time before it, exceeds its prediction."""
        since = result.finished_at - self._last_end
        self._last_end = math.inf if is_idle else result.finished_at
        predicted = len(result.verdicts) * self._predicted
        has_prompt = result.work is not None and result.work.num_prefill_tokens
        if since > 0 and predicted and not has_prompt:
            view.learn.times.note_round(since / predicted, beside=self.num > 0)

    def _has_changed(self, positions: Mapping[str, float]) -> bool:
        """Return whether drafters' `positions` in a verification have changed enough to decide."""
        before = self._decided
        moved = sum(abs(positions.get(n, 0) - before.get(n, 0)) for n in {*positions, *before})
        return (
            moved > _MIN_CHANGED_SHARE * sum(before.values())
            or self._num_steps >= _DECIDE_EVERY_STEPS
        )

    def _decide(self, work: Round, worse: float) -> None:
        """Keep the present number, unless another is better by more than noise, or none as good."""
        if self.options.drop is not None:
            largest = min(MOST_MICRO_BATCHES, max(work.batches))
            self._use(spin_num(work, largest, self.options.drop))
            return
        batch = sum(work.batches)
        has_servers = any(lane.beside for lane in work.lanes)
        most = 1 if has_servers else max(1, min(MOST_MICRO_BATCHES, batch))

        def seconds(num: int) -> float:
            alone = cycle_seconds(work, num)
            return alone * worse if num else alone

        is_inside = self.num == 0
        best = best_num(seconds, most, MIN_GAIN if is_inside else 0.0)
        if best and self.num <= most and seconds(best) > (1 - MIN_GAIN) * seconds(self.num):
            best = self.num
        self._predicted = cycle_seconds(work, best) / batch
        self._use(best)

    def _use(self, num: int) -> None:
        if num != self.num:
            self.num = num
            self._inner = self._new_inner()

    def _new_inner(self) -> Pipeline:
        if self._is_spin or self.num > 1:
            return MicroBatches(MicroBatches.Options(self.num))
        return Asynchronous()


POLICY = Auto
