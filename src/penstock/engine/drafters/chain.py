"""A draft that begins as look-up and goes on with a model.

    verified text              look-up             the model
 |--------------------------|-- kept --|.........|-- continues --|
 0                          ^ start    ^ not kept

Look-up costs nothing, so it is asked in every round, and what it proposes is compared with the text
that comes about whether or not it was drafted. How much of it is kept, and how many tokens the
model adds, is chosen in every round: whatever promises most tokens per second of the round.

The choice goes by what earlier rounds came to, by lengths and by times, never by what is sampled in
this one: in `ratio` mode a sampled token must not be dropped for its value, and none is.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from penstock.core.types import DraftOrder, Replayed
from penstock.engine.drafters.base import LocalDrafter
from penstock.engine.drafters.drafts import Draft, Drafts
from penstock.engine.drafters.lookup import LookupDrafter, Match
from penstock.engine.drafters.model import ModelDrafter
from penstock.engine.drafters.sources import Parts, SourceEvidence
from penstock.engine.drafters.text import TextDrafter
from penstock.engine.sequences import TokenBuffer


class ChainDrafter(LocalDrafter):
    """Look-up first, then a model, as if they were one drafter.

    Where the model is not asked its KV stays behind, which the draft says (`is_unread`): the order
    that asks it next has it read everything since, and the looked-up tokens that it continues.
    """

    def __init__(self, name: str, lookup: LookupDrafter, model: ModelDrafter | TextDrafter) -> None:
        self.name = name
        self.runner = model.runner
        self._lookup = lookup
        self._model = model
        self._evidence = SourceEvidence()

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
            rows = [-1] * len(kept) + own.prob_rows
            drafts.append(Draft(kept + own.token_ids, rows, is_unread=i not in by_order))
        num_steps = max((part.num_guessed for part in parts), default=0)
        return Drafts(drafts, guessed.probs, num_steps)

    def replay(
        self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]
    ) -> tuple[Replayed, ...]:
        """By the model alone, whose KV it is that is prepared."""
        return self._model.replay(orders, texts)

    def drop_table(self, request_id: str) -> None:
        self._model.drop_table(request_id)

    def forget(self, request_id: str) -> None:
        self._lookup.forget(request_id)
        self._model.forget(request_id)
        self._evidence.forget(request_id)

    def _choose(self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]) -> list[Parts]:
        """What to take of each source, for all drafts of a round."""
        for text in texts:
            self._evidence.observe(text)
        matches = [self._match(order, text) for order, text in zip(orders, texts, strict=True)]
        left = [t.request.prompt_len + t.request.max_tokens - t.length for t in texts]
        parts = self._evidence.best_parts(orders, matches, left)
        for text, part in zip(texts, parts, strict=True):
            if part.num_guessed:
                text.foresee(part.match.token_ids[: part.num_kept])
        return parts

    def _match(self, order: DraftOrder, text: TokenBuffer) -> Match:
        """What look-up finds that the model can read."""
        match = self._lookup.match(text, order.max_draft_tokens)
        num_readable = self._model.num_readable
        # Another request's output may hold what only the target can read.
        readable = list(itertools.takewhile(lambda token: token < num_readable, match.token_ids))
        return match._replace(token_ids=readable)
