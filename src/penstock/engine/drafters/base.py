"""Interface of drafters in this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from penstock.core.types import DraftOrder, Replayed, SamplingParams, Verdict
from penstock.engine.drafters.drafts import Draft, Drafts
from penstock.engine.runner import ModelRunner
from penstock.engine.sequences import TokenBuffer


class LocalDrafter(ABC):
    """A drafter in this process. runner: of its model, if any."""

    name: str
    runner: ModelRunner | None = None
    of_target = False

    @abstractmethod
    def draft(self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]) -> Drafts:
        """Draft for the orders as one batch. texts: their requests' known tokens."""

    @abstractmethod
    def replay(
        self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]
    ) -> tuple[Replayed, ...]:
        """Read verified text into the KV cache without drafting.

        If an order asks, also count the output tokens that the drafter would have drafted; each
        counts once over all replays. Texts of requests with `ratio` verification are read but not
        counted: unbiased evidence would need the target's probabilities."""

    def learn(self, sampling: SamplingParams, draft: Draft, verdict: Verdict) -> None:  # noqa: B027
        """Learn from the verdict on a draft of this drafter."""

    def drop_table(self, request_id: str) -> None:  # noqa: B027
        """Drop the block table of a request whose KV the scheduler freed."""

    @abstractmethod
    def release_request(self, request_id: str) -> None:
        """Drop all state of a finished request."""

    @property
    def timed(self) -> LocalDrafter:
        """The drafter by which step times are measured."""
        return self

    def num_that_fit(self, num_tokens: int) -> int:
        """Return the number of requests of `num_tokens` tokens that fit the KV cache."""
        return 1 << 30 if self.runner is None else self.runner.num_that_fit(num_tokens)
