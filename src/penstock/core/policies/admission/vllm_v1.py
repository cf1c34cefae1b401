"""vLLM's V1 rule: running requests first, mixed batches, chunked prefill, newest preempted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.core.options import PositiveInt, Share
from penstock.core.order import OrderName
from penstock.core.policies.admission import AdmissionPolicy
from penstock.core.state import RequestState
from penstock.core.step import Step


class VllmV1(AdmissionPolicy):
    """First come, first served under one token budget.

    Running requests take their due tokens, those that decode first: the only one that can be in
    the middle of its prompt is the newest. Then waiting ones are admitted while budget,
    `max_num_seqs` and memory last. When memory runs out the newest running request is preempted.
    Decoding requests reserve room for their drafts, so that a long prompt does not stop
    speculation; drafts in turn leave at least half of the remaining budget to prompts, and never
    displace another request's next token.
    """

    name: ClassVar[str] = "vllm_v1"

    @dataclass(frozen=True, slots=True)
    class Options:
        """max_num_batched_tokens: positions of the target a step, drafts included.
        max_num_seqs: requests running at once.
        watermark: share of the KV blocks that admission leaves free.
        reserve_full_prompt: whether memory must hold all of a prompt, not only its first chunk.
            Without it a long prompt that meets a full memory is begun, preempted and begun again,
            as it was in vLLM before 0.19.
        order: in which order waiting requests are tried."""

        max_num_batched_tokens: PositiveInt = 2048
        max_num_seqs: PositiveInt = 256
        watermark: Share = 0.01
        reserve_full_prompt: bool = True
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
        options = self.options
        budget = options.max_num_batched_tokens
        budget -= step.schedule_decodes(budget)
        budget -= min(step.num_reserved, budget // 2)
        budget -= step.schedule_prefills(budget)
        if not step.num_preempted:
            kept_free = self._kept_free(step)
            step.admit_in_order(
                budget, options.max_num_seqs, kept_free, whole=options.reserve_full_prompt
            )

    def is_steady(self, step: Step) -> bool:
        return not step.num_preempted

    def shortage(self, step: Step, state: RequestState) -> tuple[int, int]:
        return step.shortage(state, self.options.max_num_seqs, self._kept_free(step))

    def _kept_free(self, step: Step) -> int:
        return int(self.options.watermark * step.pool.num_blocks)

    def draft_budget(self, num_tokens: int) -> int:
        return self.options.max_num_batched_tokens - num_tokens


POLICY = VllmV1
