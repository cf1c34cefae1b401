"""Micro-batches with the best throughput by measured step times, or no pipeline."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from penstock.core.policies.base import Pipeline, View
from penstock.core.policies.pipeline.micro_batches import MicroBatches
from penstock.core.policies.pipeline.parts.planner import (
    MOST_MICRO_BATCHES,
    PipelineSetting,
    Round,
    best_setting,
    cycle_seconds,
    round_of,
)
from penstock.core.state import RequestState
from penstock.core.types import StepResult

# Chosen by hand.
_MIN_GAIN = 0.005  # predicted gain from which on the setting is changed
_MIN_CHANGED_SHARE = 0.1
"""Share of the batch that must have come, gone or changed drafters for a new decision."""
_LENGTH_DECAY = 0.9  # weight of the past in the mean draft length
_PACE_DECAY = 0.95  # for predicted and measured step times
_MOST_PACE = 4.0  # most that a step may count over its prediction
_TOLERATED = 1.1  # a pipeline slower than predicted by less is not corrected
_FADING = 2e-4  # share a step by which bad experience with a pipeline fades
_HOST_WEIGHT = 0.1  # weight of a step in the host's mean time
_MOST_HOST_S = 2e-3  # A longer gap between two steps is not the host's work
_DECIDE_EVERY_STEPS = 64  # steps to the next decision if nothing changed


class Auto(Pipeline):
    """Uses the best setting by step times, possibly no pipeline; decides again on changes."""

    name: ClassVar[str] = "auto"

    def __init__(self, options: Pipeline.Options) -> None:
        super().__init__(options)
        self.setting = PipelineSetting()
        self._inner = MicroBatches(MicroBatches.Options(1))
        self._lengths: dict[str, float] = {}
        self._decided: dict[str, float] = {}
        self._num_steps = 0
        self._host: float | None = None
        self._last_end = math.inf
        self._predicted = 0.0
        self._taken = {False: 0.0, True: 0.0}
        self._predicted_by_mode = {False: 0.0, True: 0.0}

    @property
    def drafts_beside(self) -> bool:
        return self.setting.num > 0

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
        self._num_steps += 1
        running = list(running)
        self._learn_pace(result)
        self._learn_host(result, is_idle=not running)
        for verdict in result.verdicts:
            if verdict.drafter is not None:
                length = self._lengths.setdefault(verdict.drafter, verdict.num_proposed)
                length += (1 - _LENGTH_DECAY) * (verdict.num_proposed - length)
                self._lengths[verdict.drafter] = length
        drafting = [s for s in running if s.is_decoding and s.drafter in self._lengths]
        loads = Counter(s.drafter for s in drafting if s.drafter is not None)
        positions = {name: n * (1 + self._lengths[name]) for name, n in loads.items()}
        if positions and self._has_changed(positions):
            self._decided, self._num_steps = positions, 0
            work = round_of(drafting, view.drafters, view.learn, self._lengths, self._host or 0.0)
            self._set(self._choose(work))

    def _learn_pace(self, result: StepResult) -> None:
        """Learn how far steps exceed their prediction; bad experience with a pipeline fades."""
        since, num = result.finished_at - self._last_end, len(result.verdicts)
        beside = self.setting.num > 0
        has_prefill = not all(v.num_proposed for v in result.verdicts)
        if since <= 0 or not num or not self._predicted or has_prefill:
            return
        predicted = num * self._predicted
        self._taken[beside] *= _PACE_DECAY
        self._predicted_by_mode[beside] *= _PACE_DECAY
        self._taken[beside] += min(since, _MOST_PACE * predicted)
        self._predicted_by_mode[beside] += predicted
        if not beside:
            usual = (
                self._predicted_by_mode[True] * self._taken[False] / self._predicted_by_mode[False]
            )
            self._taken[True] += _FADING * (usual - self._taken[True])

    @property
    def _worse(self) -> float:
        """Factor by which a pipeline falls behind its prediction; 1 if untried."""
        pace = {
            beside: self._taken[beside] / predicted if predicted else 1.0
            for beside, predicted in self._predicted_by_mode.items()
        }
        return pace[True] / pace[False] if self._predicted_by_mode[True] else 1.0

    def _learn_host(self, result: StepResult, *, is_idle: bool) -> None:
        """Learn the host's seconds from the gap between two steps without a pipeline."""
        gap = result.started_at - self._last_end
        if self.setting.num == 0 and gap >= 0:
            gap = min(gap, _MOST_HOST_S)
            before = gap if self._host is None else self._host
            self._host = before + _HOST_WEIGHT * (gap - before)
        self._last_end = math.inf if is_idle else result.finished_at

    def _has_changed(self, positions: Mapping[str, float]) -> bool:
        """Return whether drafters' `positions` in a verification have changed enough to decide."""
        before = self._decided
        moved = sum(abs(positions.get(n, 0) - before.get(n, 0)) for n in {*positions, *before})
        return (
            moved > _MIN_CHANGED_SHARE * sum(before.values())
            or self._num_steps >= _DECIDE_EVERY_STEPS
        )

    def _choose(self, work: Round) -> PipelineSetting:
        """Return the present setting, unless another is better by more than noise."""
        most = max(1, min(MOST_MICRO_BATCHES, work.batch))
        worse = self._worse

        def seconds(setting: PipelineSetting) -> float:
            alone = cycle_seconds(work, setting)
            return alone * worse if setting.num and worse > _TOLERATED else alone

        best = best_setting(seconds, most, _MIN_GAIN)
        if self.setting.num <= most and seconds(best) > (1 - _MIN_GAIN) * seconds(self.setting):
            best = self.setting
        self._predicted = cycle_seconds(work, best) / work.batch
        return best

    def _set(self, setting: PipelineSetting) -> None:
        if setting == self.setting:
            return
        self.setting = setting
        self._inner = MicroBatches(MicroBatches.Options(max(1, setting.num)), setting.share)


POLICY = Auto
