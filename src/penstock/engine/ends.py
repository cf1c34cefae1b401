"""Where an output ends: at a stop token, a stop string or `max_tokens`. A round may yield tokens
behind that; they are dropped here, before anything counts them.

Without PyTorch, so that it is quick to import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from penstock.core.types import FinishReason, Request, StopStrings

if TYPE_CHECKING:
    from penstock.engine.tokenizer import Tokenizer


class End(NamedTuple):
    """The end of an output. num_tokens: of those looked at, up to the one that ends it, which is
    kept. num_stop_chars: from where a stop string begins to the end of the text; 0 without one."""

    num_tokens: int
    reason: FinishReason
    num_stop_chars: int = 0


class OutputEnd:
    """Follows one request's output to its end. tokenizer: only used where there are stop
    strings."""

    def __init__(self, request: Request, tokenizer: Callable[[], Tokenizer] | None = None) -> None:
        self._stop_token_ids = request.stop_token_ids
        self._num_left = request.max_tokens
        self._strings: _StopStringSearch | None = None
        self.problem: str | None = None
        """Why stop strings cannot be found, if they cannot."""
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

    def follow(self, token_ids: Sequence[int]) -> End | None:
        """Take in the tokens that come next; None while the output goes on."""
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
    """Looks for stop strings in the text that a client sees, as it grows.

    min_tokens: before which none may end; one may begin there
    """

    def __init__(self, tokenizer: Tokenizer, stop: StopStrings, min_tokens: int) -> None:
        self._strings = stop.strings
        self._decoder = tokenizer.detokenizer(previous=stop.previous, shown=stop.shown)
        self._longest_part = max(map(len, stop.strings)) - 1
        self._tail = ""
        """The end of the text, as far as a stop string may have begun in it."""
        self._num_unstoppable = min_tokens

    def follow(self, token_ids: Sequence[int]) -> End | None:
        """Take in tokens up to the one that completes a stop string."""
        for count, token_id in enumerate(token_ids, 1):
            text = self._decoder.add(token_id)
            if self._num_unstoppable:
                self._num_unstoppable -= 1
                self._keep(text)
            elif num_chars := self._search(text):
                # What the client's text ends with when it is over.
                num_chars += len(self._decoder.finish())
                return End(count, FinishReason.STOP, num_chars)
        return None

    def finish(self) -> int:
        """The output is over; a character that is not complete may complete a stop string as
        U+FFFD. Returns characters as `End` has them."""
        return self._search(self._decoder.finish())

    def _search(self, text: str) -> int:
        """Characters from where a stop string that ends in this text begins; 0 without one."""
        before, whole = len(self._tail), self._tail + text
        starts = (
            (whole.find(stop, max(0, before - len(stop) + 1)), len(stop)) for stop in self._strings
        )
        found = [(start + size, start) for start, size in starts if start >= 0]
        self._keep(text)
        # The one that is complete first, whatever the tokens are; of those the longest.
        return len(whole) - min(found)[1] if found else 0

    def _keep(self, text: str) -> None:
        self._tail = (self._tail + text)[-self._longest_part :] if self._longest_part else ""


class LazyTokenizer:
    """A tokenizer that is loaded in a thread when it is first asked for."""

    def __init__(self, load: Callable[[], Tokenizer]) -> None:
        self._load = load

    @cached_property
    def loading(self) -> Future[Tokenizer]:
        """From one thread only."""
        thread = ThreadPoolExecutor(1, "penstock-tokenizer")
        loading = thread.submit(self._load)
        thread.shutdown(wait=False)
        return loading

    def __call__(self) -> Tokenizer:
        """Waits until it is loaded."""
        return self.loading.result()
