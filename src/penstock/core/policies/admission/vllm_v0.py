"""vLLM's first rule, the WAIT paper's rival: prefill first, never mixed with decoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.core.options import PositiveInt, Share
from penstock.core.order import OrderName
from penstock.core.policies.admission import AdmissionPolicy
from penstock.core.state import RequestState
from penstock.core.step import Step


class VllmV0(AdmissionPolicy):
    """A step is either whole prompts or decoding.

    While somebody waits and fits, the step takes as many whole prompts as budget, `max_num_seqs`
    and memory allow; the first may be longer than the budget. Otherwise every running request
    decodes, and where memory runs out the newest is preempted and recomputed.
    """

    name: ClassVar[str] = "vllm_v0"

    @dataclass(frozen=True, slots=True)
    class Options:
        """max_num_batched_tokens: prompt tokens a step.
        max_num_seqs: requests running at once.
        watermark: share of the KV blocks that admission leaves free.
        order: in which order waiting requests are tried."""

        max_num_batched_tokens: PositiveInt = 2048
        max_num_seqs: PositiveInt = 256
        watermark: Share = 0.01
        order: OrderName = "arrival"

        def __post_init__(self) -> None:
            if self.max_num_batched_tokens < self.max_num_seqs:
                raise ValueError(
                    "max_num_batched_tokens must be at least max_num_seqs, "
                    f"not {self.max_num_batched_tokens} against {self.max_num_seqs}"
                )

    def __init__(self, options: Options) -> None:
        self.options = options
        self.order = options.order

    def compose(self, step: Step) -> None:
        self._admit_whole(step)
        if not step.num_tokens:
            step.schedule_decodes(self.options.max_num_seqs)

    def is_steady(self, step: Step) -> bool:
        return not step.num_preempted

    def shortage(self, step: Step, state: RequestState) -> tuple[int, int]:
        return step.shortage(state, self.options.max_num_seqs, self._kept_free(step))

    def _kept_free(self, step: Step) -> int:
        return int(self.options.watermark * step.pool.num_blocks)

    def draft_budget(self, num_tokens: int) -> int:
        return self.options.max_num_batched_tokens - num_tokens

    def _admit_whole(self, step: Step) -> None:
        options = self.options
        kept_free = self._kept_free(step)
        queue = step.waiting.queue()
        while len(step.running) < options.max_num_seqs:
            state = queue.first
            if state is None:
                return
            tokens = step.num_missing_tokens(state)
            if step.num_tokens and step.num_tokens + tokens > options.max_num_batched_tokens:
                return
            if not step.can_admit(state, tokens, kept_free if step.running else 0):
                return
            step.admit(state, tokens)


POLICY = VllmV0
