"""vLLM's V1 rule: running requests first, mixed batches, chunked prefill, newest preempted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.core.state import RequestState
from penstock.core.step import Step
from penstock.core.types import Status


class VllmV1:
    """First come, first served under one token budget.

    Running requests take their due tokens in order of arrival, then waiting ones are admitted while
    budget, `max_num_seqs` and memory last. When memory runs out the newest running request is
    preempted. Decoding requests reserve room for their drafts, so that a long prompt does not stop
    speculation; drafts in turn leave at least half of the remaining budget to prompts, and never
    displace another request's next token.
    """

    name: ClassVar[str] = "vllm_v1"

    @dataclass(frozen=True, slots=True)
    class Options:
        """max_num_batched_tokens: positions of the target a step, drafts included.
        max_num_seqs: requests running at once.
        watermark: share of the KV blocks that admission leaves free."""

        max_num_batched_tokens: int = 2048
        max_num_seqs: int = 256
        watermark: float = 0.01

        def __post_init__(self) -> None:
            if self.max_num_seqs < 1 or self.max_num_batched_tokens < self.max_num_seqs:
                raise ValueError(
                    "max_num_seqs must be at least 1 and max_num_batched_tokens at least "
                    f"max_num_seqs, not {self.max_num_seqs} and {self.max_num_batched_tokens}"
                )
            if not 0 <= self.watermark < 1:
                raise ValueError(f"watermark must be in [0, 1), not {self.watermark}")

    def __init__(self, options: Options) -> None:
        self.options = options

    def compose(self, step: Step) -> None:
        budget = self._schedule_running(step)
        if not step.num_preempted:
            self._admit_waiting(step, budget)

    def draft_budget(self, num_tokens: int) -> int:
        return self.options.max_num_batched_tokens - num_tokens

    def _schedule_running(self, step: Step) -> int:
        """Returns the tokens that new requests may take."""
        budget = self.options.max_num_batched_tokens
        reserved = 0
        for state in list(step.running):
            if state.status is not Status.RUNNING or not step.may_run(state):
                continue
            due = state.num_due_tokens
            tokens = min(due, budget if due == 1 else budget - min(reserved, budget // 2))
            if tokens and self._make_room(step, state, tokens):
                step.schedule(state, tokens)
                budget -= tokens
                reserved += step.draft_reserve(state)
        return budget - min(reserved, budget // 2)

    def _make_room(self, step: Step, state: RequestState, tokens: int) -> bool:
        while not step.can_schedule(state, tokens):
            victim = next((s for s in reversed(step.running) if step.can_preempt(s)), None)
            if victim is None:
                return False
            step.preempt(victim)
            if victim is state:
                return False
        return True

    def _admit_waiting(self, step: Step, budget: int) -> None:
        kept_free = int(self.options.watermark * step.pool.num_blocks)
        while step.waiting and budget > 0 and len(step.running) < self.options.max_num_seqs:
            state = step.waiting[0]
            cached = len(step.cached_blocks(state)) * step.pool.block_size
            tokens = min(state.num_known_tokens - cached, budget)
            spare = kept_free if step.running else 0
            if not step.can_admit(state, tokens, spare):
                break
            step.admit(state, tokens)
            budget -= tokens


POLICY = VllmV1
