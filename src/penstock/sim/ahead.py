"""Draft server that sends lines ahead (`core.ahead`), on the virtual clock.

Its sessions are those of the live draft server (`core.drafting`); the drafter and its step times
are simulated. Tokens are positions, as in all simulated texts; a wrong token is -1."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence

from penstock.core.drafting.lines import Guess, Session, SessionOrder
from penstock.core.drafting.sessions import DraftingSessions, SessionDraft
from penstock.core.types import DraftAhead, DraftOrder, DraftReady, SamplingParams

RankOf = Callable[[str, int], int]
"""Rank of a text's position: 0 the drafter's first choice is right, 1 its runner-up, 2 neither."""

Send = Callable[[float, int, DraftReady | DraftAhead], None]
"""Sends a message with that many tokens at a time."""
_WRONG = -1
_GREEDY = SamplingParams(temperature=0.0)


class _PretendedDrafter:
    """`Proposer` that guesses by rank. num_rows: guesses since it was reset."""

    max_length = vocab_size = 1 << 62
    kv_usage = 0.0
    has_runner_up = True

    def __init__(self, rank: RankOf) -> None:
        self._rank = rank
        self.num_rows = 0

    def propose(self, sessions: Sequence[Session], *, ahead: bool) -> None:
        self.num_rows += len(sessions)
        for session in sessions:
            at = session.length
            is_right = self._rank(session.key, at) == (0 if session.barred is None else 1)
            if _WRONG in session.text or any(g.token_id == _WRONG for g in session.guesses):
                is_right = False
            session.guesses.append(Guess(at if is_right else _WRONG, 0.5))

    def limit_vocab(self, size: int) -> None:
        """Ignore the limit: positions are no token ids."""

    def fork(self, session: Session, branch: Session) -> None:
        """Do nothing: there is no KV."""

    def cut(self, session: Session, length: int) -> None:
        """Do nothing: there is no KV."""

    def release_session(self, session: Session) -> None:
        """Do nothing: there is no KV."""


class LinesDrafting:
    """One draft server. seconds: of a step for one line; row_seconds: for each further line."""

    def __init__(
        self,
        name: str,
        max_draft_tokens: int,
        seconds: float,
        row_seconds: float,
        rank: RankOf,
        send: Send,
    ) -> None:
        self._name = name
        self._seconds, self._row_seconds = seconds, row_seconds
        self._send = send
        self._drafter = _PretendedDrafter(rank)
        self._sessions = DraftingSessions(self._drafter, max_draft_tokens)
        self._lengths: dict[str, int] = {}
        self._orders: dict[str, DraftOrder] = {}
        self._num_unheard = 0
        """Orders on their way to the server."""
        self._heard: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = itertools.count()
        self._made: list[SessionDraft] | None = None
        """Drafts of the step under way, which ends at `_free_at`."""
        self._free_at = 0.0

    @property
    def next_time(self) -> float:
        """Time of the next event that may lead to an ordered draft; infinity without orders."""
        return self._next_at() if self._orders or self._num_unheard else math.inf

    def _next_at(self) -> float:
        if self._made is not None:
            return self._free_at
        return self._heard[0][0] if self._heard else math.inf

    def run(self, now: float) -> None:
        """Run all events that are due."""
        while (at := self._next_at()) <= now:
            if self._made is not None:
                self._end_step(at, self._made)
            while self._heard and self._heard[0][0] <= at:
                heapq.heappop(self._heard)[2](at)
            if self._sessions.is_busy:
                self._drafter.num_rows = 0
                self._made = self._sessions.step()
                rows = self._drafter.num_rows
                self._free_at = at
                if rows:
                    self._free_at += self._seconds + self._row_seconds * (rows - 1)

    def _end_step(self, at: float, made: list[SessionDraft]) -> None:
        self._made = None
        for draft in made:
            self._answer(at, self._orders.pop(draft.key), len(draft.token_ids))
        for key, pieces in self._sessions.take_lines():
            num = sum(len(piece.token_ids) for piece in pieces)
            self._send(at, num, DraftAhead(key, self._name, pieces))

    def _answer(self, at: float, order: DraftOrder, num: int) -> None:
        ready = DraftReady(order.request_id, order.epoch, order.round, order.drafter, num)
        self._send(at, num, ready)

    def hear_text(self, request_id: str, length: int, at: float) -> None:
        """Tell the server, at a time, that a text has so many tokens."""
        self._hear(at, lambda now: self._follow(request_id, length, now))

    def hear_order(self, order: DraftOrder, at: float) -> None:
        self._num_unheard += 1
        self._hear(at, lambda now: self._order(order, now))

    def hear_end(self, request_id: str, at: float) -> None:
        self._hear(at, lambda _: self._forget(request_id))

    def _hear(self, at: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._heard, (at, next(self._count), act))

    def _follow(self, request_id: str, length: int, now: float) -> None:
        """Extend a text; an order for the shorter one is answered without a draft."""
        known = self._lengths.get(request_id)
        if known is None:
            self._sessions.begin(request_id, range(length), _GREEDY, sends_lines=True)
        elif length > known:
            self._sessions.extend(request_id, range(known, length), 0)
            order = self._orders.pop(request_id, None)
            if order is not None:
                self._answer(now, order, 0)
        self._lengths[request_id] = max(length, known or 0)

    def _order(self, order: DraftOrder, now: float) -> None:
        self._num_unheard -= 1
        request_id, length = order.request_id, order.start
        self._follow(request_id, length, now)
        if self._lengths[request_id] > length:
            self._answer(now, order, 0)
            return
        self._orders[request_id] = order
        wanted = SessionOrder(order.round, length, order.max_draft_tokens, order.min_survival)
        self._sessions.order(request_id, wanted)

    def _forget(self, request_id: str) -> None:
        self._sessions.release_session(request_id)
        self._lengths.pop(request_id, None)
        self._orders.pop(request_id, None)
