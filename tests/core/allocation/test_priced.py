"""`priced` against GoodSpeed where time is free, and against all plans where it is not."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.test_allocation import FLAT, candidates, learned, lengths_of, work

from penstock.core.learn import Estimators
from penstock.core.policies.base import DraftCandidate, Room, View
from penstock.core.policies.registry import make_policy
from penstock.core.state import Outcome, RequestState
from penstock.core.types import Request, Tenant, Verdict
from penstock.fluid.fair import geometric_lengths

MARGIN = 1.01
"""Least gain of drafts over none."""
SURE = 1e12
"""Tokens that an expectation counts for, so that a rate is exactly what it is told to be."""


def priced(**options: Any) -> Any:
    return make_policy("allocation", "priced", options)


@dataclass
class Scene:
    """A step of requests r0, r1, ... of one tenant each, and V / T of every plan of it."""

    rates: Sequence[float]
    rows_s: dict[int, float]  # seconds of the target by rows
    drafting_s: dict[str, float]  # seconds of a drafting step, by drafter
    weights: Sequence[float] = ()
    drafters: Sequence[str] = ()  # of each request
    beside: frozenset[str] = frozenset()
    limit: int = 4
    budget: int = 1000
    num_others: int = 0  # requests that only decode
    host_s: float = 3e-4
    learn: Estimators = field(default_factory=Estimators)

    def __post_init__(self) -> None:
        num, times = len(self.rates), self.learn.times
        self.weights = self.weights or [1.0] * num
        self.drafters = self.drafters or ["d"] * num
        times.overhead = self.host_s
        for rows, seconds in self.rows_s.items():
            times.target.add_measurement(rows, seconds)
        for drafter, seconds in self.drafting_s.items():
            times.curve_of(drafter).add_measurement(1, seconds)
        for i, (rate, drafter) in enumerate(zip(self.rates, self.drafters, strict=True)):
            self.learn.acceptance.expect(f"r{i}", drafter, rate, SURE)

    def plan(self, weights: Sequence[float] = ()) -> list[int]:
        """What `priced` grants where tenants have such weights, and are served by them alone."""
        owned = enumerate(weights or self.weights)
        tenants = {f"t{i}": Tenant(f"t{i}", weight) for i, weight in owned}
        asked = [
            DraftCandidate(RequestState(Request(f"r{i}", 4, 100, tenant=f"t{i}"), i), d, self.limit)
            for i, d in enumerate(self.drafters)
        ]
        num = len(asked) + self.num_others
        view = View({}, self.learn, tenants=tenants, beside=self.beside)
        view = view._replace(room=Room(self.budget, num, num))
        return lengths_of(priced(fairness=0, k_max=self.limit), asked, view)

    def value_a_second(self, lengths: Sequence[int]) -> float:
        """V / T, written out."""
        others = self.num_others * sum(self.weights) / len(self.weights)
        value = others + sum(
            weight * sum(rate**s for s in range(length + 1))
            for weight, rate, length in zip(self.weights, self.rates, lengths, strict=True)
        )
        drafted = {
            name: max(n for n, d in zip(lengths, self.drafters, strict=True) if d == name)
            * self.drafting_s[name]
            for name in set(self.drafters)
        }
        inside = sum(seconds for name, seconds in drafted.items() if name not in self.beside)
        latest = max((drafted[name] for name in self.beside & drafted.keys()), default=0.0)
        rows = len(lengths) + self.num_others + sum(lengths)
        verify = float(np.interp(rows, list(self.rows_s), list(self.rows_s.values())))
        return value / (self.host_s + verify + inside + latest)

    def best(self) -> float:
        """The largest V / T of all plans within limits and budget."""
        every = itertools.product(range(self.limit + 1), repeat=len(self.rates))
        return max(self.value_a_second(plan) for plan in every if sum(plan) <= self.budget)


def any_scene(seed: int, drafters: Sequence[str], beside: frozenset[str] = frozenset()) -> Scene:
    rng = random.Random(seed)
    num = rng.randint(1, 3)
    seconds = sorted(rng.uniform(0.002, 0.02) for _ in range(4))
    return Scene(
        [rng.uniform(0.3, 0.95) for _ in range(num)],
        dict(zip((1, 4, 8, 20), seconds, strict=True)),
        {d: rng.choice([1e-5, 3e-4, 1e-3, 3e-3]) for d in drafters},
        [rng.choice([1.0, 1.0, 2.0, 5.0]) for _ in range(num)],
        [rng.choice(drafters) for _ in range(num)],
        beside,
        budget=rng.choice([0, 2, 5, 1000]),
        num_others=rng.choice([0, 0, 2]),
    )


SEEDS = range(150)


@pytest.mark.parametrize(
    ("drafters", "beside", "share"),
    [("a", "", 1.0), ("a", "a", 1.0), ("abc", "abc", 1.0), ("abc", "", 0.99), ("abc", "bc", 0.99)],
)
def test_no_other_plan_is_worth_more_a_second(drafters: str, beside: str, share: float) -> None:
    num_drafting = 0
    for seed in SEEDS:
        scene = any_scene(seed, drafters, frozenset(beside))
        plan, best = scene.plan(), scene.best()
        plain = scene.value_a_second([0] * len(plan))
        num_drafting += any(plan)
        assert sum(plan) <= scene.budget
        if best <= MARGIN * plain:
            assert not any(plan), "too little to be gained"
        elif share * best > MARGIN * plain:
            assert scene.value_a_second(plan) >= share * best * (1 - 1e-9), (seed, plan)
    assert num_drafting > len(SEEDS) / 3


@pytest.mark.parametrize("seed", range(30))
def test_where_time_is_free_it_is_goodspeed(seed: int) -> None:
    rng = random.Random(seed)
    num, budget = rng.randint(1, 12), rng.randint(1, 30)
    rates = [rng.uniform(0.4, 0.95) for _ in range(num)]
    scene = Scene(rates, {1: 0.01, 500: 0.01}, {"d": 0.0}, limit=8, budget=budget)
    expected, _ = geometric_lengths([1.0] * num, rates, budget, [8] * num)
    assert scene.plan() == expected.tolist()


def test_the_values_of_two_tenants_are_not_exchanged() -> None:
    """The negative control: a plan for exchanged values is worth less a second."""
    scene = Scene([0.7, 0.7], FLAT, {"d": 1e-4}, [1.0, 6.0], budget=5)
    own, exchanged = scene.plan(), scene.plan([6.0, 1.0])
    assert own == exchanged[::-1]
    assert scene.value_a_second(exchanged) < 0.95 * scene.value_a_second(own)


def rounds(
    weights: dict[str, float], accepted: Sequence[int], *, budget: int = 6, **options: Any
) -> list[int]:
    """Draft tokens in a hundred rounds of a request of each tenant; equal acceptance is expected
    of all."""
    asked = [
        DraftCandidate(RequestState(Request(f"r{i}", 4, 10**6, tenant=name), i), "d", 8)
        for i, name in enumerate(weights)
    ]
    tenants = {name: Tenant(name, weight) for name, weight in weights.items()}
    num = len(asked)
    view = work(learned([0.7] * num, verify=FLAT, draft=1e-4), budget=budget, num_rows=num)
    view, policy = view._replace(tenants=tenants), priced(**options)
    drafted = np.zeros(num, dtype=int)
    for t in range(100):
        found = lengths_of(policy, asked, view)
        drafted += found
        kept = [min(n, most) for n, most in zip(found, accepted, strict=True)]
        outcomes = [
            Outcome(c.state, Verdict(c.state.request.id, 0, t, (0,) * (k + 1), "d", n, k))
            for c, n, k in zip(asked, found, kept, strict=True)
        ]
        policy.on_step(outcomes, 0.01 * t)
    return drafted.tolist()


def test_ten_times_the_weight_makes_longer_drafts() -> None:
    light, heavy = rounds({"a": 1.0, "b": 10.0}, [2, 2])
    assert heavy > 2 * light
    light, heavy = rounds({"a": 1.0, "b": 0.0}, [2, 2])
    assert heavy < light, "no weight: what is left"


def test_who_had_fewer_tokens_drafts_more_by_the_exponent() -> None:
    alike = {"a": 1.0, "b": 1.0}
    assert np.ptp(rounds(alike, [5, 0], fairness=0)) <= 100, "ties"
    rich, poor = rounds(alike, [5, 0])
    assert poor > rich
    richest, poorest = rounds(alike, [5, 0], fairness=4)
    assert poorest - richest > poor - rich


def test_nobody_drafts_where_there_is_nobody() -> None:
    assert priced().allocate([], work()) == []


@settings(deadline=None)
@given(
    limits=st.lists(st.integers(0, 12), min_size=1, max_size=7),
    rates=st.lists(st.floats(0.05, 0.98), min_size=7, max_size=7),
    names=st.lists(st.sampled_from("abc"), min_size=7, max_size=7),
    beside=st.sets(st.sampled_from("abc")),
    budgets=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    k_max=st.integers(0, 20),
    draft_s=st.sampled_from([0.0, 1e-4, 3e-3]),
)
def test_every_cap_is_kept(limits, rates, names, beside, budgets, k_max, draft_s) -> None:
    """Also by a plan that is kept while the budget changes."""
    learn = Estimators()
    for name in "abc":
        learned([], verify={1: 0.01, 60: 0.03}, draft=draft_s, drafter=name, before=learn)
    asked = [c._replace(drafter=name) for c, name in zip(candidates(*limits), names, strict=False)]
    for i, c in enumerate(asked):
        learn.acceptance.expect(c.state.request.id, c.drafter, rates[i], SURE)
    policy, num = priced(k_max=k_max), len(limits)
    for budget in budgets:
        view = View({}, learn, beside=frozenset(beside), room=Room(budget, num, num))
        found = lengths_of(policy, asked, view)
        assert sum(found) <= budget
        assert all(0 <= n <= min(m, k_max) for n, m in zip(found, limits, strict=True))
    assert policy.reserve(asked[0].state) == k_max
