"""Drafts from a text that the client expects as output (OpenAI's predicted outputs).

The output is followed in the prediction, and found again where it has left it:

    prediction   a b c d e f g h i
    output       a b c x y f g             the next draft is h i
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.core.types import PREDICTION, Match

_LONGEST_MATCH = 32
"""Most tokens compared of a match: longer ones count the same."""
_SURE_MATCH = 3
"""Tokens of a match that counts anywhere in the prediction; chosen by hand, as are the others."""
_NEAR = 16
"""Tokens behind the last sure place within which a shorter match counts, too."""
_MOST_TRIED = 16
"""Limit of the places with the same token that are compared."""


class Prediction:
    """Place of one request's output in its prediction."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._tokens = token_ids
        self._array = np.array(token_ids, dtype=np.int32)
        self._place = self._sure_place = self._match = 0

    def match(self, num_tokens: int) -> Match | None:
        """Return up to `num_tokens` tokens that should come next; None at the end."""
        tokens = tuple(self._tokens[self._place : self._place + num_tokens])
        return Match(tokens, min(self._match, _LONGEST_MATCH), PREDICTION) if tokens else None

    def follow(self, output: Sequence[int], num_new: int) -> None:
        """Follow the last `num_new` tokens of an output."""
        for end in range(len(output) - num_new + 1, len(output) + 1):
            if not self._is_right(output[end - 1]):
                self._find(output[max(0, end - _LONGEST_MATCH) : end])
            if self._match >= _SURE_MATCH:
                self._sure_place = self._place

    def _is_right(self, token: int) -> bool:
        """Compare the next token, and go on if it is equal."""
        if self._place == len(self._tokens):
            return False
        is_right = self._tokens[self._place] == token
        if is_right:
            self._place, self._match = self._place + 1, self._match + 1
        return is_right

    def _find(self, text: Sequence[int]) -> None:
        """Go to the longest match of the text's end, the nearest behind the last sure one.

        Without a match the text is taken to have another token in place of the prediction's."""
        places = np.flatnonzero(self._array == text[-1]) + 1
        behind = np.roll(places, -np.searchsorted(places, self._sure_place, side="right"))
        best = 0
        for place in behind[:_MOST_TRIED].tolist():
            length = self._num_equal(place, text)
            is_near = 0 < place - self._sure_place <= _NEAR
            if length > best and (is_near or length >= _SURE_MATCH):
                best, self._place = length, place
        self._match = best
        if not best:
            self._place = min(self._place + 1, len(self._tokens))

    def _num_equal(self, place: int, text: Sequence[int]) -> int:
        """Return the length of the match that ends before a place."""
        tokens = self._tokens
        most = min(place, len(text))
        return next((n for n in range(most) if tokens[place - 1 - n] != text[-1 - n]), most)
