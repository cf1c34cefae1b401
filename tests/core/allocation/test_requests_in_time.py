"""Draft lengths that keep requests within their targets."""

from typing import Any

import pytest
from tests.core.test_allocation import candidates, learned, lengths_of, work

from penstock.core.policies.base import DraftCandidate, View
from penstock.core.policies.registry import make_policy
from penstock.core.types import LatencyTarget, Request, Tenant

DEAR = {1: 0.01, 12: 0.01, 64: 0.04}
"""Of rows that hardly any draft token is worth."""


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
    return view._replace(now=1.0, **changes)


def drafts(asked: list[DraftCandidate], view: View, **options: Any) -> list[int]:
    return lengths_of(make_policy("allocation", "priced", options), asked, view)


def test_who_needs_more_tokens_drafts_longer() -> None:
    """The price of a position is too high for the others."""
    view = at_one_second([0.7] * 12, DEAR)
    plain = drafts(offered(*[None] * 12), view)
    told = drafts(offered(0.008, *[None] * 11), view)
    assert told[0] > plain[0]
    assert sum(told[1:]) <= sum(plain[1:])


@pytest.mark.parametrize(("tpot", "in_time"), [(1.0, 4.0), (1e-4, 4.0), (0.008, 0.0)])
def test_a_target_that_drafts_change_nothing_about_is_none(tpot: float, in_time: float) -> None:
    """It is met anyway, or never, or of no value."""
    view = at_one_second([0.7] * 12, DEAR)
    plain = drafts(offered(*[None] * 12), view)
    assert drafts(offered(tpot, *[None] * 11), view, in_time=in_time) == plain


def test_a_target_of_a_heavy_tenant_comes_first() -> None:
    tenants = {"a": Tenant("a", 8.0), "b": Tenant("b")}
    view = at_one_second([0.7] * 2, {1: 0.01, 8: 0.011, 64: 0.04}, tenants=tenants)
    view = view._replace(room=view.room._replace(budget=3))
    own = drafts(offered(0.008, 0.008, tenants="ab"), view, fairness=0)
    assert own[0] > own[1]
