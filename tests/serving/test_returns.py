"""Overload on a clock of its own: who is told to come again finds a place then."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from penstock.serving.intake import QueueFull, Shares, WaitingRoom
from penstock.serving.returns import DepartureRate, Promises


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Overload:
    """Requests come at random and begin one by one, `RATE` a second. Those that are refused come
    again as they were told, or at random instead.

    num_clients: whose requests they are, in turns
    """

    SIZE = 40
    RATE = 10.0

    arrivals_per_s: float
    num_clients: int
    obeys: bool = True
    clock: Clock = field(default_factory=Clock)
    first: list[bool] = field(default_factory=list)
    """Whether each request that came for the first time was taken."""
    again: list[bool] = field(default_factory=list)
    """Likewise, that came again for the first time."""
    waits: list[float] = field(default_factory=list)
    idle_s: float = 0.0

    def run(self, seconds: float) -> Overload:
        rng = random.Random(1)
        room = WaitingRoom(self.SIZE, clock=self.clock)
        waiting: deque[tuple[str, float]] = deque()
        coming: list[tuple[float, int, int]] = []
        number, next_begin = 0, 1 / self.RATE
        heapq.heappush(coming, (0.0, 0, 0))
        while self.clock.now < seconds:
            if coming[0][0] >= next_begin:
                self.clock.now = next_begin
                next_begin += 1 / self.RATE
                if waiting:
                    request, since = waiting.popleft()
                    self.waits.append(self.clock.now - since)
                    room.answered(request)
                else:
                    self.idle_s += 1 / self.RATE
                continue
            self.clock.now, request_number, attempt = heapq.heappop(coming)
            if attempt == 0:
                number += 1
                gap = rng.expovariate(self.arrivals_per_s)
                heapq.heappush(coming, (self.clock.now + gap, number, 0))
            client, request = f"c{request_number % self.num_clients}", f"{request_number}"
            is_taken = True
            try:
                room.enter(client, [request])
                waiting.append((request, self.clock.now))
            except QueueFull as full:
                is_taken = False
                told = math.ceil(full.retry_after_s)
                seconds_away = told if self.obeys else rng.uniform(0, told)
                if attempt < 3 and told < 60:
                    # Their own retry, a network away.
                    back = self.clock.now + seconds_away + rng.uniform(0, 0.2)
                    heapq.heappush(coming, (back, request_number, attempt + 1))
            if attempt < 2:
                (self.again if attempt else self.first).append(is_taken)
        return self


def share(taken: list[bool]) -> float:
    return sum(taken) / len(taken)


@pytest.mark.parametrize("arrivals_per_s", [13.0, 20.0, 40.0])
def test_who_comes_when_told_is_admitted(arrivals_per_s: float) -> None:
    """At up to four times the load that there is room for."""
    told = Overload(arrivals_per_s, num_clients=10_000).run(200)
    assert len(told.again) > 300
    assert share(told.again) > 0.95
    assert told.idle_s < 1
    # The control: who comes at another time is admitted no more often than anybody else.
    others = Overload(arrivals_per_s, num_clients=10_000, obeys=False).run(200)
    assert share(others.again) < 0.5


@pytest.mark.parametrize("arrivals_per_s", [13.0, 20.0, 40.0])
def test_clients_that_send_more_meanwhile_are_their_own_rivals(arrivals_per_s: float) -> None:
    told = Overload(arrivals_per_s, num_clients=30).run(200)
    others = Overload(arrivals_per_s, num_clients=30, obeys=False).run(200)
    assert 0.6 < share(told.again) > 2 * share(others.again)


def test_a_burst_of_one_client_comes_back_spread() -> None:
    """As many as the room has places for one client, and three times as many again."""
    clock = Clock()
    room = WaitingRoom(40, clock=clock)
    waiting: deque[str] = deque()
    back: list[tuple[float, str]] = []
    for number in range(80):
        try:
            room.enter("a", [str(number)])
            waiting.append(str(number))
        except QueueFull as full:
            heapq.heappush(back, (math.ceil(full.retry_after_s), str(number)))
    assert len(waiting) == 20
    taken = tries = 0
    while back and tries < 1000:
        clock.now += 0.1
        if waiting:
            room.answered(waiting.popleft())
        while back and back[0][0] <= clock.now:
            _, request = heapq.heappop(back)
            tries += 1
            try:
                room.enter("a", [request])
                waiting.append(request)
                taken += 1
            except QueueFull as full:
                heapq.heappush(back, (clock.now + math.ceil(full.retry_after_s), request))
    assert taken == 60
    assert tries < 2.5 * taken


def burst(seconds_each: float, slower: float) -> int:
    """How many of 48 requests, all asked at once by one client that tries again twice, come to
    nothing. Two run at once; after two seconds the machine is so many times slower."""
    clock, rng = Clock(), random.Random(5)
    room = WaitingRoom(16, clock=clock)
    waiting: deque[str] = deque()
    coming = [(0.001 * number, f"{number}", 0) for number in range(48)]
    num_free, num_lost = 2, 0
    while coming:
        clock.now, request, attempt = heapq.heappop(coming)
        if request == "end":
            num_free += 1
        else:
            try:
                room.enter("a", [request])
                waiting.append(request)
            except QueueFull as full:
                back = clock.now + math.ceil(full.retry_after_s) + rng.uniform(0, 0.05)
                num_lost += attempt == 2
                if attempt < 2:
                    heapq.heappush(coming, (back, request, attempt + 1))
        while num_free and waiting:
            num_free -= 1
            room.answered(waiting.popleft())
            took = seconds_each * (slower if clock.now > 2 else 1)
            heapq.heappush(coming, (clock.now + took, "end", 0))
    return num_lost


@pytest.mark.parametrize("slower", [1.0, 2.0])
@pytest.mark.parametrize("seconds_each", [0.03, 0.15])
def test_two_retries_are_enough(seconds_each: float, slower: float) -> None:
    """Nothing is known of the rate when a burst comes; and all who are told the same whole second
    come at once. So no more are told one than there are places for."""
    assert burst(seconds_each, slower) == 0


def test_nobody_is_kept_away_for_those_who_never_come_again() -> None:
    clock = Clock()
    room = WaitingRoom(8, clock=clock)
    for number in range(4):
        room.enter("a", [f"{number}"])
    clock.now += 0.5
    for number in range(50):
        with pytest.raises(QueueFull):
            room.enter("a", [f"again{number}"])
    for number in range(4):
        clock.now += 0.1
        room.answered(f"{number}")
    # Some places are held, and after a while none.
    clock.now += 1
    room.enter("b", ["b1"])
    with pytest.raises(QueueFull):
        room.enter("b", ["b2", "b3", "b4"])
    room.leave(["b1"])
    for _ in range(100):
        clock.now += 1
        room.enter("c", ["c"])
        room.leave(["c"])
    room.enter("b", ["b5", "b6", "b7", "b8"])


def test_who_would_wait_too_long_is_told_at_once() -> None:
    clock = Clock()
    room = WaitingRoom(400, clock=clock)
    for number in range(100):
        room.enter("a", [f"{number}"], within_s=0.1)  # nothing is known of the rate yet
    for number in range(50):
        clock.now += 0.1
        room.answered(f"{number}")
    room.enter("a", ["patient"], within_s=5.5)
    with pytest.raises(QueueFull, match=r"begin after about 5\.2 s, .* longer than 4 s") as full:
        room.enter("a", ["late"], within_s=4)
    assert full.value.retry_after_s == 2
    # Another client's share of the server is its own.
    room.enter("b", ["b1", "b2"], within_s=1)


def test_shedding_keeps_admitted_requests_fast() -> None:
    """At twice the load that there is room for, with a room that holds 20 s of work."""
    clock, rng = Clock(), random.Random(3)
    waits: dict[float | None, list[float]] = {}
    for within_s in (None, 2.0):
        clock.now = 0.0
        room = WaitingRoom(400, clock=clock)
        waiting: deque[tuple[str, float]] = deque()
        waits[within_s] = []
        number, next_begin, next_arrival = 0, 0.1, 0.0
        while clock.now < 120:
            clock.now = min(next_begin, next_arrival)
            if next_begin <= next_arrival:
                next_begin += 0.1
                if waiting:
                    request, since = waiting.popleft()
                    waits[within_s].append(clock.now - since)
                    room.answered(request)
                continue
            next_arrival += rng.expovariate(20)
            number += 1
            try:
                room.enter("a", [f"{number}"], within_s)
                waiting.append((f"{number}", clock.now))
            except QueueFull:
                continue
    late = {within_s: sorted(found)[int(0.99 * len(found))] for within_s, found in waits.items()}
    assert late[2.0] < 2.5
    assert late[None] > 10
    assert len(waits[2.0]) > 0.97 * len(waits[None])


def test_a_rate_is_that_of_a_busy_server() -> None:
    """One request in ten seconds, each of which waits a tenth of a second."""
    clock = Clock()
    rate = DepartureRate(clock)
    for _ in range(10):
        rate.watch(True)
        clock.now += 0.1
        rate.add("a")
        rate.watch(False)
        clock.now += 9.9
    assert rate.seconds_each() == pytest.approx(0.1)
    assert rate.seconds_of("b", 2) == pytest.approx(0.2)


def test_a_queue_that_stands_still_takes_ever_longer() -> None:
    clock = Clock()
    rate = DepartureRate(clock)
    rate.watch(True)
    for _ in range(10):
        clock.now += 0.1
        rate.add("a")
    moving = rate.seconds_each()
    clock.now += 20
    assert rate.seconds_each() > 100 * moving
    clock.now += 20
    assert rate.seconds_each() >= 30
    assert not rate.is_known


def test_what_is_remembered_is_bounded() -> None:
    clock = Clock()
    shares = Shares(40)
    promises = Promises(shares, 10, clock)
    for number in range(10_000):
        assert promises.make(f"{number % 7}", 1, 0.0, 0.5, 0.1) <= 60
    assert sum(map(len, promises._of.values())) == len(promises._later) <= 600
    most = 0
    for _ in range(60):
        clock.now += 1
        promises.hold_places()
        assert shares.num_taken == promises.num_held <= 10
        most = max(most, promises.num_held)
    assert most == 10
    clock.now += 10
    promises.hold_places()
    assert promises.num_held == shares.num_taken == 0
    assert not promises._of
    assert not promises._later
