"""What micro-batches are worth, and how many are chosen."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.policies.pipeline.parts.planner import (
    Lane,
    Round,
    best_num,
    cycle_seconds,
    spin_num,
    split,
)


def line(fixed: float, each: float) -> Callable[[int], float]:
    return lambda n: fixed + each * n


def one_lane(
    draft: Callable[[int], float], verify: Callable[[int], float], batch: int = 8, **more: float
) -> Round:
    return Round((Lane(batch, draft, **more),), lambda group: verify(sum(group)))


def test_two_phases_that_halve_overlap_wholly() -> None:
    """The gain of two micro-batches is at most (d + v) / max(d, v)."""
    for ratio in (0.1, 0.3, 1.0, 3.0, 10.0):
        work = one_lane(line(0, ratio), line(0, 1.0))
        assert cycle_seconds(work, 0) == pytest.approx(8 * (1 + ratio))
        assert cycle_seconds(work, 1) == pytest.approx(8 * (1 + ratio))
        for num in (2, 4, 8):
            assert cycle_seconds(work, num) == pytest.approx(8 * max(1, ratio))


def test_phases_that_cost_the_same_for_half_the_rows_make_it_a_loss() -> None:
    work = one_lane(line(1.0, 0), line(1.0, 0))
    assert [cycle_seconds(work, n) for n in (1, 2, 3)] == pytest.approx([2, 2, 3])
    uneven = one_lane(line(0.2, 0), line(1.0, 0))
    assert cycle_seconds(uneven, 2) == pytest.approx(2.0)
    assert best_num(lambda n: cycle_seconds(uneven, n), 8) == 0


def test_a_plan_for_every_group_and_lane_costs_the_engine_time() -> None:
    work = Round((Lane(8, line(0, 1.0)),), lambda group: 1.0 * sum(group), host=0.5)
    assert cycle_seconds(work, 0) == pytest.approx(16.5)
    assert cycle_seconds(work, 1) == pytest.approx(17.0)
    assert cycle_seconds(work, 2) == pytest.approx(9.0)
    busy = Round((Lane(8, line(0, 1.0)),), lambda group: 1.0 * sum(group), host=3.0)
    assert cycle_seconds(busy, 4) == pytest.approx(24.0)


def test_splitting_a_step_is_never_a_gain_in_itself() -> None:
    """A stall while the large step was measured must not look like a reason for two small ones."""
    work = one_lane(line(0, 0.001), lambda n: 0.3 * n if n < 6 else 0.5 * n)
    assert best_num(lambda n: cycle_seconds(work, n), 8, 0.01) == 0


def test_one_core_for_both_gains_nothing() -> None:
    work = one_lane(line(0, 0.5), line(0, 1.0), slowdown=2.0, target_slowdown=2.0)
    assert cycle_seconds(work, 2) == pytest.approx(cycle_seconds(work, 1))
    half = one_lane(line(0, 0.5), line(0, 1.0), slowdown=1.5, target_slowdown=1.5)
    assert 8 < cycle_seconds(half, 2) < 12


def test_drafters_add_up_inside_a_step_and_overlap_beside_it() -> None:
    slow, fast = Lane(4, line(0, 3.0)), Lane(4, line(0, 1.0))
    work = Round((slow, fast), lambda group: 1.0 * sum(group))
    assert cycle_seconds(work, 0) == pytest.approx(12 + 4 + 8)
    assert cycle_seconds(work, 1) == pytest.approx(12 + 8)
    assert cycle_seconds(work, 2) == pytest.approx(12)
    remote = Round((Lane(4, line(0, 3.0), beside=True), fast), lambda group: 1.0 * sum(group))
    assert cycle_seconds(remote, 0) == pytest.approx(12 + 4 + 8)
    both = tuple(Lane(4, line(0, s), beside=True) for s in (3.0, 1.0))
    assert cycle_seconds(Round(both, lambda group: 8.0), 0) == pytest.approx(12 + 8)


def test_a_group_that_is_larger_than_the_others_sets_the_pace() -> None:
    work = one_lane(line(0, 1.0), line(0, 1.0), batch=3)
    assert cycle_seconds(work, 2) == pytest.approx(4.0), "two of three, drafted for and verified"


@given(batches=st.lists(st.integers(0, 40), min_size=1, max_size=5), num=st.integers(1, 8))
def test_splits_are_even(batches: list[int], num: int) -> None:
    groups = split(batches, num)
    assert len(groups) == num
    for lane, batch in enumerate(batches):
        sizes = [group[lane] for group in groups]
        assert sum(sizes) == batch
        assert max(sizes) - min(sizes) <= 1
    totals = [sum(group) for group in groups]
    assert max(totals) - min(totals) <= 1


@pytest.mark.parametrize(
    ("start", "most", "drop", "num"),
    [
        (0.4, 8, 0.05, 2),  # 8.4 s whole, 8.8 in two groups: 4.5% less; 9.2 in three: 8.7%
        (0.4, 8, 0.10, 3),
        (0.4, 8, 0.12, 3),  # 9.6 in four: 12.5% of the whole batch, 4.2% of three
        (0.4, 2, 0.30, 2),
        (1.0, 8, 0.05, 1),  # two are 10% less
        (0.0, 8, 0.05, 8),
        (0.0, 1, 0.05, 1),
    ],
)
def test_the_papers_heuristic_compares_with_the_unsplit_batch(start, most, drop, num) -> None:
    """Whatever drafters take."""
    for draft in (line(0, 0.001), line(0, 10.0)):
        assert spin_num(one_lane(draft, line(start, 1.0)), most, drop) == num


def test_the_papers_heuristic_splits_nothing_before_times_are_known() -> None:
    assert spin_num(one_lane(line(0, 0), line(0, 0)), 8, 0.05) == 1


def test_no_pipeline_is_among_the_settings() -> None:
    assert best_num(lambda n: 1.0 + n, 8) == 0


def test_a_small_gain_is_not_worth_it() -> None:
    def seconds(num: int) -> float:
        return 0.996 if num == 2 else 1.0

    assert best_num(seconds, 2) == 2
    assert best_num(seconds, 2, gain=0.005) == 0
