from __future__ import annotations

import itertools
from typing import Any

from tests.core.selection.rounds import Machine, Rounds

from penstock.core.policies.registry import make_policy
from penstock.core.policies.selection.ucb import Ucb
from penstock.core.state import RequestState
from penstock.core.types import Request
from penstock.core.view import View

NAMES = ("d0", "d1", "d2", "d3")


def make_world(rates: dict[str, float], options: dict[str, Any] | None = None) -> Rounds:
    machine = Machine(dict.fromkeys(NAMES, 1e-3), beside=True)
    policy = make_policy("selection", "ucb", options)
    return Rounds(policy, machine, lambda _: rates, live=1, max_tokens=4000)


def test_every_drafter_is_tried_and_the_best_is_found() -> None:
    world = make_world({"d0": 0.3, "d1": 0.4, "d2": 0.9, "d3": 0.5}).run(400)
    used = [chosen["0"] for chosen in world.played]
    assert set(used) >= set(NAMES)
    assert used[200:].count("d2") > 180


def test_stages_of_a_drafter_double_and_switches_are_few() -> None:
    """Not logarithmic in the rounds, as with UCB2: what is old is forgotten, and tried again."""
    policy = Ucb(Ucb.Options(growth=1.0))
    assert [policy._length(r) for r in range(5)] == [1, 2, 4, 8, 16]
    assert policy._length(50) == policy._length(20)
    world = make_world({"d0": 0.8, "d1": 0.8, "d2": 0.8, "d3": 0.8}).run(1200)
    own = [chosen["0"] for chosen in world.played if "0" in chosen]
    assert 2 < sum(a != b for a, b in itertools.pairwise(own)) < 0.03 * len(own)


def test_a_drafter_that_was_given_up_is_tried_again_within_one_request() -> None:
    """In one long text it is useless for 300 rounds, and then the best."""
    world = make_world({})
    world.max_tokens = 20_000
    world.rates = lambda _: (
        {"d0": 0.5, "d1": 0.0, "d2": 0.0, "d3": 0.9 if len(world.played) > 300 else 0.0}
    )
    world.run(2000)
    late = [chosen["0"] for chosen in world.played[1500:]]
    assert late.count("d3") > 0.9 * len(late)


def test_more_optimism_explores_more() -> None:
    rates = {"d0": 0.7, "d1": 0.6, "d2": 0.6, "d3": 0.6}
    shy, bold = (make_world(rates, {"optimism": o}).run(300) for o in (0.0, 2.0))
    assert bold.num_switches > shy.num_switches


def test_a_long_text_keeps_its_drafter_where_a_short_one_changes() -> None:
    machine = Machine({"a": 1e-3, "b": 1e-3})
    chosen = []
    for prompt_len in (10, 5000):
        policy = Ucb(Ucb.Options(optimism=0.0))
        state = RequestState(Request("r", prompt_len, 100), 0)
        state.round, state.drafter = 8, "a"
        for _ in range(20):
            policy._observed._note(state, "a", 200.0)
            policy._observed._note(state, "b", 230.0)
        view = View(machine.make_drafters(), machine.estimators(), loads={"a": 1})
        chosen.append(policy.select([state], view)["r"])
    assert chosen == ["b", "a"]


def test_what_others_have_seen_is_where_a_request_begins() -> None:
    machine = Machine({"a": 1e-3, "b": 1e-3})
    policy = Ucb(Ucb.Options())
    for i in range(20):
        other = RequestState(Request(f"o{i}", 10, 100), i)
        policy._observed._note(other, "a", 200.0)
        policy._observed._note(other, "b", 400.0)
    state = RequestState(Request("r", 10, 100), 0)
    view = View(machine.make_drafters(), machine.estimators())
    assert policy.select([state], view) == {"r": "b"}
