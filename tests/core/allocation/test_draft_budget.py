"""The budget that a profile of step times gives."""

import pytest

from penstock.core.learn import Estimators
from penstock.core.policies.allocation.parts.gradient import draft_budget
from penstock.core.policies.base import Room, View
from penstock.fluid.step_profile import StepProfile


def step(position_s: float = 0.0, budget: int = 100) -> View:
    """Steps of 10 ms and so much for each position."""
    profile = StepProfile("p", 1000, (3, 1003), (0.01, 0.01 + 1000 * position_s))
    return View({}, Estimators(profile), room=Room(budget, 3, 3))


def test_the_budget_of_a_profile_stretches_a_step_by_half() -> None:
    assert draft_budget(None, step(1e-4)) == pytest.approx(50, abs=1)
    assert draft_budget(7, step(1e-4)) == 7
    assert draft_budget(None, step(1e-4, budget=20)) == 20
    assert draft_budget(None, step()) == 100, "positions that cost nothing"
