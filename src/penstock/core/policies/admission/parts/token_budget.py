"""Base of vLLM's and Sarathi-Serve's rules: one budget of positions a step."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.core.policies.base import AdmissionPolicy
from penstock.core.policies.declared import LimitOptions
from penstock.core.policies.options import PositiveInt
from penstock.core.queues import OrderName
from penstock.core.state import RequestState
from penstock.core.step import Step


def check_budget(**limits: int) -> None:
    """Raise ValueError if the first limit, of positions, is below the second, of requests."""
    (budget, most), (requests, num) = limits.items()
    if most < num:
        raise ValueError(f"{budget} must be at least {requests}, not {most} against {num}")


class TokenBudget(AdmissionPolicy):
    """First come, first served under one token budget.

    Running requests take their due tokens, decodes first; then waiting ones are admitted, the last
    in part. If memory runs out the newest running request is preempted. Decoding requests reserve
    room for drafts, which leave at least half of the remaining budget to prompts."""

    limits = LimitOptions("max_num_batched_tokens", "max_num_seqs")
    admits_whole = True
    """Memory must hold all of a prompt, not only its first chunk."""
    watermark = 0.01
    """Share of the KV blocks that admission leaves free: vLLM's default."""

    @dataclass(frozen=True, slots=True)
    class Options:
        max_num_batched_tokens: PositiveInt = 2048  # target positions a step, drafts included
        max_num_seqs: PositiveInt = 256  # requests running at once
        order: OrderName = "arrival"  # of waiting requests

        def __post_init__(self) -> None:
            check_budget(
                max_num_batched_tokens=self.max_num_batched_tokens, max_num_seqs=self.max_num_seqs
            )

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.order = options.order
        self.token_budget = options.max_num_batched_tokens
        self.max_num_seqs = options.max_num_seqs

    def compose(self, step: Step) -> None:
        budget = self.token_budget
        budget -= step.schedule_decodes(budget)
        budget -= min(step.num_reserved, budget // 2)
        budget -= step.schedule_prefills(budget)
        if not step.num_preempted:
            kept_free = self.kept_free(step)
            step.admit_in_order(budget, self.max_num_seqs, kept_free, whole=self.admits_whole)

    def is_steady(self, step: Step) -> bool:
        return not step.num_preempted

    def shortage(self, step: Step, state: RequestState) -> tuple[int, int]:
        return step.shortage(state, self.max_num_seqs, self.kept_free(step))

    def kept_free(self, step: Step) -> int:
        """Return the blocks that admission leaves free."""
        return int(self.watermark * step.pool.num_blocks)
