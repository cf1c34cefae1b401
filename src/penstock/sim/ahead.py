"""A draft server that sends lines ahead (`core.ahead`), on the virtual clock.

It drafts what is ordered first, one request at a time, and otherwise grows the lines of its
requests where their texts are likely to come along. A step drafts a token for several lines at
once. Tokens are positions, as in all simulated texts; one that is wrong is -1.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.core.ahead import (
    LEAST_CHANCE,
    MAX_AHEAD_TOKENS,
    MAX_ROWS,
    Choices,
    LinePiece,
    Odds,
    num_worth,
    spots_of,
)
from penstock.core.types import DraftAhead, DraftOrder, DraftReady

RankOf = Callable[[str, int], int]
"""Of a position in a request's text: 0 where the drafter's first choice is right, 1 where the
runner-up is, 2 where neither is."""

Send = Callable[[float, int, DraftReady | DraftAhead], None]
"""Send a message with so many tokens at a time."""

_WRONG = -1


@dataclass(slots=True)
class _GrownLine:
    """wrong_at: first position at which it, or what it stands on, is wrong; infinity while all is
    right. left: positions at which other lines leave it."""

    parent: int
    start: int
    wrong_at: float = math.inf
    tokens: list[int] = field(default_factory=list)
    left: set[int] = field(default_factory=set)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(slots=True)
class _Rate:
    """How often something was so, with one of two before anything is known."""

    hits: float = 1.0
    all: float = 2.0

    def observe(self, hit: bool) -> None:
        self.hits += hit
        self.all += 1.0

    @property
    def value(self) -> float:
        return self.hits / self.all


@dataclass(slots=True)
class _Request:
    """What the server knows of a request: the length of its text, and its lines."""

    length: int
    lines: dict[int, _GrownLine] = field(default_factory=dict)
    num_lines: int = 0
    first: _Rate = field(default_factory=_Rate)
    runner_up: _Rate = field(default_factory=_Rate)

    @property
    def num_ahead(self) -> int:
        return sum(max(0, line.end - max(line.start, self.length)) for line in self.lines.values())

    def begin(self, start: int, parent: int | None = None) -> int:
        self.num_lines += 1
        self.lines[self.num_lines] = _GrownLine(parent or self.num_lines, start)
        return self.num_lines

    def trunk(self) -> int:
        """The oldest line that goes on from the text; a new one where none does."""
        for name, line in self.lines.items():
            if line.start <= self.length <= line.end:
                return name
        return self.begin(self.length)

    @property
    def choices(self) -> Choices:
        return Choices(self.first.value, self.runner_up.value)

    def odds(self) -> dict[int, Odds]:
        """Of all lines, by name."""
        found: dict[int, Odds] = {}
        first, runner_up = self.choices
        for name, line in self.lines.items():
            begin = max(line.start, self.length)
            accepted = [first] * (line.end - begin)
            reached = 1.0
            if line.start >= self.length and line.parent in found:
                steps = line.start - max(self.lines[line.parent].start, self.length)
                before = found[line.parent].accepted[:steps]
                reached = found[line.parent].reached * math.prod(before) * (1 - first)
                accepted = [runner_up, *accepted[1:]]
            left = {at - begin for at in line.left}
            if line.parent != name:
                left.add(line.start - begin)
            found[name] = Odds(reached, accepted, frozenset(left), can_grow=True)
        return found


class LinesDrafting:
    """One server, with what it has heard. Events at the server happen in order of time.

    seconds: of a step for one line; row_seconds: for each line more
    """

    def __init__(self, name: str, seconds: float, row_seconds: float, rank: RankOf, send: Send):
        self._name = name
        self._seconds, self._row_seconds = seconds, row_seconds
        self._rank, self._send = rank, send
        self._requests: dict[str, _Request] = {}
        self._orders: list[DraftOrder] = []
        self._num_unheard = 0
        self._is_busy = False
        self._happens: list[tuple[float, int, Callable[[float], None]]] = []
        self._count = itertools.count()

    @property
    def next_time(self) -> float:
        """When something happens next at the server that an ordered draft may come of; infinity if
        none is ordered."""
        waits = self._happens and (self._orders or self._num_unheard)
        return self._happens[0][0] if waits else math.inf

    def run(self, now: float) -> None:
        """Let happen what is due."""
        while self._happens and self._happens[0][0] <= now:
            at, _, happen = heapq.heappop(self._happens)
            happen(at)
            if not self._is_busy:
                self._work(at)

    # --- what it hears --------------------------------------------------------------------------

    def hear_text(self, request_id: str, length: int, at: float) -> None:
        """At a time it hears that a text has so many tokens."""
        self._at(at, lambda _: self._follow(request_id, length))

    def hear_order(self, order: DraftOrder, at: float) -> None:
        self._num_unheard += 1
        self._at(at, lambda _: self._take(order))

    def hear_end(self, request_id: str, at: float) -> None:
        self._at(at, lambda _: self._forget(request_id))

    def _at(self, at: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._happens, (at, next(self._count), happen))

    def _take(self, order: DraftOrder) -> None:
        self._num_unheard -= 1
        if order.request_id not in self._requests:
            self._follow(order.request_id, order.start)
        self._orders.append(order)

    def _forget(self, request_id: str) -> None:
        self._requests.pop(request_id, None)
        self._orders = [o for o in self._orders if o.request_id != request_id]

    def _follow(self, request_id: str, length: int) -> None:
        request = self._requests.get(request_id)
        if request is None:
            self._requests[request_id] = _Request(length)
            return
        for position in range(request.length, length):
            rank = self._rank(request_id, position)
            request.first.observe(rank == 0)
            if rank:
                request.runner_up.observe(rank == 1)
        request.length = max(length, request.length)
        kept = {n: line for n, line in request.lines.items() if line.wrong_at >= request.length}
        # One that the text has passed is of no more use, unless another still stands on it.
        request.lines = {
            n: line
            for n, line in kept.items()
            if line.end >= request.length or any(o.parent == n for o in kept.values())
        }

    # --- what it does ---------------------------------------------------------------------------

    def _work(self, now: float) -> None:
        """Begin the next step, if there is anything to do."""
        while self._orders:
            order = self._orders[0]
            request = self._requests[order.request_id]
            missing = 0
            if order.start == request.length:
                line = request.trunk()
                end = request.lines[line].end
                missing = order.start + order.max_draft_tokens - end
            if missing > 0:
                self._step(now, [(order.request_id, line)])
                return
            self._orders.pop(0)
            num = order.max_draft_tokens
            ready = DraftReady(order.request_id, order.epoch, order.round, order.drafter, num)
            self._send(now, num, ready)
        grown = self._grown()
        if grown:
            self._step(now, grown)

    def _grown(self) -> list[tuple[str, int]]:
        """Which lines to grow in idle time, the likeliest of all requests."""
        spots = []
        for request_id, request in self._requests.items():
            if request.num_ahead > MAX_AHEAD_TOKENS - MAX_ROWS:
                continue
            request.trunk()
            odds = request.odds()
            names = list(odds)
            found = spots_of(list(odds.values()), request.choices, LEAST_CHANCE)
            spots += [(s.chance, request_id, names[s.line], s.at) for s in found]
        spots.sort(key=lambda s: -s[0])
        grown = []
        for _, request_id, name, at in spots[: num_worth([s[0] for s in spots])]:
            request = self._requests[request_id]
            if at is not None:
                above = request.lines[name]
                at += max(above.start, request.length)
                above.left.add(at)
                name = request.begin(at, name)
                request.lines[name].wrong_at = above.wrong_at if above.wrong_at < at else math.inf
            grown.append((request_id, name))
        return grown

    def _step(self, now: float, grown: list[tuple[str, int]]) -> None:
        self._is_busy = True
        seconds = self._seconds + self._row_seconds * (len(grown) - 1)
        self._at(now + seconds, lambda at: self._grow(at, grown))

    def _grow(self, now: float, grown: list[tuple[str, int]]) -> None:
        """A step has ended. Of lines that were given up meanwhile nothing is kept."""
        self._is_busy = False
        pieces: dict[str, list[LinePiece]] = {}
        for request_id, name in grown:
            request = self._requests.get(request_id)
            line = None if request is None else request.lines.get(name)
            if line is None:
                continue
            at, is_new = line.end, not line.tokens
            wanted = 1 if is_new and line.parent != name else 0
            if line.wrong_at >= at and self._rank(request_id, at) != wanted:
                line.wrong_at = min(line.wrong_at, at)
            token = at if line.wrong_at > at else _WRONG
            line.tokens.append(token)
            parent = line.parent if is_new else None
            pieces.setdefault(request_id, []).append(LinePiece(name, at, (token,), parent))
        for request_id, found in pieces.items():
            self._send(now, len(found), DraftAhead(request_id, self._name, tuple(found)))
