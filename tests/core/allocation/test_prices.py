"""Drafters that end their drafts get a price, and those whose drafts do not pay are left out."""

from collections.abc import Sequence
from typing import Any

import pytest
from tests.core.test_allocation import FLAT, candidates, learned, lengths_of, of_tenants

from penstock.core.learn import Estimators
from penstock.core.policies.base import DraftCandidate, Room, View
from penstock.core.policies.registry import make_policy
from penstock.core.state import Drafter, DrafterKind, Grant
from penstock.core.types import Tenant, Verdict

ENDING = Drafter("d", kind=DrafterKind.ENDING)


def rows_of(seconds: float) -> dict[int, float]:
    """Steps of 10 ms, and so much for each row."""
    return {rows: 1e-2 + seconds * rows for rows in (3, 6, 15, 500, 1000)}


def view_of(learn: Estimators, drafter: Drafter = ENDING, *, budget: int = 1000) -> View:
    return View({"d": drafter}, learn, room=Room(budget, 3, 3))


def granted(asked: Sequence[DraftCandidate], view: View, **options: Any) -> list[Grant]:
    return list(make_policy("allocation", "priced", options).allocate(asked, view))


def test_alike_requests_get_one_price_that_rises_with_the_cost_of_a_row() -> None:
    prices = []
    for row in (1e-5, 1e-4, 4e-4):
        grants = granted(candidates(20, 20, 20), view_of(learned([], verify=rows_of(row))))
        assert all(g.num_draft_tokens for g in grants)
        assert len({g.min_survival for g in grants}) == 1
        prices.append(grants[0].min_survival)
    assert 0 < prices[0] < prices[1] < prices[2] < 1


def test_a_draft_ends_with_the_token_that_no_longer_pays() -> None:
    """At the price without prices, no granted token is below it, and the next one would be."""
    learn, asked = learned([0.8] * 3, verify=rows_of(1e-3), draft=0.0), candidates(20, 20, 20)
    price = granted(asked, view_of(learn))[0].min_survival
    survival = [1.0, *learn.acceptance.survival("r0", "d", 9)]
    for length in lengths_of(
        make_policy("allocation", "priced"), asked, view_of(learn, Drafter("d"))
    ):
        assert survival[length + 1] <= price <= survival[length]


def test_a_tenant_of_more_weight_pays_less() -> None:
    view = view_of(learned([], verify=rows_of(1e-4)))
    view = view._replace(tenants={"a": Tenant("a", 1.0), "b": Tenant("b", 4.0)})
    light, heavy = granted(of_tenants({"a": 1, "b": 1}), view, fairness=0)
    assert light.min_survival == pytest.approx(4 * heavy.min_survival)


@pytest.mark.parametrize(("row", "pays"), [(1e-5, True), (5e-2, False)])
def test_they_do_not_draft_because_a_step_takes_long_anyway(row: float, pays: bool) -> None:
    """The time of its prefill is lost either way."""
    view = view_of(learned([], verify=rows_of(row), draft=1e-3))
    for num_rows in (3, 500):
        grants = granted(candidates(20, 20, 20), view._replace(room=Room(1000, num_rows, 3)))
        assert [g.num_draft_tokens > 0 for g in grants] == [pays] * 3


def test_lengths_are_within_limits_and_budget() -> None:
    learn = learned([], verify=FLAT, draft=1e-4)
    for budget, total in ((1000, 18), (9, 9), (0, 0)):
        grants = granted(candidates(2, 20, 20), view_of(learn, budget=budget))
        lengths = [g.num_draft_tokens for g in grants]
        assert sum(lengths) == total
        assert lengths[0] <= 2
        assert max(lengths) <= 8


def drafting(
    row: float, accepted: Sequence[int], num_proposed: int, num_steps: int
) -> list[list[bool]]:
    """Who drafts, step by step, where drafts come to so much each."""
    num = len(accepted)
    learn = learned([], verify={r: 0.004 + row * r for r in (1, 3, 6, 9, 12, 30)}, draft=1e-4)
    asked, policy = candidates(*[20] * num), make_policy("allocation", "priced")
    view = view_of(learn)._replace(room=Room(1000, num, num))
    steps = []
    for _ in range(num_steps):
        grants = policy.allocate(asked, view)
        steps.append([g.num_draft_tokens > 0 for g in grants])
        for candidate, drafts, kept in zip(asked, steps[-1], accepted, strict=True):
            name, decided = candidate.state.request.id, min(kept + 1, num_proposed)
            if drafts and num_proposed:
                found = Verdict(name, 0, 0, (), "d", num_proposed, kept, decided, float(kept))
                learn.acceptance.on_verdict(found)
            elif drafts:
                learn.acceptance.observe_empty(name, "d")
    return steps


def test_requests_whose_drafts_do_not_pay_are_left_out() -> None:
    """A position costs a third of a token: three accepted of three pay, none does not."""
    later = drafting(4e-4, [3, 0, 3, 0], 3, 1000)[500:]
    shares = [sum(step[i] for step in later) / len(later) for i in range(4)]
    assert min(shares[0], shares[2]) > 0.9
    assert max(shares[1], shares[3]) < 0.1


@pytest.mark.parametrize("num_proposed", [0, 3])
def test_what_does_not_pay_is_tried_now_and_then(num_proposed: int) -> None:
    """Whether drafts are not accepted, or end before their first token: that takes a fortieth of a
    step."""
    later = drafting(4e-4, [0] * 3, num_proposed, 4000)[1000:]
    tried = sum(any(step) for step in later)
    assert 0 < tried < 0.1 * len(later)
