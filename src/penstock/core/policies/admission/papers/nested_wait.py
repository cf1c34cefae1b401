"""Nested WAIT (Algorithm 2): thresholds by segment, output lengths unknown."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sized
from dataclasses import dataclass
from typing import ClassVar

from penstock.core.policies.admission.papers.wait import check_thresholds
from penstock.core.policies.admission.parts.gate import Gate, schedule_running
from penstock.core.policies.base import AdmissionPolicy
from penstock.core.policies.options import PositiveFloat, PositiveInt
from penstock.core.state import RequestState
from penstock.core.step import Step

_SLACK = 1.5  # factor of its threshold that a segment may hold, gated; chosen by hand


class NestedWait(AdmissionPolicy):
    """Batches segments 1 to i, for the largest i whose segments all have their thresholds waiting.

    Prompts wait for segment 1, paused requests for the others; each segment gives up to its
    threshold a stage. Segment i holds the stages (output tokens) up to `segment_ends[i]`. Nothing
    is preempted: paused requests can fill the memory, and the deadlock is reported.

    Gated, prompts are admitted in waves of the first threshold and decoding never waits. Prompts
    are held back while a segment holds more than 1.5 times its threshold a stage. Memory is
    reserved for each request up to its segment's end."""

    name: ClassVar[str] = "nested_wait"
    cuts_prompts = False

    @dataclass(frozen=True, slots=True)
    class Options:
        # Output tokens at which a request leaves each segment, rising.
        segment_ends: tuple[PositiveInt, ...] = (64, 256, 1024)
        thresholds: tuple[PositiveInt | PositiveFloat, ...] = (1, 1, 1)  # n_i of each segment
        gated: bool = False  # decoding never waits; allows fractional thresholds
        max_num_batched_tokens: PositiveInt = 2048  # positions a step, gated

        def __post_init__(self) -> None:
            check_thresholds(self.segment_ends, self.thresholds, self.gated)

    options: Options

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.may_idle = not options.gated
        self.cuts_prompts = options.gated
        # The papers have no drafts.
        self.token_budget = options.max_num_batched_tokens if options.gated else 0
        self._thresholds = [int(n) for n in options.thresholds]
        self._gate = Gate(options.thresholds[0], self._expected)

    def compose(self, step: Step) -> None:
        if self.options.gated:
            self._compose_gated(step)
        else:
            self._compose_literally(step)

    def is_steady(self, step: Step) -> bool:
        if not self.options.gated:
            return False
        return self._gate.is_full and not step.waiting and not step.num_preempted

    # --- gated ----------------------------------------------------------------------------------

    def _compose_gated(self, step: Step) -> None:
        budget = schedule_running(step, self.options.max_num_batched_tokens)
        if step.num_preempted:
            return
        gate, queue = self._gate, step.waiting.queue()
        gate.earn()
        if step.num_tokens and (gate.waits(step, queue) or self._is_over(step)):
            return
        num = before = len(queue)
        gate.admit(step, queue, int(gate.credit) if step.num_tokens else num, budget)
        gate.credit = max(0.0, gate.credit - (before - len(queue)))

    def _is_over(self, step: Step) -> bool:
        held = [0] * len(self.options.thresholds)
        for state in step.running.values():
            held[self._segment_of(state)] += 1
        start = 0
        for number, end, most in zip(
            held, self.options.segment_ends, self.options.thresholds, strict=True
        ):
            if number > _SLACK * most * (end - start) + 1:
                return True
            start = end
        return False

    def _segment_of(self, state: RequestState) -> int:
        ends = self.options.segment_ends
        return min(bisect.bisect_right(ends, state.num_output_tokens), len(ends) - 1)

    def _expected(self, state: RequestState) -> int:
        """Return the tokens that the request holds at the end of its segment."""
        end = self.options.segment_ends[self._segment_of(state)]
        return state.request.prompt_len + max(end, state.num_output_tokens)

    # --- to the letter --------------------------------------------------------------------------

    def _compose_literally(self, step: Step) -> None:
        thresholds = self._thresholds
        paused = self._pause(step)
        waiting: list[Sized] = [step.waiting.queue(), *paused[1:]]
        num = 0
        while num < len(thresholds) and len(waiting[num]) >= thresholds[num]:
            num += 1
        for segment in range(num):
            for state in paused[segment][: thresholds[segment]] if segment else ():
                self._enter(step, state, segment)
        # Requests nearest to their end free memory first.
        for segment in reversed(range(num)):
            if step.can_schedule_decodes(segment):
                step.schedule_decodes(step.num_decodes(segment), segment)
        if num:
            self._admit(step, thresholds[0])
        if not step.num_tokens and (step.running or step.waiting):
            self._explain(step, num)

    def _pause(self, step: Step) -> list[list[RequestState]]:
        """Return requests between segments, by the segment they wait for, oldest first."""
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
