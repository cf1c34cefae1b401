"""N-gram look-up as a drafter like any other."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.types import DraftOrder
from penstock.engine.drafters.base import Draft, Drafts
from penstock.engine.drafters.ngram import NgramIndex
from penstock.engine.sequences import TokenBuffer


class LookupDrafter:
    """Proposes what followed the last time the request's own text ended as it does now."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._indices: dict[str, NgramIndex] = {}

    def draft(self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]) -> Drafts:
        drafts = []
        for order, text in zip(orders, texts, strict=True):
            index = self._indices.setdefault(order.request_id, NgramIndex())
            index.append(text.span(len(index), text.length).tolist())
            tokens = index.propose(order.max_draft_tokens)
            drafts.append(Draft(tokens, [-1] * len(tokens)))
        return Drafts(drafts)

    def drop_table(self, request_id: str) -> None:
        """A look-up has no KV."""

    def forget(self, request_id: str) -> None:
        self._indices.pop(request_id, None)
