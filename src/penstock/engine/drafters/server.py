"""Drafter on an OpenAI-compatible server: it completes the text, whose tokens are the draft.

To the scheduler it is a draft server: its lane is asynchronous, its orders have deadlines, and it
comes and goes (`DrafterUp`, `DrafterDown`). Threads wait for its answers.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from penstock.core.ahead import LinePiece
from penstock.core.learn.links import LinkTimes
from penstock.core.loop import Clock
from penstock.core.types import DraftAhead, DrafterDown, DrafterUp, DraftOrder, Event
from penstock.engine.drafters.completions import (
    MOST_CALLS,
    Completion,
    CompletionsClient,
    ServerError,
)
from penstock.engine.drafters.spelling import TAIL, opening
from penstock.engine.sequences import TokenBuffer
from penstock.engine.steps import MOST_FAILURES
from penstock.engine.tokenizer import Tokenizer

_MOST_CHARS, _KEPT_CHARS = 8000, 6000
"""A longer text is sent without its beginning, which then stays the same for a while: the server
keeps what it has computed of an equal beginning."""
_FIRST_PAUSE_S, _MOST_PAUSE_S = 1.0, 60.0
_LONGEST_S = 30.0
"""Limit of a call that no deadline ends: the server may have to load its model, or read a text."""
_AHEAD_CALL, _MOST_AHEAD = 3, 32
"""Tokens of a call without an order, and of all of them."""

_log = logging.getLogger(__name__)


class Answer(NamedTuple):
    """Answer to an order; empty if the call failed. is_reading, waited_s: as of `DraftReady`."""

    order: DraftOrder
    token_ids: list[int]
    is_reading: bool = False
    waited_s: float = 0.0


class _Prompt(NamedTuple):
    """Text to complete. last: the target's last tokens. is_new: the server has to read it."""

    text: str
    last: tuple[int, ...]
    is_new: bool


class _Text:
    """End of one request's text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = tokenizer.detokenizer(skip_special_tokens=False)
        self._num_read = 0
        self._text = ""
        self._last: list[int] = []

    def prompt(self, text: TokenBuffer, end: int) -> _Prompt | None:
        """Return the text of the first `end` tokens; None inside a character."""
        is_new, start = self._num_read == 0, max(self._num_read, end - _MOST_CHARS)
        before = opening(self._tokenizer) if start == 0 else []
        if before and text.tokens(0, len(before)) == before:
            start = len(before)  # the server adds its own
        for token in text.tokens(start, end):
            self._text += self._stream.add(token)
            is_special = self._tokenizer.is_special(token)
            self._last = [] if is_special else [*self._last[1 - TAIL :], token]
        self._num_read = max(self._num_read, end)
        if len(self._text) > _MOST_CHARS:
            self._text, is_new = self._text[-_KEPT_CHARS:], True
        if self._stream.is_amid_character or not self._text:
            return None
        return _Prompt(self._text, tuple(self._last), is_new)


class ServerDrafter:
    """Drafter on a server, which can only be wrong: its drafts are point masses.

    A call ends at its order's deadline. While the server reads a new text its orders are answered
    at once, with nothing; what it then drafts is sent ahead. Calls ahead fill the pause until the
    next order, which waits for one that still runs: in another slot its text would be read again.
    After several failures in a row, and at the start, a short call is repeated after growing
    pauses; until it succeeds there are no orders.
    """

    def __init__(
        self,
        name: str,
        client: CompletionsClient,
        tokenizer: Future[Tokenizer],
        vocab_size: int,
        tenant: str | None,
        clock: Clock,
        wake: Callable[[], None],
    ) -> None:
        """tenant: as of `DrafterUp`. wake: called when there are events."""
        self.name = name
        self.num_failures = 0
        """Failed calls so far."""
        self._client = client
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._tenant = tenant
        self._clock = clock
        self._wake = wake
        self._lock, self._is_ahead = threading.Lock(), threading.Lock()
        self._texts: dict[str, _Text] = {}
        self._latest: dict[str, DraftOrder] = {}
        self._reading: set[str] = set()
        self._lines = itertools.count()
        self._calls = LinkTimes()
        """Seconds of calls by their tokens."""
        self._num_open = 0
        """Orders whose calls have not ended."""
        self._idle_since: float | None = None
        self._pauses: deque[float] = deque(maxlen=8)
        """Between orders; the shortest counts."""
        self._events: deque[Event | Answer] = deque()
        self._orders: queue.SimpleQueue[tuple[DraftOrder, TokenBuffer] | None]
        self._orders = queue.SimpleQueue()
        self._broken, self._closed = threading.Event(), threading.Event()
        self._num_failed = 0
        self._error = ""
        self._pause_s = _FIRST_PAUSE_S

    def start(self) -> None:
        """Begin to call the server, in threads of its own."""
        for run in (self._keep, *[self._work] * MOST_CALLS):
            threading.Thread(target=run, name=f"penstock-{self.name}", daemon=True).start()

    def order(self, orders: Sequence[DraftOrder], texts: Mapping[str, TokenBuffer]) -> None:
        """Take orders; each is answered by an event."""
        with self._lock:
            if orders and self._idle_since is not None:
                self._pauses.append(self._clock.now() - self._idle_since)
                self._idle_since = None
            self._num_open += len(orders)
        for order in orders:
            self._latest[order.request_id] = order
            self._orders.put((order, texts[order.request_id]))

    def take_events(self) -> list[Event | Answer]:
        """Return what has happened since the last call."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def release_request(self, request_id: str) -> None:
        """Drop a finished request."""
        with self._lock:
            self._latest.pop(request_id, None)
            self._texts.pop(request_id, None)

    def close(self) -> None:
        """Let the threads end."""
        self._closed.set()
        self._broken.set()
        for _ in range(MOST_CALLS):
            self._orders.put(None)
        self._client.close()

    def _post(self, event: Event | Answer) -> None:
        self._events.append(event)
        self._wake()

    # --- whether it works -----------------------------------------------------------------------

    def _keep(self) -> None:
        """Tell the scheduler whether the server works."""
        said = ""
        while not self._closed.is_set():
            if self._call("a", 1, _LONGEST_S) is not None:
                _log.info("drafter %s answers", self.name)
                said = ""
                self._num_failed = MOST_FAILURES - 1  # one more failure is enough
                self._broken.clear()
                began = self._clock.now()  # of another call: the server may have loaded its model
                self._call("a", 1, _LONGEST_S)
                took = self._clock.now() - began
                self._post(DrafterUp(self.name, tenant=self._tenant, round_trip_s=took))
                self._broken.wait()
                self._post(DrafterDown(self.name))
            if self._error != said and not self._closed.is_set():
                said = self._error
                _log.warning("drafter %s does not draft for now: %s", self.name, said)
            self._closed.wait(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _MOST_PAUSE_S)

    def _call(self, prompt: str, max_tokens: int, seconds: float) -> Completion | None:
        """Complete a prompt; None where that fails."""
        try:
            return self._client.complete(prompt, max_tokens, seconds)
        except ServerError as error:
            self._error = str(error)
        except Exception as error:
            self._error = type(error).__name__
        with self._lock:
            self.num_failures += 1
            self._num_failed += 1
            if self._num_failed >= MOST_FAILURES:
                self._broken.set()
        return None

    # --- drafts ---------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._orders.get()) is not None:
            order, text = job
            name, prompt = order.request_id, self._prompt(order, text)
            if prompt is not None and prompt.is_new:
                # The target does not wait while the server reads.
                self._reading.add(name)
                self._post(Answer(order, [], is_reading=True))
                completion = self._completed(order, prompt)
                self._reading.discard(name)
            elif prompt is None or name in self._reading:
                self._post(Answer(order, [], is_reading=prompt is not None))
                completion = None
            else:
                ordered_at = self._clock.now()
                with self._is_ahead:
                    waited_s = self._clock.now() - ordered_at
                completion = self._completed(order, prompt)
                tokens = [] if completion is None else self._spelt(prompt, completion)
                self._post(Answer(order, tokens[: order.max_draft_tokens], waited_s=waited_s))
            self._end_order()
            if prompt and completion and self._is_ahead.acquire(blocking=False):
                self._draft_ahead(order, text, prompt, completion)
                self._is_ahead.release()

    def _completed(self, order: DraftOrder, prompt: _Prompt) -> Completion | None:
        """Complete the text of an order until its deadline."""
        seconds = _LONGEST_S
        if order.deadline is not None and not prompt.is_new:
            seconds = order.deadline - self._clock.now()
        if seconds <= 0:
            return None
        # The last token is dropped, as more text could change it.
        call = self._call if prompt.is_new else self._timed_call
        completion = call(prompt.text, order.max_draft_tokens + 1, seconds)
        if completion is not None:
            self._num_failed, self._pause_s = 0, _FIRST_PAUSE_S
        return completion

    def _draft_ahead(
        self, order: DraftOrder, text: TokenBuffer, prompt: _Prompt, completion: Completion
    ) -> None:
        """Draft on behind an answered order while its text comes along, and no order waits."""
        line, sent = next(self._lines), list[int]()
        while True:
            tokens = self._spelt(prompt, completion)[:_MOST_AHEAD]
            if tokens[: len(sent)] != sent:
                return
            num_known = max(len(sent), 0 if prompt.is_new else order.max_draft_tokens)
            if len(tokens) > num_known:
                start, parent = order.start + len(sent), None if sent else line
                piece = LinePiece(line, start, tuple(tokens[len(sent) :]), parent)
                self._post(DraftAhead(order.request_id, self.name, (piece,)))
                sent = tokens
            verified = text.tokens(order.start, min(text.length, order.start + len(tokens)))
            is_right = tokens[: len(verified)] == verified
            is_last = self._latest.get(order.request_id) is order and self._has_time()
            if not (is_right and is_last) or completion.has_ended or len(tokens) >= _MOST_AHEAD:
                return
            more = self._timed_call(prompt.text + completion.text, _AHEAD_CALL, _LONGEST_S)
            if more is None or not more.text:
                return
            completion = Completion(completion.text + more.text, more.has_ended)

    def _end_order(self) -> None:
        with self._lock:
            self._num_open -= 1
            self._idle_since = None if self._num_open else self._clock.now()

    def _has_time(self) -> bool:
        """Return whether a call ahead ends before the next order is expected."""
        with self._lock:
            if self._idle_since is None or not self._pauses:
                return False
            end = self._clock.now() + self._calls.seconds(self.name, _AHEAD_CALL)
            return end <= self._idle_since + min(self._pauses)

    def _timed_call(self, prompt: str, max_tokens: int, seconds: float) -> Completion | None:
        began = self._clock.now()
        completion = self._call(prompt, max_tokens, seconds)
        if completion is not None:
            with self._lock:
                self._calls.add_transfer(self.name, max_tokens, self._clock.now() - began)
        return completion

    def _prompt(self, order: DraftOrder, text: TokenBuffer) -> _Prompt | None:
        """Return the text that an order is for."""
        tokenizer, name = self._tokenizer.result(), order.request_id
        with self._lock:
            if name not in self._latest:
                return None
            known = self._texts.setdefault(name, _Text(tokenizer))
            return known.prompt(text, order.start)

    def _spelt(self, prompt: _Prompt, completion: Completion) -> list[int]:
        """Return a completion in the target's tokens."""
        tokenizer = self._tokenizer.result()
        tokens = tokenizer.encode_behind(prompt.last, completion.text) if completion.text else None
        if tokens is None:
            return []
        kept = tokens if completion.has_ended else tokens[:-1]
        return list(itertools.takewhile(lambda token: token < self._vocab_size, kept))
