import itertools

import numpy as np
import pytest
from scipy.optimize import minimize

from lab.common.fair_path import expected_goodput, fair_optimum, fluid_path


def mixtures(rates: list[float], budget: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Expected goodput of every decision that uses the whole budget, shape [decisions, clients]."""
    every = itertools.product(range(budget + 1), repeat=len(rates))
    return np.array([expected_goodput(rates, np.array(s)) for s in every if sum(s) == budget])


def fair_utility(goodput: np.ndarray, weights: list[float], fairness: float) -> float:
    """Σ v_i U(x_i) of the α-fair family: log x for exponent 1, else x^(1−a) / (1−a)."""
    utility = np.log(goodput) if fairness == 1 else goodput ** (1 - fairness) / (1 - fairness)
    return float(utility @ np.asarray(weights))


@pytest.mark.parametrize("fairness", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 3.0, 0.5]])
def test_optimum_is_that_over_all_mixtures_of_decisions(fairness, weights) -> None:
    rates = [0.85, 0.6, 0.35]
    corners = mixtures(rates, 6)

    def loss(share: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
        return -fair_utility(share @ corners, weights, fairness)

    count = len(corners)
    solved = minimize(
        loss,
        np.full(count, 1 / count),
        bounds=[(0, 1)] * count,
        constraints={"type": "eq", "fun": lambda share: share.sum() - 1},
        options={"ftol": 1e-12, "maxiter": 500},
    )
    found = fair_optimum(rates, 6, weights, fairness)
    assert found.lengths.sum() == pytest.approx(6)
    assert fair_utility(found.goodput, weights, fairness) == pytest.approx(-solved.fun, abs=2e-5)


def test_no_client_gains_by_a_shift_of_draft_tokens() -> None:
    rng = np.random.default_rng(5)
    rates, weights = rng.uniform(0.2, 0.95, 30), rng.uniform(0.5, 2, 30)
    found = fair_optimum(rates, 75, weights)
    whole = np.floor(found.lengths + 1e-9)
    more = weights * rates ** (whole + 1) / found.goodput
    assert found.lengths.sum() == pytest.approx(75)
    assert (more <= found.price * (1 + 1e-6)).all()
    last = weights * rates ** np.ceil(found.lengths - 1e-9) / found.goodput
    assert (last[found.lengths > 1e-9] >= found.price * (1 - 1e-6)).all()


def test_total_tokens_is_greedy_and_splits_ties() -> None:
    found = fair_optimum([0.5, 0.5, 0.2], 3, fairness=0.0)
    assert found.lengths == pytest.approx([1.5, 1.5, 0.0])
    assert found.goodput == pytest.approx([1.625, 1.625, 1.0])


def test_limits_and_plenty_are_kept() -> None:
    assert fair_optimum([0.9, 0.5], 10, limits=[2, 3]).lengths == pytest.approx([2, 3])
    bound = fair_optimum([0.9, 0.5], 4, limits=[2, 9])
    assert bound.lengths == pytest.approx([2, 2])
    nothing = fair_optimum([0.0, 0.0], 4)
    assert nothing.goodput == pytest.approx([1.0, 1.0])
    assert fair_optimum([0.5], 0.0).goodput == pytest.approx([1.0])


@pytest.mark.parametrize("start", [0.05, 1.0, 20.0])
def test_fluid_paths_go_to_the_optimum(start: float) -> None:
    rates = [0.85, 0.7, 0.5, 0.3]
    best = fair_optimum(rates, 8).goodput
    path = fluid_path(np.full(4, start), rates, 8, 10.0, 0.005)
    assert path.times[-1] == pytest.approx(10.0)
    assert path.goodput.shape == (2001, 4)
    assert np.abs(path.goodput[-1] - best).max() < 0.01


def test_fluid_path_falls_exponentially_where_v_stands_still() -> None:
    path = fluid_path([5.0], [0.5], 2, 1.0, 1e-4)
    wanted = 1.75 + (5.0 - 1.75) * np.exp(-path.times)
    assert path.goodput[:, 0] == pytest.approx(wanted, abs=1e-3)
