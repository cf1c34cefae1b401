"""Look-up of what follows the same words, in a request's text and its tenant's outputs.

A look-up costs nothing but rows of the target, so every request has it in every step. It proposes
tokens with the length of its match, and how often tokens behind such matches were right is learned
(`learn.acceptance`); how many are drafted is decided in the allocation (`policies/allocation`)."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from penstock.core.state import RequestState
from penstock.core.types import Match

LONGEST_MATCH = 32
"""Most tokens compared of a match: longer ones count the same."""

TEXT_END = -1
"""Separator of texts."""

SHORTEST_MATCH = 3
"""Tokens of a key."""

_KEY_BITS = 21
"""Bits of a token id in a key: vocabularies have fewer than two million tokens."""

_FEW = 64  # tokens up to which taking them in one by one is as fast

_MOST_TRIED = 16
"""Limit of the places with the same key that are compared, the latest first."""

CORPUS_TOKENS = 1 << 16
MOST_TENANTS = 32
"""Limits of memory: at about 150 bytes per token 10 MB per tenant, 320 MB for all."""


class LookUp(Protocol):
    """Proposes what may follow a request's text."""

    @property
    def name(self) -> str:
        """Name that a request may give for look-up alone."""
        ...

    def match(self, state: RequestState, num_tokens: int) -> Match | None:
        """Return up to `num_tokens` tokens behind the request's known text, or None."""
        ...

    def release_request(self, state: RequestState) -> None:
        """Drop the state of an ended request."""
        ...


class TextIndex:
    """Index of the latest `capacity` tokens by the SHORTEST_MATCH tokens before each.

    Each place points to the previous place with the same key."""

    def __init__(self, capacity: int) -> None:
        self._capacity = max(capacity, SHORTEST_MATCH + 1)
        self._tokens = array("i")
        self._before = array("q")
        self._latest: dict[int, int] = {}
        self._end = 0

    def __len__(self) -> int:
        return self._end

    def append(self, token_ids: Sequence[int]) -> None:
        """Append tokens, including TEXT_END."""
        if not self._end and _FEW < len(token_ids) <= self._capacity and TEXT_END not in token_ids:
            self._fill(np.array(token_ids, dtype=np.int64))
            return
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

    def _fill(self, tokens: npt.NDArray[np.int64]) -> None:
        """Take in a first text at once, as `append` would token by token."""
        parts = [tokens[i : i - SHORTEST_MATCH] for i in range(SHORTEST_MATCH)]
        keys = np.zeros(len(tokens) - SHORTEST_MATCH, dtype=np.int64)
        for part in parts:
            keys = keys << _KEY_BITS | part
        by_key = np.argsort(keys, kind="stable")
        repeated = np.flatnonzero(keys[by_key][1:] == keys[by_key][:-1])
        before = np.full(len(tokens), -1, dtype=np.int64)
        before[by_key[repeated + 1] + SHORTEST_MATCH] = by_key[repeated] + SHORTEST_MATCH
        self._tokens, self._before = array("i", tokens.tolist()), array("q", before.tolist())
        self._latest = dict(zip(keys.tolist(), range(SHORTEST_MATCH, len(tokens)), strict=True))
        self._end = len(tokens)

    def tokens(self) -> array[int]:
        """Return a copy of the tokens, the oldest first."""
        oldest = self._start % self._capacity
        return self._tokens[oldest:] + self._tokens[:oldest]

    def find(self, text: Sequence[int]) -> tuple[int, int]:
        """Return the latest place after the longest match of a text's end, and the match's length.

        (0, 0) if there is no match."""
        if len(text) < SHORTEST_MATCH:
            return 0, 0
        return self._longest(self._latest.get(_packed(text[-SHORTEST_MATCH:]), -1), text)

    def _longest(self, place: int, text: Sequence[int]) -> tuple[int, int]:
        """Return the longest match among a place and those before it with the same key."""
        best = (0, 0)
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

    def continued(self, num_tokens: int) -> tuple[list[int], int]:
        """Return what follows this text's own end, and the match's length.

        A match that reaches the end continues periodically."""
        key = self._key(self._end)
        latest = -1 if key is None else self._latest.get(key, -1)
        if latest < 0:
            return [], 0
        first = max(self._start, self._end - LONGEST_MATCH)
        text = [self._tokens[p % self._capacity] for p in range(first, self._end)]
        place, length = self._longest(latest, text)
        if not length:
            return [], 0
        period = self._end - place
        at = [(place + i % period) % self._capacity for i in range(num_tokens)]
        return [self._tokens[slot] for slot in at], length

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


class _Reading(NamedTuple):
    """Index of a request's text, and of earlier outputs of its tenant."""

    own: TextIndex
    tenant: TextIndex | None


class TextLookUp:
    """Look-up in a request's text and, if `remembers`, in its tenant's finished outputs.

    Other tenants' outputs are not used: the speed of an answer would reveal them.

    corpus_tokens: kept per tenant, the latest. most_tenants: with a corpus; the one whose last
    request began first is dropped."""

    def __init__(
        self,
        name: str,
        *,
        remembers: bool = True,
        corpus_tokens: int = CORPUS_TOKENS,
        most_tenants: int = MOST_TENANTS,
    ) -> None:
        self.name = name
        self._remembers = remembers
        self._corpus_tokens = corpus_tokens
        self._most_tenants = most_tenants
        self._readings: dict[str, _Reading] = {}
        self._corpora: OrderedDict[str, TextIndex] = OrderedDict()

    def match(self, state: RequestState, num_tokens: int) -> Match | None:
        """Return the longest match, of the text itself if equal."""
        request = state.request
        reading = self._readings.get(request.id)
        if reading is None:
            own = TextIndex(request.prompt_len + request.max_tokens)
            own.append(request.prompt_token_ids or ())
            corpus = self._corpus_of(request.tenant) if self._remembers else None
            reading = self._readings[request.id] = _Reading(own, corpus)
        own, corpus = reading
        own.append(state.output_token_ids[len(own) - request.prompt_len :])
        tokens, length = own.continued(num_tokens)
        if corpus:
            elsewhere, longer = corpus.find(_end_of(state))
            found = corpus.after(elsewhere, num_tokens) if longer > length else []
            if found:
                return Match(tuple(found), longer, "tenant")
        return Match(tuple(tokens), length, "own") if tokens else None

    def release_request(self, state: RequestState) -> None:
        """Remember the output of an ended request."""
        reading = self._readings.pop(state.request.id, None)
        if reading is not None and reading.tenant is not None and state.output_token_ids:
            reading.tenant.append([*state.output_token_ids, TEXT_END])

    def memory(self, tenants: Collection[str]) -> dict[str, array[int]]:
        """Return the remembered outputs of these tenants; TEXT_END ends each text."""
        return {n: c.tokens() for n, c in self._corpora.items() if n in tenants and c}

    def restore_memory(self, memory: Mapping[str, Sequence[int]]) -> None:
        """Take over a `memory`, before any request."""
        for tenant, tokens in memory.items():
            self._corpus_of(tenant).append(tokens)

    def _corpus_of(self, tenant: str) -> TextIndex:
        if tenant not in self._corpora:
            self._corpora[tenant] = TextIndex(self._corpus_tokens)
            if len(self._corpora) > self._most_tenants:
                self._corpora.popitem(last=False)
        self._corpora.move_to_end(tenant)
        return self._corpora[tenant]


def _end_of(state: RequestState) -> Sequence[int]:
    """Return the last tokens of a request's text."""
    output = state.output_token_ids[-LONGEST_MATCH:]
    missing = LONGEST_MATCH - len(output)
    if not missing:
        return output
    return [*(state.request.prompt_token_ids or ())[-missing:], *output]
