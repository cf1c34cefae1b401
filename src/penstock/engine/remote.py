"""Remote drafters: orders to them, and their drafts until verification."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from penstock.core.types import DraftOrder, StepPlan, StepResult, VerifyItem
from penstock.engine.drafters.drafts import Draft
from penstock.engine.runner import Model
from penstock.engine.sequences import TokenBuffer

Weights = tuple[Sequence[int], Sequence[int]]
"""Distribution of one draft token: token ids with positive integer weights, others 0."""

Sink = Callable[[Sequence[DraftOrder], Mapping[str, TokenBuffer]], None]


class RemoteOrders:
    """Hands orders to the transport to draft servers."""

    def __init__(self) -> None:
        self._sink: Sink | None = None
        self._sent: list[StepResult] = []
        self._known: set[str] = set()
        self._sent_at: dict[str, float] = {}

    def connect(self, sink: Sink) -> None:
        """Call `sink` with each lane's orders, and texts of requests ordered for the first time."""
        self._sink = sink

    def send(self, plan: StepPlan, texts: Mapping[str, TokenBuffer], now: float) -> None:
        """Send the orders, which ends the step."""
        self._sent.append(StepResult(plan.id, plan.lane, started_at=now, finished_at=now))
        if self._sink is None:
            return
        ids = [o.request_id for o in plan.drafts]
        news = {i: texts[i] for i in ids if i not in self._known}
        self._known.update(news)
        self._sent_at.update(dict.fromkeys(ids, now))
        if plan.drafts:
            self._sink(plan.drafts, news)

    def take_sent(self) -> list[StepResult]:
        """Return results of the steps sent since the last call."""
        sent, self._sent = self._sent, []
        return sent

    def oldest(self, items: Sequence[VerifyItem]) -> float | None:
        """Return the earliest time of the orders that a step's decoding items waited for."""
        sent = [(self._sent_at.pop(i.request_id, None), i.num_scheduled_tokens) for i in items]
        # One that prefills was preempted: it waited for memory.
        waited = (at for at, num_tokens in sent if at is not None and num_tokens == 1)
        return min(waited, default=None)

    def forget(self, request_id: str) -> None:
        self._known.discard(request_id)
        self._sent_at.pop(request_id, None)


class _Held(NamedTuple):
    epoch: int
    round: int
    draft: Draft
    probs: torch.Tensor | None
    weights: Sequence[Weights] | None


class HeldDrafts:
    """At most one draft a request, by epoch and round, until the next step of its request."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(
        self,
        request_id: str,
        epoch: int,
        round_: int,
        draft: Draft,
        probs: torch.Tensor | None = None,
        weights: Sequence[Weights] | None = None,
    ) -> None:
        """Keep a draft, with dense distributions or weights, unless there is a newer one."""
        old = self._held.get(request_id)
        if old is None or (old.epoch, old.round) <= (epoch, round_):
            self._held[request_id] = _Held(epoch, round_, draft, probs, weights)

    def take(self, item: VerifyItem, target: Model) -> tuple[Draft, torch.Tensor | None] | None:
        """Return the draft of an item's epoch and round, with its distributions [tokens, V]."""
        held = self._held.pop(item.request_id, None)
        if held is None or (held.epoch, held.round) != (item.epoch, item.round):
            return None
        if held.weights is None:
            return held.draft, held.probs
        num_tokens = len(held.draft.token_ids)
        return Draft(held.draft.token_ids, list(range(num_tokens))), _dense(held.weights, target)

    def forget(self, request_id: str) -> None:
        self._held.pop(request_id, None)


def _dense(weights: Sequence[Weights], target: Model) -> torch.Tensor:
    """Return float32 [rows, V], exact where weights sum to a power of two of at most 2^24."""
    rows = torch.zeros(len(weights), target.vocab_size)
    for row, (ids, values) in zip(rows, weights, strict=True):
        row[list(ids)] = torch.tensor(values, dtype=torch.float32) / sum(values)
    return rows.to(target.device)
