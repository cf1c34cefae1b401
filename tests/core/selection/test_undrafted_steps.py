"""Replays may take a share of the time, in which steps without any draft count for little."""

import itertools

from tests.core.selection.rounds import Machine

from penstock.core.policies.base import View
from penstock.core.policies.selection.auto import Auto
from penstock.core.state import Outcome, RequestState
from penstock.core.types import Request, Verdict

MACHINE = Machine({"a": 1e-3, "b": 1e-3}, per_catch_up_token=0.2e-3)
NUM_STEPS, STEP_S = 500, 0.01


def state_of(number: int) -> RequestState:
    """A request that has made enough tokens for a replay to say something, and soon ends."""
    state = RequestState(Request(str(number), 100, 40), number)
    state.append((0,) * 30)
    return state


def num_replays_after_steps(drafter: str | None) -> int:
    """How many requests are read after steps in which the drafter was used, or none."""
    policy, drafters = Auto(Auto.Options()), MACHINE.make_drafters()
    estimators, known = MACHINE.estimators(), state_of(0)
    draft = (drafter, 1, 1, 1, 1.0) if drafter else ()
    for step in range(NUM_STEPS):
        view = View(drafters, estimators, step * STEP_S)
        policy.on_step([Outcome(known, Verdict("0", 0, step, (0,), *draft))], view)
    for num_read in itertools.count():
        state = state_of(num_read + 1)
        policy.select([state], View(drafters, estimators, NUM_STEPS * STEP_S))
        if len(policy.replays([], view)) <= num_read:
            return num_read
    raise AssertionError


def test_little_is_read_where_nothing_is_drafted() -> None:
    drafting, idle = num_replays_after_steps("a"), num_replays_after_steps(None)
    assert 0 < idle < drafting / 4
