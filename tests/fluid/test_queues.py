import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fluid.simulate import lindley

from penstock.fluid.queues import mean_excess, queue_limit, tail_exponent, tail_exponent_bound


@settings(deadline=None)
@given(before=st.integers(2, 400), between=st.floats(0.001, 0.999), survival=st.floats(0.01, 0.99))
def test_the_tail_exponent_solves_eq_13(before: int, between: float, survival: float) -> None:
    here = before * (survival + between * (1 - survival))
    theta = tail_exponent(before, here, survival)
    moment = before * np.logaddexp(math.log1p(-survival), math.log(survival) + theta)
    assert moment == pytest.approx(theta * here, rel=1e-8)
    assert theta > 0
    assert theta >= tail_exponent_bound(before, here, survival) * (1 - 1e-9), "lemma D.2"


def test_the_bound_that_theorem_b2_prints_is_none() -> None:
    """8 (n_k − n_{k−1} p_k) / n_k, instead of / n_{k−1}."""
    theta = tail_exponent(100, 60, 0.5)
    assert 8 * (60 - 50) / 100 <= theta < 8 * (60 - 50) / 60


def test_where_no_root_exists() -> None:
    assert tail_exponent(40, 40, 0.5) == math.inf, "a queue never outgrows its threshold"
    assert tail_exponent(40, 50, 0.5) == math.inf
    assert queue_limit(40, 40, 0.5, 10.0) == 40
    for here in (20, 19):
        with pytest.raises(ValueError, match="grow without bound"):
            tail_exponent(40, here, 0.5)
    with pytest.raises(ValueError, match=r"lies in \(0, 1\]"):
        tail_exponent(40, 30, 0.0)


def test_no_tail_where_thresholds_do_not_fall() -> None:
    rng = np.random.default_rng(5)
    arrivals = rng.binomial(12, 0.9, (50, 2000))
    queue, most = np.zeros(50), 0.0
    for came in arrivals.T:
        queue = queue + came
        queue = np.where(queue >= 12, queue - 12, queue)
        most = max(most, queue.max())
    assert most <= 12


@pytest.mark.parametrize(
    ("before", "here", "survival"), [(20, 11, 0.5), (9, 7, 0.7), (40, 12, 0.25)]
)
def test_a_queue_stays_below_its_limit(before: int, here: int, survival: float) -> None:
    """Appendix D's process itself."""
    runs, steps, delta = 400, 1000, 0.05
    rng = np.random.default_rng(11)
    queue = np.zeros(runs)
    most = np.zeros(runs)
    for _ in range(steps):
        queue = queue + rng.binomial(before, survival, runs)
        queue = np.where(queue >= here, queue - here, queue)
        most = np.maximum(most, queue)
    limit = queue_limit(before, here, survival, math.log(steps / delta))
    assert (most > limit).mean() <= delta
    alone = queue_limit(before, here, survival, math.log(1 / delta))
    assert (most > alone).mean() > delta


def test_the_lindley_process_that_dominates_it_keeps_the_tail() -> None:
    before, here, survival = 20, 11, 0.5
    rng = np.random.default_rng(2)
    steps = rng.binomial(before, survival, (4000, 300)) - here
    at_end = lindley(steps, here)[:, -1]
    theta = tail_exponent(before, here, survival)
    excess = math.log(20) / theta
    assert (at_end - here >= excess).mean() <= 1 / 20
    assert (at_end - here >= excess / 2).mean() > 1 / 20


def test_kingman_holds() -> None:
    rng = np.random.default_rng(3)
    mean, count = 18.0, 20.0
    paths = lindley(rng.poisson(mean, (2000, 400)) - count, 0.0)
    bound = mean_excess(mean, count - mean)
    assert bound == mean / (2 * (count - mean))
    assert 0.5 * bound < paths[:, -1].mean() <= bound
