"""TensorRT-LLM's default rule: admit only what can never have to be evicted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.core.policies.admission.parts.token_budget import check_budget
from penstock.core.policies.base import AdmissionPolicy
from penstock.core.policies.options import PositiveInt
from penstock.core.queues import OrderName
from penstock.core.state import RequestState
from penstock.core.step import Step


class GuaranteedNoEvict(AdmissionPolicy):
    """Memory is set aside for the longest output that a request may make (`max_tokens`). Decoding
    requests come first in a step, then prompts, the last in part."""

    name: ClassVar[str] = "guaranteed_no_evict"

    @dataclass(frozen=True, slots=True)
    class Options:
        """max_num_tokens: positions a step.
        max_batch_size: requests running at once.
        order: in which order waiting requests are tried."""

        max_num_tokens: PositiveInt = 8192
        max_batch_size: PositiveInt = 256
        order: OrderName = "arrival"

        def __post_init__(self) -> None:
            check_budget(max_num_tokens=self.max_num_tokens, max_batch_size=self.max_batch_size)

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.order = options.order
        self.token_budget = options.max_num_tokens

    def compose(self, step: Step) -> None:
        options = self.options
        budget = options.max_num_tokens
        budget -= step.schedule_decodes(budget)
        budget -= min(step.num_reserved, budget // 2)
        budget -= step.schedule_prefills(budget)
        if step.waiting and len(step.running) < options.max_batch_size:
            self._admit(step, budget)

    def is_steady(self, step: Step) -> bool:
        return True

    def shortage(self, step: Step, state: RequestState) -> tuple[int, int]:
        _, places = step.shortage(state, self.options.max_batch_size)
        left = step.num_free_when_grown(_most_tokens)
        return step.pool.blocks_for(_most_tokens(state)) - left, places

    def _admit(self, step: Step, budget: int) -> None:
        queue = step.waiting.queue()
        left = step.num_free_when_grown(_most_tokens)
        while budget > 0 and len(step.running) < self.options.max_batch_size:
            state = queue.first
            if state is None:
                return
            tokens = min(step.num_missing_tokens(state), budget)
            left -= step.pool.blocks_for(_most_tokens(state))
            if left < 0 or not step.can_admit(state, tokens):
                return
            step.admit(state, tokens)
            budget -= tokens


def _most_tokens(state: RequestState) -> int:
    return state.request.prompt_len + state.request.max_tokens


POLICY = GuaranteedNoEvict
