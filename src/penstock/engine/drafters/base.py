"""Interface of drafters in this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from penstock.core.types import DraftOrder, Replayed, SamplingParams, Verdict
from penstock.engine.sampling.filters import NO_TOKEN
from penstock.engine.sampling.params import IntArray
from penstock.engine.sequences import TokenBuffer

if TYPE_CHECKING:
    from penstock.engine.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft tokens of one order.

    prob_rows: per token the row of `Drafts.probs`; -1: a point mass (coupled, greedy, looked up).
    is_unread: the drafter's model did not run, and its KV is unchanged. confidences: per token, if
    they were computed."""

    token_ids: list[int]
    prob_rows: list[int]
    is_unread: bool = False
    confidences: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts of several orders.

    probs: [rows, V] float32 or None. num_steps: sequential steps of the model; None: as many as
    the longest order has tokens."""

    drafts: list[Draft]
    probs: torch.Tensor | None = None
    num_steps: int | None = None


@dataclass(slots=True)
class DraftBuilder:
    """Collects drafts token by token."""

    size: int
    token_ids: list[list[int]] = field(init=False)
    prob_rows: list[list[int]] = field(init=False)
    confidences: list[list[float]] = field(init=False)
    _probs: list[torch.Tensor] = field(init=False, default_factory=list)
    _num_probs: int = 0

    def __post_init__(self) -> None:
        self.token_ids = [[] for _ in range(self.size)]
        self.prob_rows = [[] for _ in range(self.size)]
        self.confidences = [[] for _ in range(self.size)]

    def add(
        self,
        jobs: Sequence[int] | IntArray,
        tokens: Sequence[int] | IntArray,
        probs: torch.Tensor | None = None,
    ) -> None:
        """Append a token to each of `jobs`, except NO_TOKEN. probs: rows sampled from, if any."""
        for i, (job, token) in enumerate(zip(jobs, tokens, strict=True)):
            if token == NO_TOKEN:
                continue
            self.token_ids[job].append(int(token))
            self.prob_rows[job].append(-1 if probs is None else self._num_probs + i)
        if probs is not None:
            self._probs.append(probs)
            self._num_probs += probs.shape[0]

    def drop_last(self, job: int) -> None:
        for values in (self.token_ids, self.prob_rows, self.confidences):
            del values[job][-1:]

    def build(self) -> Drafts:
        parts = zip(self.token_ids, self.prob_rows, self.confidences, strict=True)
        drafts = [Draft(t, p, confidences=c) for t, p, c in parts]
        return Drafts(drafts, torch.cat(self._probs) if self._probs else None)


class LocalDrafter(ABC):
    """A drafter in this process. runner: of its model, if any."""

    name: str
    runner: ModelRunner | None = None

    @abstractmethod
    def draft(self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]) -> Drafts:
        """Draft for the orders as one batch. texts: their requests' known tokens."""

    @abstractmethod
    def replay(
        self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]
    ) -> tuple[Replayed, ...]:
        """Read verified text without drafting, and count the tokens predicted if an order asks.

        Each output token counts once; those of `ratio` requests do not: unbiased evidence would
        need the target's probabilities."""

    def learn(self, sampling: SamplingParams, draft: Draft, verdict: Verdict) -> None:  # noqa: B027
        """Learn from the verdict on a draft of this drafter."""

    def drop_table(self, request_id: str) -> None:  # noqa: B027
        """Drop the block table of a request whose KV the scheduler freed."""

    @abstractmethod
    def forget(self, request_id: str) -> None:
        """Drop all state of a finished request."""

    @property
    def timed(self) -> LocalDrafter:
        """The drafter by which step times are measured."""
        return self

    def limit_threads(self, num_threads: int) -> None:
        """See `ModelRunner.limit_threads`."""
        if self.runner is not None:
            self.runner.limit_threads(num_threads)

    def num_that_fit(self, num_tokens: int) -> int:
        """Return the number of requests of `num_tokens` tokens that fit the KV cache."""
        return 1 << 30 if self.runner is None else self.runner.num_that_fit(num_tokens)
