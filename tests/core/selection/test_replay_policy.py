from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tests.core.selection.rounds import Machine, Rounds

from penstock.core.policies.registry import make_policy
from penstock.core.policies.selection import ReplayProposal
from penstock.core.policies.selection.replay import Replay
from penstock.core.state import Drafter, Outcome, RequestState
from penstock.core.types import Replayed, Request, SamplingParams, Verdict
from penstock.core.view import View

NAMES = ("d0", "d1", "d2", "d3")
RATES = {"d0": 0.3, "d1": 0.4, "d2": 0.9, "d3": 0.5}


def make_world(options: dict[str, Any] | None = None, **changes: Any) -> Rounds:
    machine = changes.pop("machine", None) or Machine(dict.fromkeys(NAMES, 1e-3))
    settings: dict[str, Any] = {"live": 1, "max_tokens": 400} | changes
    policy = make_policy("selection", "replay", options)
    return Rounds(policy, machine, lambda _: RATES, **settings)


def test_all_others_are_evaluated_before_each_decision_and_nobody_between() -> None:
    world = make_world({"optimism": 5.0}, prompt_len=5)
    asked: list[int] = []
    evaluated: set[str] = set()
    honest = world.policy.replays

    def noting(states: Sequence[RequestState], view: View) -> list[ReplayProposal]:
        wished = honest(states, view)
        if wished:
            asked.append(states[0].round)
            evaluated.update(w.drafter for w in wished)
            assert states[0].drafter not in {w.drafter for w in wished}
            assert all(w.evaluate for w in wished)
        return wished

    world.policy.replays = noting  # type: ignore[method-assign]
    world.run(40)
    # Decisions at rounds 0, 3, 7, 15 and 31: the last round before each, while there is doubt.
    assert asked[:3] == [2, 6, 14]
    assert set(asked) <= {2, 6, 14, 30}
    assert evaluated == set(NAMES)


def test_the_best_is_found_without_drafting_with_the_others() -> None:
    world = make_world(prompt_len=5, max_tokens=1000).run(80)
    used = [chosen["0"] for chosen in world.played]
    assert used[20:].count("d2") == 60
    assert world.num_switches <= 3


def test_lanes_read_in_every_round() -> None:
    """Their idle time costs nothing."""
    lanes = Machine(dict.fromkeys(NAMES, 1e-3), beside=True)
    world = make_world({"optimism": 10.0}, machine=lanes, prompt_len=5).run(4)
    read = [world.states[0].kv[n].num_computed_tokens for n in NAMES if n in world.states[0].kv]
    assert len(read) == 4
    assert min(read) >= world.states[0].num_known_tokens - 6


def test_a_text_too_long_to_pay_for_its_reading_is_not_read() -> None:
    dear = Machine(dict.fromkeys(NAMES, 1e-3), per_catch_up_token=1e-3)
    world = make_world(machine=dear, prompt_len=2000, max_tokens=60).run(60)
    assert world.num_replayed == 0
    assert make_world(machine=dear, prompt_len=10, max_tokens=60).run(60).num_replayed > 0


def test_what_cannot_be_better_is_not_asked() -> None:
    """A drafter whose every token is accepted leaves nothing to find out."""
    policy = Replay(Replay.Options())
    machine = Machine({"a": 1e-3, "b": 1e-3})
    state = RequestState(Request("r", 10, 400), 0)
    view = View(machine.make_drafters(), machine.estimators(), loads={"a": 1})
    policy.select([state], view)
    state.drafter, state.round = "a", 50
    policy.observe([Outcome(state, _verdict(state, "a", 400, 400))], view)
    assert not policy.replays([state], view)
    policy._until["r"] += 1
    policy.observe([Outcome(state, _verdict(state, "a", 10, 400))], view)
    assert [w.drafter for w in policy.replays([state], view)] == ["b"]


def _verdict(state: RequestState, drafter: str, accepted: int, decided: int) -> Verdict:
    tokens = (0,) * (accepted + 1)
    return Verdict(
        state.request.id, 0, state.round, tokens, drafter, decided, accepted, decided, accepted
    )


def test_own_drafts_and_replays_are_the_same_kind_of_evidence() -> None:
    machine = Machine({"a": 1e-3, "b": 1e-3})
    drafters = machine.make_drafters()
    view = View(drafters, machine.estimators())
    rates = []
    for kind in ("draft", "replay"):
        policy = Replay(Replay.Options())
        state = RequestState(Request("r", 10, 400), 0)
        policy.select([state], view)
        if kind == "draft":
            policy.observe([Outcome(state, _verdict(state, "b", 15, 20))], view)
        else:
            policy.replayed(state, Replayed("r", 0, "b", 20, 15))
        rates.append(policy._rate("r", "b", 0.0))
    assert rates[0] == rates[1] > 0.7


def test_an_answer_of_nothing_says_nothing() -> None:
    policy = Replay(Replay.Options())
    state = RequestState(Request("r", 10, 400), 0)
    policy.replayed(state, Replayed("r", 0, "b"))
    assert not policy._population


def test_evidence_fades_by_verified_token_whoever_drafted_it() -> None:
    """All the same whether a text comes in one step or in many, and whether anybody drafts."""
    rates = []
    for steps in ((), (40,), (20, 20)):
        policy = Replay(Replay.Options(memory=50.0))
        state = RequestState(Request("r", 10, 400), 0)
        machine = Machine({"b": 1e-3})
        view = View(machine.make_drafters(), machine.estimators())
        policy.select([state], view)
        policy.replayed(state, Replayed("r", 0, "b", 100, 0))
        for num_tokens in steps:
            policy.observe([Outcome(state, Verdict("r", 0, 0, (0,) * num_tokens))], view)
        rates.append(policy._rate("r", "b", 0.0))
    assert rates[1] == pytest.approx(rates[2])
    assert rates[1] > rates[0]


def test_ratio_requests_learn_from_their_own_drafts_alone() -> None:
    sampling = SamplingParams(verification="ratio")
    world = make_world(prompt_len=5, sampling=sampling).run(60)
    shares = world.policy._records["0"].shares  # type: ignore[attr-defined]
    drafted = {chosen["0"] for chosen in world.played if "0" in chosen}
    assert set(shares) <= drafted


def test_one_instance_of_a_model_reads_and_all_have_the_evidence() -> None:
    policy = Replay(Replay.Options())
    drafters = {
        "a": Drafter("a"),
        "m1": Drafter("m1", model="m"),
        "m2": Drafter("m2", model="m"),
        "far": Drafter("far", remote=True),
    }
    estimators = Machine({"a": 1e-3, "m1": 1e-3, "m2": 1e-3}).estimators()
    view = View(drafters, estimators, loads={"a": 1})
    state = RequestState(Request("r", 10, 400), 0)
    policy.select([state], view)
    state.drafter, state.round = "a", 5
    assert [w.drafter for w in policy.replays([state], view)] == ["m1"]
    state.kv_of("m2").num_computed_tokens = 8
    policy._until["r"] += 1
    assert [w.drafter for w in policy.replays([state], view)] == ["m2"]
    policy.observe([], view)
    policy.replayed(state, Replayed("r", 0, "m2", 50, 50))
    assert policy._rate("r", "m", 0.0) > 0.9
