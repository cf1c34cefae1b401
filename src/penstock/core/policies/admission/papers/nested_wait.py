"""Nested WAIT (Algorithm 2), to the letter: thresholds by segment, output lengths unknown.

Requests between two segments keep their memory while they wait, so that paused ones can fill it: a
deadlock is reported, not hidden. `nested_wait_gated` is the version that serves.
"""

from __future__ import annotations

import itertools
from collections.abc import Sized
from dataclasses import dataclass
from typing import ClassVar

from penstock.core.policies.admission import AdmissionPolicy
from penstock.core.policies.admission.papers.wait import check_thresholds
from penstock.core.policies.options import PositiveInt
from penstock.core.state import RequestState
from penstock.core.step import Step


class NestedWait(AdmissionPolicy):
    """The batch is made of segments 1 to i, for the largest i for which every one of them has its
    threshold waiting at its first stage: prompts for segment 1, paused requests for the others.
    Each gives up to its threshold a stage. Nothing is ever preempted.

    Segment i holds the stages (output tokens) up to `segment_ends[i]`; what is longer than the last
    end stays in the last segment.
    """

    name: ClassVar[str] = "nested_wait"
    cuts_prompts: ClassVar[bool] = False
    knows_tenants: ClassVar[bool] = False
    serves_instead: ClassVar[str | None] = "nested_wait_gated"

    @dataclass(frozen=True, slots=True)
    class Options:
        """segment_ends: output tokens with which a request leaves each segment, rising.
        thresholds: n_i for each segment."""

        segment_ends: tuple[PositiveInt, ...] = (64, 256, 1024)
        thresholds: tuple[PositiveInt, ...] = (1, 1, 1)

        def __post_init__(self) -> None:
            check_thresholds(self.segment_ends, self.thresholds)

    def __init__(self, options: Options) -> None:
        self.options = options

    def draft_budget(self, num_tokens: int) -> int:
        """The paper knows no drafts."""
        return 0

    def compose(self, step: Step) -> None:
        thresholds = self.options.thresholds
        paused = self._pause(step)
        waiting: list[Sized] = [step.waiting.queue(), *paused[1:]]
        num = 0
        while num < len(thresholds) and len(waiting[num]) >= thresholds[num]:
            num += 1
        for segment in range(num):
            for state in paused[segment][: thresholds[segment]] if segment else ():
                self._enter(step, state, segment)
        # What is nearest to its end frees memory first.
        for segment in reversed(range(num)):
            if step.can_schedule_decodes(segment):
                step.schedule_decodes(step.num_decodes(segment), segment)
        if num:
            self._admit(step, thresholds[0])
        if not step.num_tokens and (step.running or step.waiting):
            self._explain(step, num)

    def _pause(self, step: Step) -> list[list[RequestState]]:
        """Requests that wait between segments, by the segment they wait for, oldest first."""
        ends = self.options.segment_ends
        paused: list[list[RequestState]] = [[] for _ in ends]
        for state in step.ungrouped():
            segment = step.key_of(state)
            if isinstance(segment, int) and state.is_decoding:
                last = segment == len(ends) - 1
                if not last and state.num_output_tokens >= ends[segment]:
                    segment = ("before", segment + 1)
                    step.assign(state, segment)
            if isinstance(segment, tuple):
                paused[segment[1]].append(state)
        return paused

    def _enter(self, step: Step, state: RequestState, segment: int) -> None:
        ends = self.options.segment_ends
        step.assign(state, segment, ends[segment] if segment < len(ends) - 1 else None)

    def _admit(self, step: Step, threshold: int) -> None:
        for state in list(itertools.islice(step.waiting.queue(), threshold)):
            missing = step.num_missing_tokens(state)
            if not step.can_admit(state, missing):
                return
            self._enter(step, state, 0)
            step.admit(state, missing)

    def _explain(self, step: Step, num: int) -> None:
        held = f"{len(step.running)} paused requests hold the memory" if step.running else ""
        if num:
            step.stalled = f"deadlock: {held} and no segment can go on"
        else:
            step.stalled = (
                f"{len(step.waiting)} prompts and {len(step.running)} paused requests wait, "
                "not enough for the first segment"
            )


POLICY = NestedWait
