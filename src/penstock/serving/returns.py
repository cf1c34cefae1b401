"""When clients that were refused should come again, so that they then find a place."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

_WINDOW_S = 30.0
_COUNTED = 256
_FEW = 8
"""Fewer departures say little about the rate."""
_LONGEST_S = 60.0
_AHEAD_S = 1.0
"""So long before somebody is due places are kept free for it."""
_GRACE_S = 2.0
"""Whoever comes so late is still expected."""


class DepartureRate:
    """How fast requests leave a queue, by a clock that stands still while it is empty: a server
    that nobody waits for does not show how fast it could be.

    clock: seconds, of any origin
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._departures: deque[tuple[float, str]] = deque()
        """When, by the busy clock, and of which client."""
        self._begin_s = 0.0
        """Of what is counted."""
        self._busy_s = 0.0
        self._busy_since: float | None = None

    @property
    def is_known(self) -> bool:
        """Whether enough have left lately to refuse others for it."""
        self._forget_old()
        return len(self._departures) >= _FEW

    def watch(self, is_busy: bool) -> None:
        """Somebody waits, or nobody does."""
        self._busy_s = self._now()
        self._busy_since = self._clock() if is_busy else None

    def add(self, client: str) -> None:
        """A request of a client has left."""
        self._departures.append((self._now(), client))
        if len(self._departures) > _COUNTED:
            self._begin_s = self._departures.popleft()[0]

    def seconds_each(self) -> float:
        """Between two requests."""
        self._forget_old()
        now = self._now()
        if not self._departures:
            return now - self._begin_s
        # A queue that stands still takes ever longer.
        standing = now - self._departures[-1][0]
        return max(standing, (now - self._begin_s) / len(self._departures))

    def seconds_of(self, client: str, num_clients: int) -> float:
        """Between two requests of a client: at its own rate, or at its share of everybody's where
        that is higher. num_clients: that share it."""
        share = num_clients * self.seconds_each()
        num = sum(of == client for _, of in self._departures)
        return min(share, (self._now() - self._begin_s) / num) if num else share

    def _now(self) -> float:
        if self._busy_since is None:
            return self._busy_s
        return self._busy_s + self._clock() - self._busy_since

    def _forget_old(self) -> None:
        oldest = self._now() - _WINDOW_S
        while self._departures and self._departures[0][0] < oldest:
            self._begin_s = self._departures.popleft()[0]
        self._begin_s = max(self._begin_s, oldest)


class Places(Protocol):
    """What a promise is of."""

    def take(self, client: str, num: int) -> bool: ...

    def release(self, client: str, num: int) -> None: ...


@dataclass(slots=True, order=True)
class _Promise:
    """due: when the client should come. num: of requests. has_places: they are held for it."""

    due: float
    client: str = field(compare=False)
    num: int = field(compare=False)
    has_places: bool = field(default=False, compare=False)
    is_open: bool = field(default=True, compare=False)


class Promises:
    """Who was told to come again, and when; for those who are due, places are held.

    Promises are as far apart as requests leave the queue, so that not all that were refused come
    again at once. most: places that are held at once; no client has more of them than it could have
    otherwise.
    """

    def __init__(self, places: Places, most: int, clock: Callable[[], float]) -> None:
        self.num_held = 0
        """Places that are held."""
        self._places = places
        self._most = most
        self._clock = clock
        self._turn = 0.0
        """When the last of all that have a promise could begin."""
        self._later: list[_Promise] = []
        """A heap of those that are not due yet."""
        self._now: deque[_Promise] = deque()
        """Those that are."""
        self._of: dict[str, deque[_Promise]] = {}
        self._last: dict[str, float] = {}
        """Of clients with promises, the last one's time before it was rounded up."""

    def make(self, client: str, num: int, soonest_s: float, own_s: float, each_s: float) -> float:
        """Seconds after which a client should come again with so many requests: whole ones, at
        least one.

        soonest_s: before that there is no place. own_s, each_s: between two of the client's
        requests, and of any. Who would come after the longest time, or has more promises than it
        leaves to others within it, is promised nothing.
        """
        now = self._clock()
        turn = max(self._turn, now) + num * each_s
        at = max(turn, now + soonest_s, self._last.get(client, now) + num * own_s)
        left = _LONGEST_S / max(each_s, 1e-3) - len(self._later)
        if at > now + _LONGEST_S or len(self._of.get(client, ())) >= max(left, 1):
            return _LONGEST_S
        self._turn, self._last[client] = turn, at
        promise = _Promise(now + max(1, math.ceil(at - now)), client, num)
        self._of.setdefault(client, deque()).append(promise)
        heapq.heappush(self._later, promise)
        return promise.due - now

    def keep(self, client: str) -> None:
        """A client comes: if it was told to, its places are free for it."""
        mine = self._of.get(client)
        if mine and mine[0].due <= self._clock():
            self._close(mine[0])

    def hold_places(self) -> None:
        """Hold places for those who are due, and no more for those who are late."""
        now = self._clock()
        while self._later and self._later[0].due <= now + _AHEAD_S:
            self._now.append(heapq.heappop(self._later))
        while self._now and (not self._now[0].is_open or self._now[0].due + _GRACE_S < now):
            promise = self._now.popleft()
            if promise.is_open:
                self._close(promise)
        for promise in islice(self._now, _COUNTED):
            is_due = promise.is_open and not promise.has_places
            if is_due and self.num_held + promise.num <= self._most:
                promise.has_places = self._places.take(promise.client, promise.num)
                self.num_held += promise.num if promise.has_places else 0

    def let_go(self) -> None:
        """Hold nothing: nobody waits, and there is room for all."""
        for promise in self._now:
            if promise.has_places:
                self._places.release(promise.client, promise.num)
                promise.has_places = False
        self.num_held = 0

    def _close(self, promise: _Promise) -> None:
        mine = self._of[promise.client]
        mine.remove(promise)
        if not mine:
            del self._of[promise.client], self._last[promise.client]
        promise.is_open = False
        if promise.has_places:
            self._places.release(promise.client, promise.num)
            self.num_held -= promise.num
