"""Draft lengths that keep requests within their targets."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.core.test_allocation import FLAT, STEEP, candidates, learned, lengths_of, work

from penstock.core.policies.base import DraftCandidate, View
from penstock.core.policies.registry import make_policy
from penstock.core.types import LatencyTarget, Request, Tenant

RISING = {1: 0.01, 8: 0.011, 64: 0.04}


def on_time(**options: Any) -> Any:
    return make_policy("allocation", "on_time", options)


def offered(*targets: float | None, tenants: str = "") -> list[DraftCandidate]:
    """Requests that have had a token for each 20 ms of the last second, with such targets for
    TPOT; a letter of `tenants` is whose each is."""
    found = candidates(*[8] * len(targets))
    for i, (candidate, tpot) in enumerate(zip(found, targets, strict=True)):
        state = candidate.state
        tenant = tenants[i] if tenants else "default"
        latency = LatencyTarget(tpot)
        state.request = Request(state.request.id, 4, 1000, tenant=tenant, latency=latency)
        state.num_output_tokens = 51
    return found


def at_one_second(rates: list[float], verify: dict[int, float], **changes: Any) -> View:
    view = work(learned(rates, verify=verify, draft=2e-4), num_rows=len(rates))
    return replace(view, now=1.0, **changes)


def test_without_targets_it_drafts_where_that_makes_tokens() -> None:
    assert lengths_of(on_time(), offered(None, None), at_one_second([0.95] * 2, FLAT)) == [8, 8]
    assert lengths_of(on_time(), offered(None, None), at_one_second([0.5] * 2, STEEP)) == [0, 0]


def test_who_needs_more_tokens_drafts_longer() -> None:
    """The price of a position is too high for the others."""
    view = at_one_second([0.7] * 12, {1: 0.01, 12: 0.01, 64: 0.08})
    plain = lengths_of(on_time(), offered(*[None] * 12), view)
    told = lengths_of(on_time(), offered(0.008, *[None] * 11), view)
    assert told[0] > plain[0]
    assert sum(told[1:]) <= sum(plain[1:])


@pytest.mark.parametrize("tpot", [1.0, 1e-4])
def test_who_is_in_time_anyway_or_cannot_be_asks_for_nothing(tpot: float) -> None:
    view = at_one_second([0.7] * 12, RISING)
    plain = lengths_of(on_time(), offered(*[None] * 12), view)
    assert lengths_of(on_time(), offered(tpot, *[None] * 11), view) == plain


def test_nothing_is_worth_a_target_where_its_value_is_nothing() -> None:
    view = at_one_second([0.7] * 12, RISING)
    plain = lengths_of(on_time(), offered(*[None] * 12), view)
    assert lengths_of(on_time(value=0), offered(0.008, *[None] * 11), view) == plain


def test_a_heavy_tenant_drafts_longer() -> None:
    tenants = {"a": Tenant("a", 8.0), "b": Tenant("b")}
    view = at_one_second([0.7] * 2, RISING, tenants=tenants)
    view = replace(view, room=view.room._replace(budget=6))
    a, b = lengths_of(on_time(fairness=0), offered(None, None, tenants="ab"), view)
    assert a > b
    assert lengths_of(on_time(), offered(None, None, tenants="aa"), view) == [3, 3]


def test_a_target_of_a_heavy_tenant_comes_first() -> None:
    tenants = {"a": Tenant("a", 8.0), "b": Tenant("b")}
    view = at_one_second([0.7] * 2, RISING, tenants=tenants)
    view = replace(view, room=view.room._replace(budget=3))
    own = lengths_of(on_time(fairness=0), offered(0.008, 0.008, tenants="ab"), view)
    assert own[0] > own[1]


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@example(targets=[None, 0.006, 0.01, 0.006], rates=[0.5, 0.875, 0.75, 0.875], budget=6)
@given(
    targets=st.lists(st.sampled_from([None, 0.003, 0.006, 0.01, 0.05]), min_size=1, max_size=4),
    rates=st.lists(st.floats(0.2, 0.9), min_size=4, max_size=4),
    budget=st.integers(0, 12),
)
def test_it_keeps_the_budget_and_is_nearly_as_good_as_trying_everything(
    targets: list[float | None], rates: list[float], budget: int
) -> None:
    view = at_one_second(rates[: len(targets)], RISING)
    view = replace(view, room=view.room._replace(budget=budget))
    everybody = [c._replace(limit=4) for c in offered(*targets)]
    policy = on_time(k_max=4)
    lengths = lengths_of(policy, everybody, view)
    assert sum(lengths) <= budget
    assert max(lengths) <= 4
    value = policy.objective(everybody, view)
    every = itertools.product(range(5), repeat=len(targets))
    best = max(value(plan) for plan in every if sum(plan) <= budget)
    assert value(lengths) >= 0.9 * best, "the example has 0.942"
