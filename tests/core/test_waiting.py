from __future__ import annotations

import pytest

from penstock.core.queues import WaitingRequests
from penstock.core.state import RequestState
from penstock.core.types import Request


def state(name: str, prompt_len: int = 4) -> RequestState:
    return RequestState(Request(name, prompt_len, 4), order=0)


def names(waiting: WaitingRequests) -> list[str]:
    return [s.request.id for s in waiting]


def test_one_queue_without_keys() -> None:
    waiting = WaitingRequests(lambda _: None)
    a, b, c = state("a"), state("b"), state("c")
    waiting.append(a)
    waiting.append(b)
    waiting.appendleft(c)
    assert names(waiting) == ["c", "a", "b"]
    waiting.remove(a)
    assert (names(waiting), len(waiting)) == (["c", "b"], 2)
    with pytest.raises(KeyError, match="a"):
        waiting.remove(a)
    assert len(waiting) == 2
    waiting.admit(c)
    assert (names(waiting), len(waiting)) == (["b"], 1)


def test_queues_by_key() -> None:
    waiting = WaitingRequests(lambda s: s.request.prompt_len)
    for name, length in (("a", 7), ("b", 5), ("c", 7)):
        waiting.append(state(name, length))
    assert [s.request.id for s in waiting.queue(7)] == ["a", "c"]
    first = waiting.queue(5).first
    assert first is not None
    waiting.admit(first)
    assert names(waiting) == ["a", "c"]
    assert waiting.queue(1).first is None


def test_a_request_stays_in_the_queue_that_it_came_to() -> None:
    keys = iter(range(9))
    waiting = WaitingRequests(lambda _: next(keys))
    a, b = state("a"), state("b")
    waiting.append(a)
    waiting.append(b)
    waiting.remove(a)
    waiting.admit(b)
    assert not waiting
    assert not names(waiting)
