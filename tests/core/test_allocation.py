from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.learn import Estimators
from penstock.core.policies.base import DraftCandidate, Room, View
from penstock.core.policies.registry import PolicyError, make_policy
from penstock.core.state import Drafter, RequestState
from penstock.core.types import Request, Tenant, Verdict


def candidates(*limits: int, drafter: str = "d") -> list[DraftCandidate]:
    return [
        DraftCandidate(RequestState(Request(f"r{i}", 4, 100), i), drafter, limit)
        for i, limit in enumerate(limits)
    ]


def work(estimators: Estimators | None = None, *, budget: int = 1000, num_rows: int = 4) -> View:
    return View({}, estimators or Estimators(), room=Room(budget, num_rows, num_rows))


def lengths_of(policy: Any, offered: Sequence[DraftCandidate], step: View) -> list[int]:
    """What everybody is granted, which a price never cuts here."""
    grants = policy.allocate(offered, step)
    assert all(grant.min_survival == 0 for grant in grants)
    return [grant.num_draft_tokens for grant in grants]


def learned(
    rates: Sequence[float],
    *,
    verify: dict[int, float],
    draft: float = 0.0,
    drafter: str = "d",
    before: Estimators | None = None,
) -> Estimators:
    """Estimators that have seen, beside what was seen before, requests r0, r1, ... accepted at
    `rates`, steps of so many rows take so long, and a drafting step `draft` seconds."""
    estimators = before or Estimators()
    for i, rate in enumerate(rates):
        for n in range(1000):
            accepted = int((n + 1) * rate) - int(n * rate)
            evidence = Verdict(
                f"r{i}", 0, 0, (), drafter, 1, accepted, num_decided=1, evidence=rate
            )
            estimators.acceptance.on_verdict(evidence)
    for rows, seconds in verify.items():
        estimators.times.target.add_measurement(rows, seconds)
    estimators.times.curve_of(drafter).add_measurement(1, draft)
    return estimators


@settings(deadline=None)
@given(
    limits=st.lists(st.integers(0, 9), max_size=8), budget=st.integers(0, 40), k=st.integers(0, 9)
)
def test_fixed_fills_the_budget_evenly(limits: list[int], budget: int, k: int) -> None:
    lengths = lengths_of(
        make_policy("allocation", "fixed", {"k": k}), candidates(*limits), work(budget=budget)
    )
    wanted = [min(k, limit) for limit in limits]
    assert sum(lengths) == min(budget, sum(wanted))
    assert all(length <= most for length, most in zip(lengths, wanted, strict=True))
    shortened = [n for n, most in zip(lengths, wanted, strict=True) if n < most]
    assert not shortened or max(lengths) - min(shortened) <= 1


@settings(deadline=None)
@given(total=st.integers(0, 30), num=st.integers(1, 7))
def test_fixed_shares_are_equal_over_a_cycle(total: int, num: int) -> None:
    policy = make_policy("allocation", "fixed", {"total": total})
    everybody = candidates(*[100] * num)
    rounds = [lengths_of(policy, everybody, work()) for _ in range(num)]
    assert {sum(r[i] for r in rounds) for i in range(num)} == {total}


FLAT = {1: 0.01, 1000: 0.01}
STEEP = {1: 0.001, 1000: 1.0}


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("fixed", {"k": -1}, "k must be a whole number from 0 to 1024, not -1"),
        (
            "fixed",
            {"total": -2},
            "total must be a whole number from 0 to 1000000000, or null, not -2",
        ),
        ("priced", {"k_max": -1}, "k_max must be a whole number from 0 to 1024, not -1"),
    ],
)
def test_bad_options(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        make_policy("allocation", name, options)


def of_tenants(num: dict[str, int], limit: int = 8) -> list[DraftCandidate]:
    names = [name for name, n in num.items() for _ in range(n)]
    return [
        DraftCandidate(RequestState(Request(f"r{i}", 4, 100, tenant=name), i), "d", limit)
        for i, name in enumerate(names)
    ]


@pytest.mark.parametrize(
    ("weights", "expected"), [((1.0, 1.0), (12, 28)), ((1.0, 9.0), (4, 36)), ((9.0, 1.0), (12, 28))]
)
def test_a_short_budget_is_shared_out_by_weight(weights, expected) -> None:
    """Two requests of a tenant could use 12 positions."""
    offered = of_tenants({"quiet": 2, "greedy": 10}, limit=6)
    tenants = {n: Tenant(n, w) for n, w in zip(("quiet", "greedy"), weights, strict=True)}

    def drafted(budget: int, *, is_fair: bool) -> tuple[int, int]:
        step = View({}, Estimators(), tenants=tenants, room=Room(budget, 12, 12), is_fair=is_fair)
        lengths = lengths_of(make_policy("allocation", "fixed", {"k": 6}), offered, step)
        return sum(lengths[:2]), sum(lengths[2:])

    assert drafted(40, is_fair=True) == expected
    assert drafted(40, is_fair=False) == (8, 32)
    assert drafted(100, is_fair=True) == (12, 60), "nothing is short"


@pytest.mark.parametrize(("made", "most"), [(5, 4), (9, 0), (10, 0)])
def test_no_draft_is_shorter_than_none(made: int, most: int) -> None:
    """Where steps overlap all tokens that are left, and more, may be on their way."""
    state = RequestState(Request("r", 4, 10, 0.0), 0)
    state.num_output_tokens = made
    assert Drafter("d").longest_draft(state) == most
    state.num_output_tokens = 12
    assert Drafter("d", max_len=4).longest_draft(state) == 0
