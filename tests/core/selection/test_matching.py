import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.policies.selection.parts.places import assign

INF = float("inf")


def brute_force(values: np.ndarray, room: list[int | None], alone: float) -> float:
    """The greatest sum over all assignments that respect capacities."""
    num_requests, num_drafters = values.shape
    best = -INF
    for choice in itertools.product(range(num_drafters + 1), repeat=num_requests):
        if all(r is None or choice.count(j) <= max(0, r) for j, r in enumerate(room)):
            best = max(best, total(values, list(choice), alone))
    return best


def total(values: np.ndarray, choice: list[int], alone: float) -> float:
    return sum(alone if j == values.shape[1] else values[i, j] for i, j in enumerate(choice))


numbers = st.one_of(st.floats(-5, 5, width=16), st.just(-INF))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_the_sum_is_the_greatest_within_capacities(data: st.DataObject) -> None:
    num_requests = data.draw(st.integers(0, 5))
    num_drafters = data.draw(st.integers(0, 3))
    rows = [
        data.draw(st.lists(numbers, min_size=num_drafters, max_size=num_drafters))
        for _ in range(num_requests)
    ]
    values = np.array(rows, dtype=float).reshape(num_requests, num_drafters)
    room = data.draw(
        st.lists(
            st.one_of(st.none(), st.integers(-1, 4)), min_size=num_drafters, max_size=num_drafters
        )
    )
    alone = data.draw(st.floats(-3, 3, width=16))
    chosen = assign(values, room, alone)
    places = [num_drafters if c is None else c for c in chosen]
    for j, r in enumerate(room):
        assert r is None or places.count(j) <= max(0, r)
    assert all(np.isfinite(values[i, c]) for i, c in enumerate(chosen) if c is not None)
    assert total(values, places, alone) == pytest.approx(brute_force(values, room, alone))


def test_alone_can_have_a_value_for_each_request() -> None:
    values = np.array([[1.0], [1.0]])
    assert assign(values, [None], np.array([0.5, 2.0])) == [0, None]


def test_equal_values_prefer_a_drafter() -> None:
    assert assign(np.zeros((2, 2)), [1, 1]) in ([0, 1], [1, 0])
    assert assign(np.zeros((1, 1)), [None]) == [0]
