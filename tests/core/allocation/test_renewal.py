"""The renewal policy, and the budget that a profile gives."""

from __future__ import annotations

from itertools import pairwise

import pytest

from penstock.core.learn import Estimators
from penstock.core.policies.allocation.parts.gradient import draft_budget
from penstock.core.policies.registry import PolicyError, make_policy
from penstock.core.state import Outcome, RequestState
from penstock.core.types import Request, Tenant, Verdict
from penstock.core.view import DraftCandidate, Room, View
from penstock.fluid.step_profile import StepProfile

NAMES = ("near", "far", "poor")
RATES = {"near": 0.9, "far": 0.9, "poor": 0.1}


def work(step_s: float, budget: int = 100, position_s: float = 0.0) -> View:
    """Steps of so many seconds; `near` answers in 1 ms, `far` and `poor` in 60, 2 ms a token."""
    profile = StepProfile("p", 1000, (3, 1003), (step_s, step_s + 1000 * position_s))
    estimators = Estimators(profile)
    for name in NAMES:
        for num in (1, 4, 2, 8) * 20:
            trip = 0.001 if name == "near" else 0.06
            estimators.links.observe(name, num, trip + 0.002 * num)
    tenants = {name: Tenant(name) for name in NAMES}
    return View({}, estimators, tenants=tenants, room=Room(budget, 3, 3))


def candidates(limit: int = 16) -> list[DraftCandidate]:
    states = [
        RequestState(Request(name, 4, 1000, tenant=name), order) for order, name in enumerate(NAMES)
    ]
    return [DraftCandidate(state, state.request.id, limit) for state in states]


def taught(step: View, **options: object) -> list[int]:
    """What is granted once all acceptances are known."""
    policy = make_policy("allocation", "renewal", dict(options))
    offered = candidates()
    for number in range(200):
        policy.allocate(offered, step)
        verdicts = []
        for state, drafter, *_ in offered:
            state.round = number
            wrong = number % 10 == 0 if RATES[drafter] > 0.5 else number % 10 != 0
            verdict = Verdict(
                state.request.id, 0, number, (0,), drafter, 1, int(not wrong), 1, float(not wrong)
            )
            verdicts.append(Outcome(state, verdict))
        policy.observe(verdicts, 0.1 * number)
    return [grant.num_draft_tokens for grant in policy.allocate(offered, step)]


def test_only_drafts_that_are_worth_their_time_are_made() -> None:
    near, far, poor = taught(work(step_s=0.03))
    assert near > 0
    assert far > 0, "nine in ten are right: worth the round trip with enough of them"
    assert poor == 0


def test_when_steps_take_long_all_that_fits_before_the_next_is_drafted() -> None:
    assert taught(work(step_s=1.0), k_max=8) == [8, 8, 8]


def test_the_budget_is_kept_and_goes_to_the_best() -> None:
    lengths = taught(work(step_s=1.0), total=9, k_max=8)
    assert sum(lengths) <= 9
    assert min(lengths[:2]) > lengths[2]


def test_what_was_put_aside_is_tried_again() -> None:
    policy = make_policy("allocation", "renewal", {"probe_every": 16})
    step, offered = work(step_s=0.01), candidates()[2:]
    probes = []
    for number in range(200):
        (grant,) = policy.allocate(offered, step)
        offered[0].state.round = number
        if grant.num_draft_tokens:
            probes.append(number)
        proposed = grant.num_draft_tokens
        verdict = Verdict(
            "poor", 0, number, (0,), "poor" if proposed else None, proposed, 0, min(1, proposed)
        )
        policy.observe([Outcome(offered[0].state, verdict)], 0.1 * number)
    gaps = [b - a for a, b in pairwise(probes)]
    assert len(probes) >= 12
    assert max(gaps) <= 18
    assert len(probes) < 60, "and otherwise left alone"


def test_the_budget_of_a_profile_stretches_a_step_by_half() -> None:
    step = work(step_s=0.01, position_s=1e-4)
    assert draft_budget(None, step) == pytest.approx(50, abs=1)
    assert draft_budget(7, step) == 7
    assert draft_budget(None, work(step_s=0.01, budget=20, position_s=1e-4)) == 20
    assert draft_budget(None, work(step_s=0.01)) == 100, "positions that cost nothing"


def test_no_drafts_at_all() -> None:
    assert taught(work(step_s=0.01), k_max=0) == [0, 0, 0]


def test_options_that_cannot_be() -> None:
    with pytest.raises(PolicyError, match="fairness must be a finite number from 0 to 16"):
        make_policy("allocation", "renewal", {"fairness": -1.0})
