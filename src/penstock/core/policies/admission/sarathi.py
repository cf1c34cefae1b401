"""Sarathi-Serve's rule: decodes first, then chunks of prefill in what the budget leaves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.core.options import PositiveInt, Share
from penstock.core.order import OrderName
from penstock.core.policies.admission import AdmissionPolicy
from penstock.core.state import RequestState
from penstock.core.step import Step


class Sarathi(AdmissionPolicy):
    """Chunked prefill that never stalls decoding.

    Every step takes all decoding requests, goes on with the prompt that is partly computed, then
    admits waiting ones, the last in part. A request is admitted only where memory holds its whole
    prompt. When memory runs out the newest running request is preempted and recomputed.
    """

    name: ClassVar[str] = "sarathi"

    @dataclass(frozen=True, slots=True)
    class Options:
        """token_budget: positions a step, decoding ones included.
        max_num_seqs: requests running at once.
        watermark: share of the KV blocks that admission leaves free.
        order: in which order waiting requests are tried."""

        token_budget: PositiveInt = 512
        max_num_seqs: PositiveInt = 256
        watermark: Share = 0.01
        order: OrderName = "arrival"

        def __post_init__(self) -> None:
            if self.token_budget < self.max_num_seqs:
                raise ValueError(
                    "token_budget must be at least max_num_seqs, "
                    f"not {self.token_budget} against {self.max_num_seqs}"
                )

    def __init__(self, options: Options) -> None:
        self.options = options
        self.order = options.order

    def compose(self, step: Step) -> None:
        options = self.options
        budget = options.token_budget
        budget -= step.schedule_decodes(budget)
        budget -= min(step.num_reserved, budget // 2)
        budget -= step.schedule_prefills(budget)
        if not step.num_preempted:
            kept_free = self._kept_free(step)
            step.admit_in_order(budget, options.max_num_seqs, kept_free)

    def is_steady(self, step: Step) -> bool:
        return not step.num_preempted

    def shortage(self, step: Step, state: RequestState) -> tuple[int, int]:
        return step.shortage(state, self.options.max_num_seqs, self._kept_free(step))

    def _kept_free(self, step: Step) -> int:
        return int(self.options.watermark * step.pool.num_blocks)

    def draft_budget(self, num_tokens: int) -> int:
        return self.options.token_budget - num_tokens


POLICY = Sarathi
