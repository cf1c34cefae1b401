"""Prompts admitted in waves while decoding never waits, for gated thresholds."""

from __future__ import annotations

from collections.abc import Callable

from penstock.core.queues import ArrivalQueue
from penstock.core.state import RequestState
from penstock.core.step import Step

_MAX_WAIT_S = 0.5  # A prompt that has waited this long is admitted without its wave; chosen by hand


class Gate:
    """Admits one queue's prompts in waves of `threshold` an iteration, or a fraction.

    A request is admitted only if memory holds what it and the running ones should grow to."""

    def __init__(self, threshold: float, expected: Callable[[RequestState], int]) -> None:
        """Create a gate; `expected` returns the tokens that a request holds in the end."""
        self.threshold = threshold
        self._expected = expected
        self.credit = 0.0

    @property
    def is_full(self) -> bool:
        """True if another iteration adds nothing to the credit."""
        return self.credit >= self.threshold + 1

    def earn(self) -> None:
        self.credit = min(self.credit, 1.0) + self.threshold

    def waits(self, step: Step, queue: ArrivalQueue) -> bool:
        """Return whether the queue has too few prompts for a wave, and none that is overdue."""
        if queue.oldest is None:
            return True
        due = queue.oldest.request.arrival_time + _MAX_WAIT_S
        if len(queue) >= self.threshold or step.now >= due:
            return False
        step.wake_at = due if step.wake_at is None else min(due, step.wake_at)
        return True

    def admit(self, step: Step, queue: ArrivalQueue, num: int, budget: int) -> int:
        """Admit up to `num` prompts, the last in part; return their tokens in this step."""
        before = step.num_tokens
        while num > 0 and budget > 0:
            state = queue.first
            if state is None:
                break
            grown = step.pool.blocks_for(self._expected(state))
            if step.running and step.num_free_when_grown(self._expected) < grown:
                break
            tokens = min(step.num_missing_tokens(state), budget)
            if not step.can_admit(state, tokens):
                break
            step.admit(state, tokens)
            num -= 1
            budget -= tokens
        return step.num_tokens - before


def schedule_running(step: Step, max_num_batched_tokens: int) -> int:
    """Schedule decoding requests, then begun prompts; return the rest of the budget."""
    budget = max(max_num_batched_tokens, step.num_decodes())
    budget -= step.schedule_decodes(budget)
    return budget - step.schedule_prefills(budget)
