import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.fluid import fair
from penstock.fluid.fair import draft_lengths, geometric_lengths


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


@pytest.mark.parametrize("heap_units", [250, -1], ids=["heap", "multiplier"])
def test_no_mismatch_against_brute_force(heap_units: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair, "_HEAP_UNITS", heap_units)
    rng = np.random.default_rng(7)
    for _ in range(1000):
        weights, rates, limits, budget = random_case(rng)
        survival = [[r**s for s in range(1, n + 1)] for r, n in zip(rates, limits, strict=True)]
        best = best_value(weights, survival, budget)
        by_curve = draft_lengths(weights, survival, budget).lengths
        by_rate = geometric_lengths(weights, rates, budget, limits)[0].tolist()
        for lengths in (by_curve, by_rate):
            assert sum(lengths) <= budget
            assert all(0 <= n <= most for n, most in zip(lengths, limits, strict=True))
            assert value(weights, survival, lengths) == pytest.approx(best, abs=1e-9)


@pytest.mark.parametrize("heap_units", [250, -1], ids=["heap", "multiplier"])
def test_price_is_the_best_gain_that_was_refused(heap_units, monkeypatch) -> None:
    monkeypatch.setattr(fair, "_HEAP_UNITS", heap_units)
    # Gains 0.8, 0.64, 0.512, ... and 0.5, 0.25, ...
    lengths, price = geometric_lengths([1.0, 1.0], [0.8, 0.5], 3, None)
    assert lengths.tolist() == [3, 0]
    assert price == pytest.approx(0.5)
    curves = [[0.8, 0.64, 0.512], [0.5, 0.25]]
    assert draft_lengths([1.0, 1.0], curves, 3) == ([3, 0], 0.5)
    assert draft_lengths([1.0, 1.0], curves, 9) == ([3, 2], 0.0)
    lengths, price = geometric_lengths([1.0, 1.0], [0.8, 0.5], 9, [3, 2])
    assert (lengths.tolist(), price) == ([3, 2], 0.0)


def test_any_falling_curve_is_served_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    for _ in range(200):
        weights = rng.uniform(0.1, 2, 3).tolist()
        survival = [np.sort(rng.uniform(0, 1, 4))[::-1].tolist() for _ in range(3)]
        budget = int(rng.integers(0, 13))
        found = []
        for units in (250, -1):
            monkeypatch.setattr(fair, "_HEAP_UNITS", units)
            found.append(draft_lengths(weights, survival, budget))
        assert found[0] == found[1]
        assert value(weights, survival, found[0].lengths) == pytest.approx(
            best_value(weights, survival, budget)
        )


@settings(deadline=None)
@given(
    clients=st.integers(1, 400),
    tokens_each=st.floats(0, 8),
    seed=st.integers(0, 99),
    limited=st.booleans(),
)
def test_multiplier_agrees_with_the_heap(clients, tokens_each, seed, limited) -> None:
    rng = np.random.default_rng(seed)
    weights, rates = 1 / rng.uniform(1, 6, clients), rng.uniform(0, 0.999, clients)
    limits = rng.integers(0, 9, clients) if limited else None
    budget = int(tokens_each * clients)
    wanted, price = fair._geometric_greedy(weights, rates, budget, limits)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fair, "_HEAP_UNITS", -1)
        lengths, multiplier = geometric_lengths(weights, rates, budget, limits)
    assert lengths.tolist() == wanted.tolist()
    assert multiplier == pytest.approx(price, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("limited", [False, True])
def test_a_sample_finds_the_price_for_very_many(limited: bool) -> None:
    rng = np.random.default_rng(8)
    weights, rates = 1 / rng.uniform(1, 6, 20_000), rng.uniform(0, 0.99, 20_000)
    # The sample of every 16th client misleads: it may draft nothing.
    rates[::16] = 0.0
    limits = rng.integers(0, 7, 20_000) if limited else None
    wanted, price = fair._geometric_greedy(weights, rates, 30_000, limits)
    lengths, multiplier = geometric_lengths(weights, rates, 30_000, limits)
    assert (lengths == wanted).all()
    assert multiplier == pytest.approx(price, rel=1e-9)


def test_many_almost_sure_clients_stay_within_the_budget() -> None:
    lengths, price = geometric_lengths(np.ones(1000), np.ones(1000), 777)
    assert lengths.sum() == 777
    assert price == pytest.approx(1.0)


def test_without_clients_or_budget() -> None:
    assert draft_lengths([], [], 5) == ([], 0.0)
    assert draft_lengths([1.0], [[]], 5) == ([0], 0.0)
    assert geometric_lengths([], [], 500)[0].tolist() == []
    assert geometric_lengths([0.0] * 300, [0.5] * 300, 500)[0].sum() == 0
    lengths, price = geometric_lengths([1.0, 1.0], [0.5, 0.0], 0)
    assert (lengths.tolist(), price) == ([0, 0], 0.5)
    assert math.isfinite(price)
