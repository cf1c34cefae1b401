"""From tokens to text that may be shown: detokenised as it comes, cut at stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.core.types import TokenLogprob

if TYPE_CHECKING:
    from penstock.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenText:
    """A token with its log-probability. `start`, `end`: where its text lies in the choice's text;
    `raw`: the bytes it adds, part of a character where the vocabulary has such tokens."""

    token_id: int
    raw: bytes
    start: int
    end: int
    logprob: TokenLogprob


class TextStream:
    """Text of one choice. Characters that could begin a stop string are held back until it is
    certain that they do not; a stop string itself is never shown.

    previous: the last token of the text that it goes on from, if it does
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str], previous: int | None = None
    ) -> None:
        self.stopped = False
        """A stop string has been found; the text is over."""
        self._is_over = False
        self._tokenizer = tokenizer
        self._stops = stops
        self._longest_hold = max((len(stop) - 1 for stop in stops), default=0)
        self._detokenizer = tokenizer.detokenizer(previous=previous)
        self._pending = ""
        self._length = 0
        self._tokens: list[TokenText] = []
        self._previous = previous

    def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> int:
        """Append tokens, with their log-probabilities or none at all. Not after `stopped`.

        Returns how many belong to the text: those up to the end of a stop string, else all.
        """
        if not self._stops and not logprobs:
            self._pending += "".join(map(self._detokenizer.add, token_ids))
            return len(token_ids)
        for count, token_id in enumerate(token_ids, 1):
            start = self._length + len(self._pending)
            self._pending += self._detokenizer.add(token_id)
            if logprobs:
                self._note(token_id, start, logprobs[count - 1])
            self._look_for_stop()
            if self.stopped:
                return count
        return len(token_ids)

    def finish(self) -> None:
        """No more tokens will come: nothing needs to be held back."""
        if not self.stopped:
            self._pending += self._detokenizer.finish()
            self._look_for_stop()
        self._is_over = True

    def take(self) -> tuple[str, list[TokenText]]:
        """Text that may be shown and has not been taken, and the tokens that it completes."""
        ready = len(self._pending) - (0 if self._is_over else self._num_held_back())
        text, self._pending = self._pending[:ready], self._pending[ready:]
        self._length += ready
        shown = [t for t in self._tokens if self._is_over or t.end <= self._length]
        self._tokens = self._tokens[len(shown) :]
        return text, shown

    def _note(self, token_id: int, start: int, logprob: TokenLogprob) -> None:
        raw = self._tokenizer.token_bytes(token_id, self._previous)
        end = self._length + len(self._pending)
        self._tokens.append(TokenText(token_id, raw, start, end, logprob))
        self._previous = token_id

    def _look_for_stop(self) -> None:
        starts = ((self._pending.find(stop), len(stop)) for stop in self._stops)
        found = [(start + size, start) for start, size in starts if start >= 0]
        if found:
            # The one that is complete first, so that the cut does not depend on the chunks.
            _, start = min(found)
            self._pending = self._pending[:start]
            cut = self._length + len(self._pending)
            self._tokens = [t for t in self._tokens if t.start < cut]
            self.stopped = self._is_over = True

    def _num_held_back(self) -> int:
        """Length of the longest end of the text that a stop string could begin with."""
        for size in range(min(self._longest_hold, len(self._pending)), 0, -1):
            tail = self._pending[-size:]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
