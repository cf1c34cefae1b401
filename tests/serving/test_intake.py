"""Who may have how many requests waiting, and when to come again."""

import heapq
import itertools
import math
import random
from collections import deque

import pytest

from penstock.serving.limits import QueueFull, Shares, WaitingRoom


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_one_client_leaves_as_much_as_it_holds() -> None:
    shares = Shares(12)
    assert shares.reserve("a", 6)
    assert not shares.reserve("a", 1)
    assert shares.most_of("a") == 6
    assert shares.reserve("b", 3)
    assert not shares.reserve("b", 1)
    shares.release("a", 3)
    assert shares.reserve("b", 1)


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_the_next_client_finds_room(size: int) -> None:
    """However greedy those before it were, until there are as many clients as places."""
    shares = Shares(size)
    rng = random.Random(size)
    for client in "abcdef"[: size.bit_length()]:
        assert shares.reserve(client, 1)
        for num in sorted((rng.randrange(1, size + 1) for _ in range(20)), reverse=True):
            shares.reserve(client, num)
    assert shares.num_taken <= size


def test_a_limit_of_its_own_takes_the_place_of_the_share() -> None:
    shares = Shares(12, {"large": 10, "small": 2, "huge": 100})
    assert shares.reserve("large", 10)
    assert not shares.reserve("large", 1)
    assert not shares.reserve("small", 3)
    assert shares.reserve("small", 2)
    assert (shares.most_of("large"), shares.most_of("huge")) == (10, 12)


def test_requests_leave_once() -> None:
    times = itertools.count(0, 10)
    room = WaitingRoom(4, clock=lambda: next(times))
    room.enter("a", ["a1", "a2"])
    with pytest.raises(QueueFull, match="2 requests are waiting already, of at most 4, 2 of them"):
        room.enter("a", ["a3"])
    room.enter("b", ["b1"])
    room.answered("a1")
    room.answered("a1")
    room.leave(["a1", "nobody"])
    with pytest.raises(QueueFull):
        room.enter("a", ["a3", "a4"])
    room.leave(["a2", "b1"])
    room.enter("a", ["a3", "a4"])


@pytest.mark.parametrize(("seconds", "told"), [(0.0, 1), (7.5, 7.5), (1e9, 60)])
def test_what_is_told_is_bounded(seconds: float, told: float) -> None:
    assert QueueFull("full", seconds).retry_after_s == told


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


def test_refused_requests_are_told_the_rate_at_which_others_begin() -> None:
    clock = Clock()
    room = WaitingRoom(40, clock=clock)
    for number in range(20):
        room.enter("a", [f"{number}"])
    assert _told(room, 20) == 1, "nothing is known of the rate yet"
    for number in range(20):
        clock.now += 0.5
        room.answered(f"{number}")
        room.enter("a", [f"next {number}"])
    assert _told(room, 1) == 1
    assert _told(room, 10) == pytest.approx(11 / 2)
    assert _told(room, 1000) == 60


def _told(room: WaitingRoom, num: int) -> float:
    with pytest.raises(QueueFull) as full:
        room.enter("a", [f"again {number}" for number in range(num)])
    return full.value.retry_after_s


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
    assert full.value.retry_after_s == pytest.approx(1.2)
    # Another client's share of the server is its own.
    room.enter("b", ["b1", "b2"], within_s=1)
