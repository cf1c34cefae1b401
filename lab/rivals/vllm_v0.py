"""vLLM's first rule, the WAIT paper's rival: prefill first, never mixed with decoding."""

from __future__ import annotations

from typing import ClassVar

from penstock.core.policies.admission.parts.token_budget import TokenBudget
from penstock.core.step import Step


class VllmV0(TokenBudget):
    """A step is either whole prompts, while one waits and fits, or decoding.

    The first prompt may exceed the budget, which counts prompt tokens alone. If memory runs out the
    newest running request is preempted."""

    name: ClassVar[str] = "vllm_v0"

    def compose(self, step: Step) -> None:
        self._admit_whole(step)
        if not step.num_tokens:
            step.schedule_decodes(self.max_num_seqs)

    def _admit_whole(self, step: Step) -> None:
        kept_free = self.kept_free(step)
        queue = step.waiting.queue()
        while len(step.running) < self.max_num_seqs:
            state = queue.first
            if state is None:
                return
            tokens = step.num_missing_tokens(state)
            if step.num_tokens and step.num_tokens + tokens > self.token_budget:
                return
            if not step.can_admit(state, tokens, kept_free if step.running else 0):
                return
            step.admit(state, tokens)


POLICY = VllmV0
