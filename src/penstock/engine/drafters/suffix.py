"""Look-up of the longest suffix in a request's text and in its tenant's earlier outputs."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence

from penstock.core.types import Request
from penstock.engine.drafters.lookup import (
    LONGEST_MATCH,
    NO_MATCH,
    LookupDrafter,
    Match,
    TextIndex,
)
from penstock.engine.sequences import TokenBuffer

TEXT_END = -1
"""Separator of texts."""

SHORTEST_MATCH = 3
"""Tokens of a key."""

_KEY_BITS = 21
"""Bits of a token id in a key: vocabularies have fewer than two million tokens."""

_MOST_TRIED = 16
"""Limit of the places with the same key that are compared, the latest first."""

CORPUS_TOKENS = 1 << 16
MOST_TENANTS = 32
"""Limits of memory: at about 150 bytes per token 10 MB per tenant, 320 MB for all."""


class SuffixIndex:
    """Index of the latest `capacity` tokens by the SHORTEST_MATCH tokens before each.

    Each place points to the previous place with the same key.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = max(capacity, SHORTEST_MATCH + 1)
        self._tokens = array("i")
        self._before = array("q")
        self._latest: dict[int, int] = {}
        self._end = 0

    def __len__(self) -> int:
        return self._end

    def append(self, token_ids: Iterable[int]) -> None:
        """Append tokens, including TEXT_END."""
        for token in token_ids:
            self._forget_oldest()
            key = self._key(self._end)
            before = -1 if key is None else self._latest.get(key, -1)
            if key is not None:
                self._latest[key] = self._end
            slot = self._end % self._capacity
            if slot == len(self._tokens):
                self._tokens.append(token)
                self._before.append(before)
            else:
                self._tokens[slot], self._before[slot] = token, before
            self._end += 1

    def tokens(self) -> array[int]:
        """Return a copy of the tokens, the oldest first."""
        oldest = self._start % self._capacity
        return self._tokens[oldest:] + self._tokens[:oldest]

    def find(self, text: Sequence[int]) -> tuple[int, int]:
        """Return the latest place after the longest match of a text's end, and the match's length.

        (0, 0) if there is no match."""
        best = (0, 0)
        if len(text) < SHORTEST_MATCH:
            return best
        place = self._latest.get(_packed(text[-SHORTEST_MATCH:]), -1)
        for _ in range(_MOST_TRIED):
            if place - SHORTEST_MATCH < self._start:
                break
            length = self._num_equal(place, text)
            if length > best[1]:
                best = (place, length)
            if length >= LONGEST_MATCH:
                break
            place = self._before[place % self._capacity]
        return best

    def after(self, place: int, num_tokens: int) -> list[int]:
        """Return up to `num_tokens` tokens from a place, within its text."""
        tokens = []
        for position in range(place, min(place + num_tokens, self._end)):
            token = self._tokens[position % self._capacity]
            if token < 0:
                break
            tokens.append(token)
        return tokens

    @property
    def _start(self) -> int:
        return max(0, self._end - self._capacity)

    def _num_equal(self, place: int, text: Sequence[int]) -> int:
        most = min(LONGEST_MATCH, len(text), place - self._start)
        for back in range(1, most + 1):
            if self._tokens[(place - back) % self._capacity] != text[-back]:
                return back - 1
        return most

    def _key(self, place: int) -> int | None:
        """Return the key of a place; None if a text begins inside it."""
        if place - SHORTEST_MATCH < self._start:
            return None
        tokens = [self._tokens[p % self._capacity] for p in range(place - SHORTEST_MATCH, place)]
        return None if min(tokens) < 0 else _packed(tokens)

    def _forget_oldest(self) -> None:
        """Remove the place whose key is about to lose its first token."""
        if self._end < self._capacity:
            return
        place = self._start + SHORTEST_MATCH
        key = self._key(place)
        if key is not None and self._latest.get(key) == place:
            del self._latest[key]


def _packed(tokens: Iterable[int]) -> int:
    key = 0
    for token in tokens:
        key = key << _KEY_BITS | token
    return key


class _Reading:
    """Index of a request's text. corpus: earlier outputs of its tenant."""

    def __init__(self, request: Request, corpus: SuffixIndex) -> None:
        self.corpus = corpus
        self._prompt_len = request.prompt_len
        self._tokens: list[int] = []
        self._index = SuffixIndex(request.prompt_len + request.max_tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def output(self) -> list[int]:
        return self._tokens[self._prompt_len :]

    def append(self, token_ids: Sequence[int]) -> None:
        self._tokens.extend(token_ids)
        self._index.append(token_ids)

    def match(self, num_tokens: int) -> Match:
        """Return the longest match, of the text itself if equal, which continues periodically."""
        suffix = self._tokens[-LONGEST_MATCH:]
        place, length = self._index.find(suffix)
        elsewhere, longer = self.corpus.find(suffix)
        if longer > length:
            return Match(self.corpus.after(elsewhere, num_tokens), longer, is_own=False)
        if not length:
            return NO_MATCH
        period = len(self._tokens) - place
        return Match([self._tokens[place + i % period] for i in range(num_tokens)], length)


class SuffixDrafter(LookupDrafter):
    """Look-up drafter over a request's text and its tenant's finished outputs.

    Other tenants' outputs are not used: the speed of an answer would reveal them.

    corpus_tokens: kept per tenant, the latest. most_tenants: with a corpus; the one whose last
    request began first is dropped.
    """

    def __init__(
        self, name: str, corpus_tokens: int = CORPUS_TOKENS, most_tenants: int = MOST_TENANTS
    ) -> None:
        super().__init__(name)
        self._corpus_tokens = corpus_tokens
        self._most_tenants = most_tenants
        self._readings: dict[str, _Reading] = {}
        self._corpora: OrderedDict[str, SuffixIndex] = OrderedDict()

    def release_request(self, request_id: str) -> None:
        reading = self._readings.pop(request_id, None)
        if reading is not None and reading.output:
            reading.corpus.append([*reading.output, TEXT_END])

    def memory(self, tenants: Collection[str]) -> dict[str, array[int]]:
        # A copy: a lane's thread may add a tenant meanwhile.
        corpora = list(self._corpora.items())
        return {name: corpus.tokens() for name, corpus in corpora if name in tenants and corpus}

    def restore_memory(self, memory: Mapping[str, Sequence[int]]) -> None:
        for tenant, tokens in memory.items():
            self._corpus_of(tenant).append(tokens)

    def _index(self, text: TokenBuffer) -> TextIndex:
        reading = self._readings.get(text.request.id)
        if reading is None:
            reading = _Reading(text.request, self._corpus_of(text.request.tenant))
            self._readings[text.request.id] = reading
        return reading

    def _corpus_of(self, tenant: str) -> SuffixIndex:
        if tenant not in self._corpora:
            self._corpora[tenant] = SuffixIndex(self._corpus_tokens)
            if len(self._corpora) > self._most_tenants:
                self._corpora.popitem(last=False)
        self._corpora.move_to_end(tenant)
        return self._corpora[tenant]
