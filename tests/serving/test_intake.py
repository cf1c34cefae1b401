"""Who may have how many requests waiting, and when to come again."""

from __future__ import annotations

import itertools
import random

import pytest

from penstock.serving.intake import QueueFull, Shares, WaitingRoom


def test_one_client_leaves_as_much_as_it_holds() -> None:
    shares = Shares(12)
    assert shares.take("a", 6)
    assert not shares.take("a", 1)
    assert shares.most_of("a") == 6
    assert shares.take("b", 3)
    assert not shares.take("b", 1)
    shares.release("a", 3)
    assert shares.take("b", 1)


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_whoever_comes_next_finds_room(size: int) -> None:
    """However greedy those before it were, until there are as many clients as places."""
    shares = Shares(size)
    rng = random.Random(size)
    for client in "abcdef"[: size.bit_length()]:
        assert shares.take(client, 1)
        for num in sorted((rng.randrange(1, size + 1) for _ in range(20)), reverse=True):
            shares.take(client, num)
    assert shares.num_taken <= size


def test_a_limit_of_its_own_takes_the_place_of_the_share() -> None:
    shares = Shares(12, {"large": 10, "small": 2, "huge": 100})
    assert shares.take("large", 10)
    assert not shares.take("large", 1)
    assert not shares.take("small", 3)
    assert shares.take("small", 2)
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
