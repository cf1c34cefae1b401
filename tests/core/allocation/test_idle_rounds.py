"""Estimates hardly move from step to step, so draft lengths are not worked out in each."""

import pytest
from tests.core.test_allocation import candidates, work

from penstock.core.learn import Estimators
from penstock.core.policies.allocation.priced import Priced
from penstock.core.policies.base import Room
from penstock.core.types import Verdict

MOST_STEPS = 50


def dear() -> Estimators:
    """A further row of the target takes as long as a whole step."""
    estimators = Estimators()
    for rows in (1, 2, 4, 8, 16, 32):
        estimators.times.target.add_measurement(rows, 0.01 * rows)
    estimators.times.curve_of("d").add_measurement(2, 1e-4)
    return estimators


def cheap() -> Estimators:
    """A further row of the target takes nothing."""
    estimators = Estimators()
    for rows in (1, 32):
        estimators.times.target.add_measurement(rows, 0.01)
    estimators.times.curve_of("d").add_measurement(2, 1e-5)
    return estimators


def idle_policy() -> Priced:
    """One that has just found nothing worth drafting for two requests."""
    policy = Priced(Priced.Options())
    grants = policy.allocate(candidates(4, 4), work(dear()))
    assert [g.num_draft_tokens for g in grants] == [0, 0]
    return policy


def test_the_same_requests_are_looked_at_again_after_some_steps() -> None:
    policy, now = idle_policy(), work(cheap())
    steps = [policy.allocate(candidates(4, 4), now)[0].num_draft_tokens for _ in range(MOST_STEPS)]
    assert not any(steps[:2])
    assert any(steps[:16])


def test_another_request_is_looked_at_at_once() -> None:
    policy, now = idle_policy(), work(cheap())
    assert all(g.num_draft_tokens for g in policy.allocate(candidates(4, 4, 4), now))


def test_lengths_are_kept_for_some_steps_of_the_same_requests_and_rows() -> None:
    policy = Priced(Priced.Options())
    first = policy.allocate(candidates(4, 4), work(cheap()))
    assert all(g.num_draft_tokens for g in first)
    now = work(dear())
    kept = [policy.allocate(candidates(4, 2), now) for _ in range(MOST_STEPS)]
    assert [g.num_draft_tokens for g in kept[0]] == [4, 2], "within new limits"
    assert not any(g.num_draft_tokens for g in kept[-1])
    for changed in (now._replace(room=Room(1000, 9, 2)), now._replace(room=Room(3, 4, 4))):
        policy = Priced(Priced.Options())
        policy.allocate(candidates(4, 4), work(cheap()))
        found = policy.allocate(candidates(4, 4), changed)
        assert not any(g.num_draft_tokens for g in found), "another step, or too short a budget"


def test_estimates_age_by_every_step_whether_looked_at_or_not() -> None:
    """What was put aside is tried again after as many steps as if all had been looked at."""
    estimators = dear()
    estimators.acceptance.on_verdict(Verdict("r0", 0, 0, (0,), "d", 20, 0, 20, 0.0))
    once, often = Estimators().acceptance, estimators.acceptance
    once.on_verdict(Verdict("r0", 0, 0, (0,), "d", 20, 0, 20, 0.0))
    policy, num_steps = Priced(Priced.Options()), 161
    for _ in range(num_steps):
        policy.allocate(candidates(4), work(estimators))
    once.fade("r0", "d", num_steps)
    once.fade_drafter("d", num_steps)
    assert often.mean("r0", "d") == pytest.approx(once.mean("r0", "d"), rel=0.02)
