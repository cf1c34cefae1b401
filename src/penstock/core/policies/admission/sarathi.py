"""Sarathi-Serve's rule: decodes first, then prefill chunks in the rest of the budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.core.policies.admission.parts.token_budget import TokenBudget, check_budget
from penstock.core.policies.declared import LimitOptions
from penstock.core.policies.options import PositiveInt
from penstock.core.queues import OrderName


class Sarathi(TokenBudget):
    """Chunked prefill that never stalls decoding; memory must hold the whole prompt."""

    name: ClassVar[str] = "sarathi"
    limits = LimitOptions("token_budget", "max_num_seqs")

    @dataclass(frozen=True, slots=True)
    class Options:
        token_budget: PositiveInt = 512  # positions a step, decodes included
        max_num_seqs: PositiveInt = 256  # requests running at once
        order: OrderName = "arrival"  # of waiting requests

        def __post_init__(self) -> None:
            check_budget(token_budget=self.token_budget, max_num_seqs=self.max_num_seqs)

    def __init__(self, options: Options) -> None:
        super().__init__(
            TokenBudget.Options(options.token_budget, options.max_num_seqs, options.order)
        )
        self.options = options


POLICY = Sarathi
