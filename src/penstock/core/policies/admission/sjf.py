"""Shortest job first (WAIT paper, appendix A.2): the classical rule, with lengths known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.core.learn import Estimators
from penstock.core.policies.admission.parts.token_budget import TokenBudget, check_budget
from penstock.core.policies.options import PositiveInt
from penstock.core.queues import ArrivalQueue, shortest_output_first


class ShortestJobFirst(TokenBudget):
    """Waiting requests are admitted by their expected output, shortest first; the rest is vLLM's
    rule of today. A request whose client expects nothing counts with its `max_tokens`."""

    name: ClassVar[str] = "sjf"

    @dataclass(frozen=True, slots=True)
    class Options:
        """As `TokenBudget`, without a choice of the order."""

        max_num_batched_tokens: PositiveInt = 2048
        max_num_seqs: PositiveInt = 256

        def __post_init__(self) -> None:
            check_budget(
                max_num_batched_tokens=self.max_num_batched_tokens, max_num_seqs=self.max_num_seqs
            )

    def __init__(self, options: Options) -> None:
        super().__init__(TokenBudget.Options(options.max_num_batched_tokens, options.max_num_seqs))
        self.options = options

    def new_queue(self, estimators: Estimators) -> ArrivalQueue:
        return shortest_output_first()


POLICY = ShortestJobFirst
