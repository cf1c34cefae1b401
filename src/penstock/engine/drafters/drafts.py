"""Drafts of a batch of orders, as a drafter hands them over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from penstock.engine.sampling.filters import NO_TOKEN
from penstock.engine.sampling.params import IntArray


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft tokens of one order.

    prob_rows: per token the row of `Drafts.probs`; negative: a point mass (coupled, greedy).
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
