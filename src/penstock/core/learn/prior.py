"""Acceptance to expect of every drafter on a new request, from ended requests with alike prompts.

The acceptance of the last requests, weighed by the cosine of the prompts' words, is drawn towards
the drafter's mean over all of them, and that towards a first guess. A request counts for few
tokens, however long it is: its tokens are alike."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from penstock.core.learn.strength import Strength

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_FIRST_TOKENS = 8.0  # tokens that the first guess counts for
_REQUEST_TOKENS = 16.0  # most tokens that a request counts for
_MEAN_TOKENS = 16.0  # tokens that a drafter's mean counts for, against alike prompts
_MEMORY = 128  # requests; bounds the host's time
_FIRST_STRENGTH = 6.0  # before any request
_SHARED = 0.5  # part of a request's deviation, in log-odds, that all drafters share
_SHARPNESS = 2.0  # exponent of the cosine; chosen by hand, like these
_NUM_BUCKETS = 8192  # of hashed words
_HASH = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio


class AcceptancePrior:
    """Learns over requests; drafters are columns 0 to J - 1, and words are integers."""

    def __init__(self) -> None:
        self._prompts = _Prompts()
        self._counts = np.zeros((2, 0, _MEMORY))
        self._strength = Strength(_FIRST_STRENGTH)

    def grow(self, num_drafters: int) -> None:
        """Extend to `num_drafters` columns."""
        missing = num_drafters - self._counts.shape[1]
        if missing > 0:
            self._counts = np.pad(self._counts, ((0, 0), (0, missing), (0, 0)))

    def expect(self, words: IntArray, first: FloatArray) -> FloatArray:
        """Return acceptance [J]. first: [J] guesses before any request."""
        accepted, decided = self._counts
        overall = accepted.sum(axis=1) + _FIRST_TOKENS * first
        overall /= decided.sum(axis=1) + _FIRST_TOKENS
        weights = self._prompts.likeness(_buckets(words)) ** _SHARPNESS
        accepted, decided = (self._counts * weights).sum(axis=2)
        return np.asarray((accepted + _MEAN_TOKENS * overall) / (decided + _MEAN_TOKENS))

    @property
    def strength(self) -> float:
        """Tokens that the expected acceptance counts for, against a request's own."""
        return self._strength.value

    def learn(
        self,
        words: IntArray,
        expected: FloatArray,
        accepted: FloatArray,
        decided: FloatArray,
    ) -> None:
        """Take in an ended request: its words, and by drafter [J] what was expected, and tokens.

        A drafter is often measured on requests that accept little of the others. So it is told what
        a usual request would have accepted in this one's place."""
        self._strength.fade()
        for told in zip(expected.tolist(), accepted.tolist(), decided.tolist(), strict=False):
            self._strength.add(*told)
        odds = expected / (1 - expected) * shifts(expected, accepted, decided, self.strength)
        usual = (accepted + decided * (expected - odds / (1 + odds))).clip(0.0, decided)
        slot = self._prompts.add(_buckets(words))
        share = np.minimum(1.0, _REQUEST_TOKENS / np.maximum(decided, 1.0))
        self._counts[:, :, slot] = 0.0
        self._counts[:, : len(decided), slot] = share * usual, share * decided


def shifts(
    expected: FloatArray, accepted: FloatArray, decided: FloatArray, strength: float
) -> FloatArray:
    """Return the factors [..., J] of a drafter's odds by what the request accepts of the others.

    expected: acceptance, which counts for `strength` tokens; of the others as many are `accepted`
    and `decided`."""

    def others(values: FloatArray) -> FloatArray:
        return np.asarray(values.sum(axis=-1, keepdims=True) - values + strength / 2)

    right, wrong = others(accepted), others(decided - accepted)
    usual, unusual = others(decided * expected), others(decided * (1 - expected))
    return np.asarray((right / wrong * unusual / usual) ** _SHARED)


class _Prompts:
    """Words of the prompts that ended last: one bit a word, hashed into buckets."""

    def __init__(self) -> None:
        self._has = np.zeros((_NUM_BUCKETS, _MEMORY), dtype=np.uint8)
        self._num_with = np.zeros(_NUM_BUCKETS, dtype=np.int64)
        self._buckets: list[IntArray] = [np.empty(0, dtype=np.int64)] * _MEMORY
        self._norms = np.ones(_MEMORY)
        self._next = 0

    def likeness(self, buckets: IntArray) -> FloatArray:
        """Return the cosine with every prompt, [_MEMORY]; unknown words do not count."""
        buckets = buckets[self._num_with[buckets] > 0]
        if not len(buckets):
            return np.zeros(_MEMORY)
        shared = self._has[buckets].sum(axis=0, dtype=np.int32)
        cosine: FloatArray = shared / (self._norms * math.sqrt(len(buckets)))
        return cosine

    def add(self, buckets: IntArray) -> int:
        """Remember a prompt in place of the oldest; return its slot."""
        slot = self._next
        old = self._buckets[slot]
        self._num_with[old] -= 1
        self._has[old, slot] = 0
        self._has[buckets, slot] = 1
        self._num_with[buckets] += 1
        self._buckets[slot] = buckets
        self._norms[slot] = math.sqrt(max(1, len(buckets)))
        self._next = (slot + 1) % _MEMORY
        return slot


def _buckets(words: IntArray) -> IntArray:
    hashed = np.unique(words).astype(np.uint64) * _HASH >> np.uint64(40)
    return np.unique(hashed % np.uint64(_NUM_BUCKETS)).astype(np.int64)
