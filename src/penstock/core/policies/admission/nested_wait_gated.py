"""Nested WAIT that serves: only prefill is gated, growth is reserved by segment."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Annotated, ClassVar

from penstock.core.policies.admission import AdmissionPolicy
from penstock.core.policies.admission.papers.wait import check_thresholds
from penstock.core.policies.options import NonNegativeFloat, PositiveFloat, PositiveInt, Range
from penstock.core.queues import OrderName
from penstock.core.state import RequestState
from penstock.core.step import Step


class NestedWaitGated(AdmissionPolicy):
    """Prompts are admitted in waves of the first threshold, one wave an iteration; whoever runs
    goes on decoding.

    The other thresholds bound what runs: a segment is expected to hold no more than its threshold a
    stage, and prompts are held back while segment i holds more than `slack` times that. A request
    in segment i is taken to grow to the segment's end: memory for that is kept free.
    """

    name: ClassVar[str] = "nested_wait_gated"

    @dataclass(frozen=True, slots=True)
    class Options:
        """segment_ends: output tokens with which a request leaves each segment, rising.
        thresholds: n_i for each segment, requests a stage.
        max_wait: seconds after which a prompt is admitted without its wave.
        slack: how far a segment may be over its threshold.
        max_num_batched_tokens: positions a step.
        order: in which order waiting requests are tried."""

        segment_ends: tuple[PositiveInt, ...] = (64, 256, 1024)
        thresholds: tuple[PositiveFloat, ...] = (1.0, 1.0, 1.0)
        max_wait: NonNegativeFloat = 0.5
        slack: Annotated[float, Range(at_least=1)] = 1.5
        max_num_batched_tokens: PositiveInt = 2048
        order: OrderName = "arrival"

        def __post_init__(self) -> None:
            check_thresholds(self.segment_ends, self.thresholds)

    def __init__(self, options: Options) -> None:
        self.options = options
        self.order = options.order
        self._credit = 0.0

    def draft_budget(self, num_tokens: int) -> int:
        return self.options.max_num_batched_tokens - num_tokens

    def compose(self, step: Step) -> None:
        budget = max(self.options.max_num_batched_tokens, step.num_decodes())
        budget -= step.schedule_decodes(budget)
        budget -= step.schedule_prefills(budget)
        if step.num_preempted:
            return
        threshold = self.options.thresholds[0]
        self._credit = min(self._credit + threshold, max(threshold, 1.0))
        queue = step.waiting.queue()
        if queue.oldest is None:
            return
        due = queue.oldest.request.arrival_time + self.options.max_wait
        if step.num_tokens and len(queue) < threshold and step.now < due:
            step.wake_at = due
            return
        num = int(self._credit) if step.num_tokens else len(queue)
        before = len(queue)
        if not step.num_tokens or not self._is_full(step):
            self._admit(step, num, budget)
        self._credit = max(0.0, self._credit - (before - len(queue)))

    def is_steady(self, step: Step) -> bool:
        has_credit = self._credit >= max(self.options.thresholds[0], 1.0)
        return has_credit and not step.waiting and not step.num_preempted

    def _is_full(self, step: Step) -> bool:
        """Whether some segment holds more than its thresholds explain."""
        held = [0] * len(self.options.thresholds)
        for state in step.running.values():
            held[self._segment_of(state)] += 1
        start = 0
        for number, end, most in zip(
            held, self.options.segment_ends, self.options.thresholds, strict=True
        ):
            if number > self.options.slack * most * (end - start) + 1:
                return True
            start = end
        return False

    def _admit(self, step: Step, num: int, budget: int) -> None:
        queue = step.waiting.queue()
        while num > 0 and budget > 0:
            state = queue.first
            if state is None:
                return
            grown = step.pool.blocks_for(self._expected(state))
            if step.running and step.num_free_when_grown(self._expected) < grown:
                return
            tokens = min(step.num_missing_tokens(state), budget)
            if not step.can_admit(state, tokens):
                return
            step.admit(state, tokens)
            num -= 1
            budget -= tokens

    def _segment_of(self, state: RequestState) -> int:
        ends = self.options.segment_ends
        return min(bisect.bisect_right(ends, state.num_output_tokens), len(ends) - 1)

    def _expected(self, state: RequestState) -> int:
        """Tokens that the request holds at the end of its segment."""
        end = self.options.segment_ends[self._segment_of(state)]
        return state.request.prompt_len + max(end, state.num_output_tokens)


POLICY = NestedWaitGated
