"""Nested WAIT (Algorithm 2): thresholds by segment, output lengths unknown."""

from __future__ import annotations

import itertools
from collections.abc import Sized
from dataclasses import dataclass
from typing import ClassVar

from penstock.core.policies.admission.papers.wait import check_thresholds
from penstock.core.policies.admission.parts.gate import Gate, schedule_running
from penstock.core.policies.base import AdmissionPolicy, Gauges
from penstock.core.policies.declared import Gauge, LimitOptions, ThresholdOptions
from penstock.core.policies.options import PositiveFloat, PositiveInt
from penstock.core.state import RequestState
from penstock.core.step import Step
from penstock.fluid.live import LiveSegments


class NestedWait(AdmissionPolicy):
    """Batches segments 1 to i, for the largest i whose segments all have their thresholds waiting.

    Prompts wait for segment 1, paused requests for the others; each segment gives up to its
    threshold a stage. Segment i holds the stages (output tokens) up to `segment_ends[i]`. Nothing
    is preempted: paused requests can fill the memory, and the deadlock is reported.

    Gated, prompts are admitted in waves of the first threshold and decoding never waits. Prompts
    are held back while a segment holds more than 1.5 times its threshold a stage, but not where
    nothing else runs. Memory is reserved for each request up to its segment's end. Without
    thresholds they, and the segments, follow the arrivals and lengths that are learned."""

    name: ClassVar[str] = "nested_wait"
    limits = LimitOptions(token_budget="max_num_batched_tokens")
    thresholds = ThresholdOptions("segment", "segment_ends", "thresholds", "gated")
    metrics = (
        Gauge("segment_requests", "Nested WAIT: running requests of a segment.", "segment"),
        Gauge("segment_threshold", "Nested WAIT: requests at a stage of a segment.", "segment"),
        Gauge("segment_end", "Nested WAIT: output tokens at which a segment ends.", "segment"),
    )

    @dataclass(frozen=True, slots=True)
    class Options:
        # Output tokens at which a request leaves each segment, rising.
        segment_ends: tuple[PositiveInt, ...] = (64, 256, 1024)
        # n_i of each segment; none: planned, gated, for the traffic that comes.
        thresholds: tuple[PositiveInt | PositiveFloat, ...] = (1, 1, 1)
        gated: bool = False  # decoding never waits; allows fractional thresholds
        max_num_batched_tokens: PositiveInt = 2048  # positions a step, gated

        def __post_init__(self) -> None:
            planned = (1,) * len(self.segment_ends) if self.gated else ()
            check_thresholds(self.segment_ends, self.thresholds or planned, self.gated)

    options: Options

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.may_idle = not options.gated
        # The papers have no drafts.
        self.token_budget = options.max_num_batched_tokens if options.gated else 0
        thresholds = options.thresholds or (1.0,) * len(options.segment_ends)
        self._segments = LiveSegments(options.segment_ends, thresholds)
        self._gate = Gate(thresholds[0], self._expected)
        self._step: Step | None = None

    @property
    def gauges(self) -> Gauges:
        return {} if self._step is None else self._segments.gauges(self._step.running_lengths())

    def compose(self, step: Step) -> None:
        self._step = step
        compose = self._compose_gated if self.options.gated else self._compose_literally
        compose(step)

    def is_steady(self, step: Step) -> bool:
        is_full = self.options.gated and self._gate.is_full
        return is_full and not step.waiting and not step.num_preempted

    # --- gated ----------------------------------------------------------------------------------

    def _compose_gated(self, step: Step) -> None:
        budget = schedule_running(step, self.options.max_num_batched_tokens)
        if step.num_preempted:
            return
        gate, queue = self._gate, step.waiting.queue()
        if queue and not self.options.thresholds:
            self._plan(step)
        gate.earn()
        if step.num_tokens and (gate.waits(step, queue) or self._is_over(step)):
            return
        num = before = len(queue)
        gate.admit(step, queue, int(gate.credit) if step.num_tokens else num, budget)
        gate.credit = max(0.0, gate.credit - (before - len(queue)))

    def _is_over(self, step: Step) -> bool:
        return self._segments.is_over(step.running_lengths())

    def _plan(self, step: Step) -> None:
        """Plan segments and thresholds anew if the learned traffic has drifted."""
        learn, prompt_len = step.learn, step.learn.traffic.mean_prompt_len
        survival = learn.lengths.survival(step.running_lengths()[:, 1])
        rate = learn.traffic.prompt_tokens_per_s(step.now) / prompt_len
        room = step.pool.capacity_tokens, step.num_places + len(step.running)
        self._segments.follow(learn.times.profile, survival, prompt_len, rate, *room)
        self._gate.threshold = self._segments.thresholds[0]

    def _expected(self, state: RequestState) -> int:
        """Return the tokens that the request holds at the end of its segment."""
        end = min(self._segments.end_of(state.num_output_tokens), state.request.max_tokens)
        return state.request.prompt_len + max(end, state.num_output_tokens)

    # --- to the letter --------------------------------------------------------------------------

    def _compose_literally(self, step: Step) -> None:
        thresholds = [int(n) for n in self._segments.thresholds]
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
        ends = self._segments.ends
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
        last = segment == len(self._segments.ends) - 1
        step.assign(state, segment, None if last else self._segments.ends[segment])

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
