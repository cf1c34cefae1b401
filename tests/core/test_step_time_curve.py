import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.learn.curve import StepTimeCurve


def curve(*points: tuple[float, float]) -> StepTimeCurve:
    made = StepTimeCurve()
    for size, seconds in points:
        made.add_measurement(size, seconds)
    return made


def test_nothing_measured_costs_nothing() -> None:
    assert StepTimeCurve()(5) == 0.0
    assert StepTimeCurve().points() == []


def test_it_interpolates_and_goes_on() -> None:
    made = curve((2, 1.0), (6, 3.0), (10, 4.0))
    assert made(2) == 1.0
    assert made(4) == pytest.approx(2.0)
    assert made(8) == pytest.approx(3.5)
    assert made(1) == 1.0, "flat before the first"
    assert made(18) == pytest.approx(4.0 + 8 * 3 / 8), "the slope of the chord beyond the last"
    assert curve((4, 2.0))(9) == 2.0


def test_many_sizes_at_once_are_the_same() -> None:
    made = curve((2, 1.0), (6, 3.0), (10, 4.0))
    sizes = np.arange(20, dtype=np.int64)
    assert made.at(sizes).tolist() == pytest.approx([made(int(s)) for s in sizes])


@settings(deadline=None)
@given(
    points=st.lists(st.tuples(st.floats(0.5, 2000), st.floats(0, 1)), min_size=1, max_size=60),
    sizes=st.lists(st.floats(0, 4000), min_size=2, max_size=20),
)
def test_it_never_falls(points: list[tuple[float, float]], sizes: list[float]) -> None:
    predicted = curve(*points).at(np.array(sorted(sizes)))
    assert (np.diff(predicted) >= -1e-12).all()
    assert (predicted >= 0).all()


def test_violators_are_pooled_in_the_mean() -> None:
    made = curve((12, 2.0), (10, 1.0), (2, 3.0))
    assert [seconds for _, seconds in made.points()] == pytest.approx([2.0, 2.0, 2.0])


def test_it_averages_repeated_measurements() -> None:
    rng = random.Random(0)
    made = StepTimeCurve()
    for _ in range(400):
        made.add_measurement(4, rng.uniform(0.9, 1.1))
    assert made(4) == pytest.approx(1.0, abs=0.05)


def test_it_follows_a_change() -> None:
    made = curve(*[(4, 1.0)] * 10, *[(4, 2.0)] * 60)
    assert made(4) == pytest.approx(2.0, abs=0.05)


def test_a_slower_machine_is_slower_at_every_size() -> None:
    made = curve((1, 1.0), (4, 2.0), (8, 4.0), *[(4, 2.0)] * 30, *[(4, 3.0)] * 90)
    assert made(4) == pytest.approx(3.0, abs=0.05)
    assert 1.25 < made(1) <= 1.5
    assert 5.0 < made(8) <= 6.0


def test_what_is_still_being_learned_of_one_size_says_nothing_of_others() -> None:
    made = curve((1, 1.0), (8, 4.0), (4, 4.0), *[(4, 2.0)] * 10)
    assert [made(1), made(8)] == [1.0, 4.0]
    assert made(4) < 3.0


def test_a_size_of_its_own_is_learned_in_the_end() -> None:
    """Nothing but its own price has changed: the others find back to theirs."""
    rounds = [(1, 1.0), (8, 4.0), (4, 3.5)] * 200
    made = curve((1, 1.0), (4, 2.0), (8, 4.0), *rounds)
    assert [made(n) for n in (1, 4, 8)] == pytest.approx([1.0, 3.5, 4.0], rel=0.03)


def test_a_stall_of_a_known_size_hardly_counts() -> None:
    made = curve((4, 1.0), (4, 500.0))
    assert made(4) == pytest.approx(1.3)


def test_a_stall_of_a_new_size_is_bounded_by_its_neighbours() -> None:
    made = curve((1, 1.0), (16, 1.2), (5, 500.0), (8, 0.0))
    assert made(5) <= 1.2
    assert made(8) >= 1.0


def test_a_first_measurement_of_nothing_does_not_stick() -> None:
    made = curve((4, 0.0), *[(4, 1.0)] * 50)
    assert made(4) == pytest.approx(1.0, abs=0.02)


def test_nonsense_is_ignored() -> None:
    assert curve((0, 1.0), (-3, 1.0), (3, -1.0)).is_empty


def test_small_sizes_have_cells_of_their_own_and_large_ones_share() -> None:
    made = curve(*((size, size / 10) for size in range(1, 1001)))
    assert [size for size, _ in made.points()][:12] == list(range(1, 13))
    assert len(made.points()) < 80
