"""Shortest job first (WAIT paper, appendix A.2): the classical rule, with lengths known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.core.learn import Estimators
from penstock.core.options import PositiveInt, Share
from penstock.core.order import ArrivalQueue, shortest_output_first
from penstock.core.policies.admission import AdmissionPolicy
from penstock.core.state import RequestState
from penstock.core.step import Step


class ShortestJobFirst(AdmissionPolicy):
    """Waiting requests are admitted by their expected output, shortest first; the rest is vLLM's
    rule of today. A request whose client expects nothing counts with its `max_tokens`."""

    name: ClassVar[str] = "sjf"

    @dataclass(frozen=True, slots=True)
    class Options:
        """max_num_batched_tokens: positions a step.
        max_num_seqs: requests running at once.
        watermark: share of the KV blocks that admission leaves free."""

        max_num_batched_tokens: PositiveInt = 2048
        max_num_seqs: PositiveInt = 256
        watermark: Share = 0.01

        def __post_init__(self) -> None:
            if self.max_num_batched_tokens < self.max_num_seqs:
                raise ValueError(
                    "max_num_batched_tokens must be at least max_num_seqs, "
                    f"not {self.max_num_batched_tokens} against {self.max_num_seqs}"
                )

    def __init__(self, options: Options) -> None:
        self.options = options

    def new_queue(self, estimators: Estimators) -> ArrivalQueue:
        return shortest_output_first()

    def compose(self, step: Step) -> None:
        options = self.options
        budget = options.max_num_batched_tokens
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
        return self.options.max_num_batched_tokens - num_tokens


POLICY = ShortestJobFirst
