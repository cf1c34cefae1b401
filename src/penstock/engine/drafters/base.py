"""What the executor, and a draft server's sessions, ask of any drafter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from penstock.core.types import DraftOrder, Replayed, SamplingParams, Verdict
from penstock.engine.drafters.drafts import Draft, Drafts
from penstock.engine.runner import ModelRunner
from penstock.engine.sequences import TokenBuffer


class LocalDrafter(ABC):
    """A drafter in this process. runner: the model that it drafts with, if it is one."""

    name: str
    runner: ModelRunner | None = None

    @abstractmethod
    def draft(self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]) -> Drafts:
        """Carry out the orders as one batch; `texts` are their requests' known tokens."""

    @abstractmethod
    def replay(
        self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]
    ) -> tuple[Replayed, ...]:
        """Read verified text without drafting, and where an order says so count the output tokens
        that the drafter's own first guess, behind the true text, would have been. An output token
        is counted once; those of a `ratio` request are not: what makes its evidence unbiased, the
        target's probabilities, is gone by then."""

    def learn(self, sampling: SamplingParams, draft: Draft, verdict: Verdict) -> None:  # noqa: B027
        """A draft of its own was verified."""

    def drop_table(self, request_id: str) -> None:  # noqa: B027
        """The scheduler took the request's KV in this drafter away."""

    @abstractmethod
    def forget(self, request_id: str) -> None:
        """The request is over."""

    @property
    def timed(self) -> LocalDrafter:
        """What a step of it is measured by, where not every step is alike."""
        return self

    def limit_threads(self, num_threads: int) -> None:
        """See `ModelRunner.limit_threads`."""
        if self.runner is not None:
            self.runner.limit_threads(num_threads)

    def num_that_fit(self, num_tokens: int) -> int:
        """Requests of so many tokens that its memory holds."""
        return 1 << 30 if self.runner is None else self.runner.num_that_fit(num_tokens)
