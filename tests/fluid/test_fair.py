import itertools
import math

import numpy as np
import pytest

from penstock.fluid.fair import geometric_lengths


def value(weights: list[float], survival: list[list[float]], lengths: list[int]) -> float:
    return sum(w * sum(g[:n]) for w, g, n in zip(weights, survival, lengths, strict=True))


def best_value(weights: list[float], survival: list[list[float]], budget: int) -> float:
    every = itertools.product(*(range(len(g) + 1) for g in survival))
    return max(value(weights, survival, list(s)) for s in every if sum(s) <= budget)


def random_case(rng: np.random.Generator) -> tuple[list[float], list[float], list[int], int]:
    clients = int(rng.integers(1, 5))
    rates = rng.choice([0.0, 1.0, 0.5, *rng.uniform(0, 1, 3)], clients)
    weights = rng.choice([0.0, 1.0, 2.0, *rng.uniform(0.1, 3, 3)], clients)
    limits = rng.integers(0, 6, clients)
    return weights.tolist(), rates.tolist(), limits.tolist(), int(rng.integers(0, 10))


def test_no_mismatch_against_brute_force() -> None:
    rng = np.random.default_rng(7)
    for _ in range(1000):
        weights, rates, limits, budget = random_case(rng)
        survival = [[r**s for s in range(1, n + 1)] for r, n in zip(rates, limits, strict=True)]
        lengths = geometric_lengths(weights, rates, budget, limits)[0].tolist()
        assert sum(lengths) <= budget
        assert all(0 <= n <= most for n, most in zip(lengths, limits, strict=True))
        best = best_value(weights, survival, budget)
        assert value(weights, survival, lengths) == pytest.approx(best, abs=1e-9)


def test_price_is_the_best_gain_that_was_refused() -> None:
    # Gains 0.8, 0.64, 0.512, ... and 0.5, 0.25, ...
    lengths, price = geometric_lengths([1.0, 1.0], [0.8, 0.5], 3, None)
    assert lengths.tolist() == [3, 0]
    assert price == pytest.approx(0.5)
    lengths, price = geometric_lengths([1.0, 1.0], [0.8, 0.5], 9, [3, 2])
    assert (lengths.tolist(), price) == ([3, 2], 0.0)


def test_without_clients_or_budget() -> None:
    assert geometric_lengths([], [], 500)[0].tolist() == []
    assert geometric_lengths([0.0] * 300, [0.5] * 300, 500)[0].sum() == 0
    lengths, price = geometric_lengths([1.0, 1.0], [0.5, 0.0], 0)
    assert (lengths.tolist(), price) == ([0, 0], 0.5)
    assert math.isfinite(price)
