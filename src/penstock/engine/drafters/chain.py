"""Drafts that start with looked-up tokens and continue with a model.

    verified text              look-up             the model
 |--------------------------|-- kept --|.........|-- continues --|
 0                          ^ start    ^ not kept

Look-up is free, so it runs in every step and is compared with the text even if it was not drafted.
The numbers of kept and guessed tokens are chosen in every step for most tokens per second. The
choice depends on earlier steps, lengths and times only: dropping a token for its sampled value
would bias `ratio` mode.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Collection, Mapping, Sequence

from penstock.core.types import DraftOrder, Replayed
from penstock.engine.drafters.base import LocalDrafter
from penstock.engine.drafters.drafts import LOOKED_UP, Draft, Drafts
from penstock.engine.drafters.lookup import LookupDrafter, Match
from penstock.engine.drafters.model import ModelDrafter
from penstock.engine.drafters.sources import Parts, SourceEvidence
from penstock.engine.drafters.text import TextDrafter
from penstock.engine.sequences import TokenBuffer


class ChainDrafter(LocalDrafter):
    """Look-up followed by a model, as one drafter.

    A draft without the model is `is_unread`: the model's KV lags, and its next order includes the
    tokens since, and the looked-up tokens.
    """

    def __init__(self, name: str, lookup: LookupDrafter, model: ModelDrafter | TextDrafter) -> None:
        self.name = name
        self.runner = model.runner
        self._lookup = lookup
        self._model = model
        self._evidence = SourceEvidence()

    def memory(self, tenants: Collection[str]) -> dict[str, array[int]]:
        return self._lookup.memory(tenants)

    def restore_memory(self, memory: Mapping[str, Sequence[int]]) -> None:
        self._lookup.restore_memory(memory)

    @property
    def timed(self) -> LocalDrafter:
        return self._model.timed

    def draft(self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]) -> Drafts:
        parts = self._choose(orders, texts)
        asked = [i for i, part in enumerate(parts) if part.num_guessed]
        for i, order in enumerate(orders):
            if not parts[i].num_guessed:
                self._model.extend(order)
        guessed = Drafts([])
        if asked:
            behind = [parts[i].behind_look_up(orders[i]) for i in asked]
            guessed = self._model.draft(behind, [texts[i] for i in asked])
        by_order = dict(zip(asked, guessed.drafts, strict=True))
        drafts = []
        for i, (text, part) in enumerate(zip(texts, parts, strict=True)):
            kept, own = part.match.token_ids[: part.num_kept], by_order.get(i, Draft([], []))
            self._evidence.drafted(text, part, own.token_ids)
            rows = [LOOKED_UP] * len(kept) + own.prob_rows
            drafts.append(Draft(kept + own.token_ids, rows, is_unread=i not in by_order))
        num_steps = max((part.num_guessed for part in parts), default=0)
        return Drafts(drafts, guessed.probs, num_steps)

    def replay(
        self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]
    ) -> tuple[Replayed, ...]:
        return self._model.replay(orders, texts)

    def drop_table(self, request_id: str) -> None:
        self._model.drop_table(request_id)

    def release_request(self, request_id: str) -> None:
        self._lookup.release_request(request_id)
        self._model.release_request(request_id)
        self._evidence.release_request(request_id)

    def _choose(self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]) -> list[Parts]:
        for text in texts:
            self._evidence.on_text(text)
        matches = [self._match(order, text) for order, text in zip(orders, texts, strict=True)]
        left = [t.request.prompt_len + t.request.max_tokens - t.length for t in texts]
        parts = self._evidence.best_parts(orders, matches, left)
        for text, part in zip(texts, parts, strict=True):
            if part.num_guessed:
                text.foresee(part.match.token_ids[: part.num_kept])
        return parts

    def _match(self, order: DraftOrder, text: TokenBuffer) -> Match:
        """Return look-up's match up to the first token that the model cannot read."""
        match = self._lookup.match(text, order.max_draft_tokens)
        num_readable = self._model.num_readable
        # Another request's output may have tokens that only the target has.
        readable = list(itertools.takewhile(lambda token: token < num_readable, match.token_ids))
        return match._replace(token_ids=readable)
