"""N-gram look-up: drafts of the tokens that followed the text's last n-gram before."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from penstock.core.types import DraftOrder, Replayed
from penstock.engine.drafters.base import LocalDrafter
from penstock.engine.drafters.drafts import Draft, Drafts
from penstock.engine.sequences import TokenBuffer

LONGEST_MATCH = 32
"""Most tokens compared of a match: longer ones count the same."""


class Match(NamedTuple):
    """Draft tokens, with the number of equal tokens before them. is_own: from the same text."""

    token_ids: list[int]
    length: int
    is_own: bool = True


NO_MATCH = Match([], 0)


class TextIndex(Protocol):
    """Look-up index of one request's text."""

    def __len__(self) -> int: ...

    def append(self, token_ids: Sequence[int]) -> None:
        """Append verified tokens."""
        ...

    def match(self, num_tokens: int) -> Match:
        """Propose up to `num_tokens` tokens."""
        ...


class NgramIndex:
    """N-grams of one request's verified tokens, with a hash-map entry per token and length.

    Drafts are point masses: `ratio` mode verifies them with draft(x) = 1.

    max_ngram, min_ngram: the longest and shortest suffix that is looked up. Raises: ValueError
    unless 1 <= min_ngram <= max_ngram.
    """

    def __init__(self, max_ngram: int = 4, min_ngram: int = 2) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(
                f"n-gram lengths must satisfy 1 <= min_ngram <= max_ngram, "
                f"not min_ngram={min_ngram}, max_ngram={max_ngram}"
            )
        self._lengths = range(max_ngram, min_ngram - 1, -1)
        self._tokens: list[int] = []
        # Position after the last occurrence of an n-gram. The n-gram at the end is entered only
        # with its next token, so a look-up never finds itself.
        self._followed_at: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, token_ids: Iterable[int]) -> None:
        """Append verified tokens."""
        for token in token_ids:
            for suffix in self._suffixes():
                self._followed_at[suffix] = len(self._tokens)
            self._tokens.append(token)

    def propose(self, num_tokens: int) -> list[int]:
        """Return the tokens of `match`."""
        return self.match(num_tokens).token_ids

    def match(self, num_tokens: int) -> Match:
        """Return the tokens after the longest suffix's last occurrence, or NO_MATCH.

        A match that reaches the end of the text continues periodically.
        """
        for suffix in self._suffixes():
            start = self._followed_at.get(suffix)
            if start is not None:
                period = len(self._tokens) - start
                tokens = [self._tokens[start + i % period] for i in range(num_tokens)]
                before = self._tokens[max(0, start - LONGEST_MATCH) : start]
                return Match(tokens, num_equal(reversed(before), reversed(self._tokens)))
        return NO_MATCH

    def _suffixes(self) -> Iterable[tuple[int, ...]]:
        end = len(self._tokens)
        return (tuple(self._tokens[end - n :]) for n in self._lengths if n <= end)


def num_equal(tokens: Iterable[int], others: Iterable[int]) -> int:
    """Return the length of the common prefix."""
    num = 0
    for token, other in zip(tokens, others, strict=False):
        if token != other:
            break
        num += 1
    return num


class LookupDrafter(LocalDrafter):
    """N-gram drafter, with an index per request."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._indices: dict[str, NgramIndex] = {}

    def match(self, text: TokenBuffer, num_tokens: int) -> Match:
        """Propose up to `num_tokens` tokens after a request's text."""
        index = self._index(text)
        index.append(text.tokens(len(index), text.length))
        return index.match(num_tokens)

    def draft(self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]) -> Drafts:
        drafts = []
        for order, text in zip(orders, texts, strict=True):
            tokens = self.match(text, order.max_draft_tokens).token_ids
            drafts.append(Draft(tokens, [-1] * len(tokens)))
        return Drafts(drafts)

    def replay(
        self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]
    ) -> tuple[Replayed, ...]:
        return tuple(self._replay(order, text) for order, text in zip(orders, texts, strict=True))

    def _replay(self, order: DraftOrder, text: TokenBuffer) -> Replayed:
        index = self._index(text)
        known = order.start + order.num_catch_up_tokens
        num_tokens = num_matched = 0
        index.append(text.tokens(len(index), min(text.request.prompt_len, known)))
        for token in text.tokens(len(index), known):
            if order.evaluate and not text.is_ratio:
                num_tokens += 1
                num_matched += index.match(1).token_ids == [token]
            index.append((token,))
        return Replayed(order.request_id, order.epoch, self.name, num_tokens, num_matched)

    def index_of(self, request_id: str) -> NgramIndex:
        """Return a request's index."""
        return self._indices.setdefault(request_id, NgramIndex())

    def _index(self, text: TokenBuffer) -> TextIndex:
        return self.index_of(text.request.id)

    def release_request(self, request_id: str) -> None:
        self._indices.pop(request_id, None)
