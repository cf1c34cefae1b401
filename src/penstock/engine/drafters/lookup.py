"""N-gram look-up as a drafter like any other."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.core.types import DraftOrder, Replayed
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

    def replay(
        self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]
    ) -> tuple[Replayed, ...]:
        return tuple(self._replay(order, text) for order, text in zip(orders, texts, strict=True))

    def _replay(self, order: DraftOrder, text: TokenBuffer) -> Replayed:
        index = self._indices.setdefault(order.request_id, NgramIndex())
        known = order.start + order.num_catch_up_tokens
        num_tokens = num_matched = 0
        index.append(text.span(len(index), min(text.request.prompt_len, known)).tolist())
        for token in text.span(len(index), known).tolist():
            if order.evaluate and not text.is_ratio:
                num_tokens += 1
                num_matched += index.propose(1) == [token]
            index.append((token,))
        return Replayed(order.request_id, order.epoch, self.name, num_tokens, num_matched)

    def drop_table(self, request_id: str) -> None:
        """A look-up has no KV."""

    def forget(self, request_id: str) -> None:
        self._indices.pop(request_id, None)
