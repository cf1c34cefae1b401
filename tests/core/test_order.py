"""The order in which waiting requests are tried."""

import random
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.learn import Estimators
from penstock.core.queues import DELAY, ArrivalQueue, SizeAwareQueue, make_queue
from penstock.core.state import RequestState
from penstock.core.types import Request, Status

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

WORK = 100.0
"""Tokens that a request is taken to be worth beside its prompt."""


def by_prompt() -> SizeAwareQueue:
    return SizeAwareQueue(
        lambda s: s.request.prompt_len, lambda s: s.request.prompt_len + WORK, DELAY
    )


def by_what_moves() -> SizeAwareQueue:
    """As by estimates that are others whenever they are asked for."""
    rng = random.Random(7)
    return SizeAwareQueue(lambda _: rng.random(), lambda s: s.request.prompt_len + WORK)


def state(i: int, prompt_len: int = 4, max_tokens: int = 4) -> RequestState:
    return RequestState(Request(str(i), prompt_len, max_tokens), order=i)


def served(queue: ArrivalQueue) -> list[str]:
    """Admit everybody, as the queue says."""
    ids = []
    while (first := queue.first) is not None:
        queue.admit(first)
        ids.append(first.request.id)
    return ids


def test_in_order_of_arrival() -> None:
    queue = make_queue("arrival", Estimators())
    for i, length in enumerate((9, 3, 5)):
        queue.append(state(i, length))
    assert served(queue) == ["0", "1", "2"]


def test_a_long_prompt_is_passed_by_a_quarter_of_its_work() -> None:
    queue = by_prompt()
    queue.append(state(0, 3900))
    for i in range(1, 11):
        queue.append(state(i, 100))
    assert served(queue)[:6] == ["1", "2", "3", "4", "5", "0"], "5 times 200 of 4,000"


@pytest.mark.parametrize("new_queue", [ArrivalQueue, by_prompt])
def test_preempted_requests_come_first(new_queue: Callable[[], ArrivalQueue]) -> None:
    queue = new_queue()
    states = [state(i, length) for i, length in enumerate((9, 3, 5, 900))]
    for s in states:
        queue.append(s)
    for s in (states[3], states[1]):
        queue.admit(s)
        s.status = Status.PREEMPTED
    for s in (states[3], states[1]):
        queue.appendleft(s)
    assert [s.request.id for s in queue][:2] == ["1", "3"]
    assert served(queue)[:2] == ["1", "3"]


@pytest.mark.parametrize("new_queue", [ArrivalQueue, by_prompt, by_what_moves])
def test_the_order_is_what_admitting_comes_to(new_queue: Callable[[], ArrivalQueue]) -> None:
    """Whatever happens: arrivals, admissions out of turn, preemptions, cancellations."""
    rng = random.Random(5)
    queue, num = new_queue(), 0
    waiting: list[RequestState] = []
    running: list[RequestState] = []
    for _ in range(600):
        action = rng.random()
        if action < 0.5 or not waiting:
            waiting.append(state(num, int(rng.lognormvariate(6, 1.5)) + 1, rng.randint(1, 9)))
            queue.append(waiting[-1])
            num += 1
        elif action < 0.75:
            chosen = queue.first if rng.random() < 0.8 else rng.choice(waiting)
            assert chosen is not None
            queue.admit(chosen)
            waiting.remove(chosen)
            chosen.status = Status.RUNNING
            running.append(chosen)
        elif action < 0.85 and running:
            victim = running.pop()
            victim.status = Status.PREEMPTED
            queue.appendleft(victim)
            waiting.append(victim)
        else:
            queue.remove(waiting.pop(rng.randrange(len(waiting))))
        assert len(queue) == len(waiting)
        assert {s.request.id for s in queue} == {s.request.id for s in waiting}
    expected = [s.request.id for s in queue]
    assert len(expected) > 20
    assert served(queue) == expected


@given(st.lists(st.tuples(st.integers(1, 50_000), st.integers(0, 4)), min_size=1, max_size=80))
@settings(max_examples=200, deadline=None)
def test_no_request_is_delayed_by_more_than_a_quarter(load: list[tuple[int, int]]) -> None:
    """load: prompt length of each arrival, and how many are admitted after it."""
    queue, done, before, started = by_prompt(), 0.0, {}, {}
    arrived = 0.0

    def admit() -> None:
        nonlocal done
        first = queue.first
        if first is not None:
            started[first.request.id] = done
            queue.admit(first)
            done += first.request.prompt_len + WORK

    for i, (length, num) in enumerate(load):
        # Work that is there before the request, of which some may be done.
        before[str(i)] = (arrived, arrived - done)
        queue.append(state(i, length))
        arrived += length + WORK
        for _ in range(num):
            admit()
    while queue.first is not None:
        admit()
    largest = max(length for length, _ in load) + WORK
    for i, (length, _) in enumerate(load):
        due, backlog = before[str(i)]
        allowed = DELAY * (backlog + length + WORK) + largest
        assert started[str(i)] <= due + allowed + 1e-6
