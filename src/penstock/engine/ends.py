"""End of an output: a stop token, a stop string or `max_tokens`. Without PyTorch, for quick import.

Tokens of a round behind the end are dropped before they are counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from penstock.core.types import FinishReason, Request, StopStrings

if TYPE_CHECKING:
    from penstock.engine.tokenizer import Tokenizer


class End(NamedTuple):
    """End of an output.

    num_tokens: up to the one that ends it, which is kept. num_stop_chars: from the start of a stop
    string to the end of the text; 0 without one."""

    num_tokens: int
    reason: FinishReason
    num_stop_chars: int = 0


class OutputEnd:
    """Finds the end of one request's output. tokenizer: only used for stop strings."""

    def __init__(self, request: Request, tokenizer: Callable[[], Tokenizer] | None = None) -> None:
        self._stop_token_ids = request.stop_token_ids
        self._num_left = request.max_tokens
        self._strings: _StopStringSearch | None = None
        self.problem: str | None = None
        """Reason why stop strings cannot be found, or None."""
        if request.stop is None:
            return
        if tokenizer is None:
            raise ValueError("this executor knows no stop strings")
        try:
            found = tokenizer()
        except Exception as error:
            self.problem = f"stop: the tokenizer cannot be loaded: {error}"
            return
        self._strings = _StopStringSearch(found, request.stop, request.sampling.min_tokens)
        if request.stop.num_made:
            self._strings.follow((request.prompt_token_ids or ())[-request.stop.num_made :])

    def skip(self, num_tokens: int) -> None:
        """Take in tokens of which it is known that none but the last may end the output."""
        self._num_left -= num_tokens

    def follow(self, token_ids: Sequence[int]) -> End | None:
        """Take in the next tokens; None while the output continues."""
        kept = token_ids[: self._num_left]
        self._num_left -= len(kept)
        end = None if self._num_left else End(len(kept), FinishReason.LENGTH)
        text = kept
        stops = self._stop_token_ids
        if stops and not stops.isdisjoint(kept):
            place = next(i for i, token in enumerate(kept) if token in stops)
            end, text = End(place + 1, FinishReason.STOP), kept[:place]
        if self._strings is None:
            return end
        found = self._strings.follow(text)
        if found is not None:
            return found
        if end is not None and (num_chars := self._strings.finish()):
            return End(end.num_tokens, FinishReason.STOP, num_chars)
        return end


class _StopStringSearch:
    """Search for stop strings in a client's growing text; none may end before `min_tokens`."""

    def __init__(self, tokenizer: Tokenizer, stop: StopStrings, min_tokens: int) -> None:
        self._strings = stop.strings
        self._decoder = tokenizer.detokenizer(previous=stop.previous, shown=stop.shown)
        self._longest_part = max(map(len, stop.strings)) - 1
        self._tail = ""
        """End of the text in which a stop string may have begun."""
        self._num_unstoppable = min_tokens

    def follow(self, token_ids: Sequence[int]) -> End | None:
        """Take in tokens up to the one that completes a stop string."""
        for count, token_id in enumerate(token_ids, 1):
            text = self._decoder.add(token_id)
            if self._num_unstoppable:
                self._num_unstoppable -= 1
                self._keep(text)
            elif num_chars := self._search(text):
                # The client's text ends with these.
                num_chars += len(self._decoder.finish())
                return End(count, FinishReason.STOP, num_chars)
        return None

    def finish(self) -> int:
        """End the text; an incomplete character, U+FFFD, may complete a stop string."""
        return self._search(self._decoder.finish())

    def _search(self, text: str) -> int:
        """Return the characters from the start of a stop string ending in `text`; 0 without one."""
        before, whole = len(self._tail), self._tail + text
        starts = (
            (whole.find(stop, max(0, before - len(stop) + 1)), len(stop)) for stop in self._strings
        )
        found = [(start + size, start) for start, size in starts if start >= 0]
        self._keep(text)
        # The first complete one, independent of the tokens; of those the longest.
        return len(whole) - min(found)[1] if found else 0

    def _keep(self, text: str) -> None:
        self._tail = (self._tail + text)[-self._longest_part :] if self._longest_part else ""


class LazyTokenizer:
    """Tokenizer that is loaded in a thread at its first use."""

    def __init__(self, load: Callable[[], Tokenizer]) -> None:
        self._load = load

    @cached_property
    def loading(self) -> Future[Tokenizer]:
        """Future of the tokenizer; for one thread only."""
        thread = ThreadPoolExecutor(1, "penstock-tokenizer")
        loading = thread.submit(self._load)
        thread.shutdown(wait=False)
        return loading

    def __call__(self) -> Tokenizer:
        return self.loading.result()
