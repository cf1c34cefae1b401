from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from tests.core.selection.rounds import Machine, Rounds, mixed_rates

from penstock.core.policies.base import View
from penstock.core.policies.registry import make_policy
from penstock.core.policies.selection.parts.savings import Savings
from penstock.core.state import RequestState
from penstock.core.types import LOOK_UP, Replayed, Request, SamplingParams, Verdict

SECONDS = {"small": 0.5e-3, "large": 2e-3}


def play(
    rates: Mapping[str, float],
    rounds: int = 250,
    options: dict[str, Any] | None = None,
    **changes: Any,
) -> Rounds:
    machine = changes.pop("machine", None) or Machine(SECONDS)
    policy = make_policy("selection", "auto", options)
    return Rounds(policy, machine, lambda _: rates, **changes).run(rounds)


def used(world: Rounds, last: int = 100) -> Counter[str | None]:
    return Counter(name for chosen in world.played[-last:] for name in chosen.values())


def test_it_finds_the_drafter_that_is_worth_its_time() -> None:
    assert used(play({"small": 0.85, "large": 0.2})).most_common(1)[0][0] == "small"
    assert used(play({"small": 0.1, "large": 0.9})).most_common(1)[0][0] == "large"


def test_it_drafts_nothing_where_no_drafter_pays() -> None:
    dear = Machine({"small": 20e-3, "large": 40e-3})
    world = play({"small": 0.6, "large": 0.7}, machine=dear)
    chosen = used(world)
    assert chosen[None] > 0.95 * chosen.total()
    cheap = Machine({"small": 0.1e-3, "large": 0.2e-3})
    assert not used(play({"small": 0.6, "large": 0.7}, machine=cheap))[None]


class Repeating(Rounds):
    """Texts of which look-up makes so much: in such rounds nobody else drafts."""

    def __init__(
        self,
        looked_up: float,
        rates: Mapping[str, float],
        seconds: Mapping[str, float],
        live: int = 8,
    ):
        policy = make_policy("selection", "auto")
        super().__init__(policy, Machine(seconds), lambda _: rates, live=live)
        self._looked_up = looked_up

    def _verdict(self, state: RequestState) -> Verdict:
        verdict = super()._verdict(state)
        if self._rng.random() >= self._looked_up:
            return verdict
        right = verdict._replace(token_ids=(0,) * 9, num_proposed=8, num_accepted=8)
        return right._replace(drafter=LOOK_UP, num_looked_up=8, num_decided=0, evidence=0.0)


def test_reading_must_pay_by_what_look_up_leaves() -> None:
    """A drafter that reads for long is not worth it where look-up makes nearly all."""
    rates, seconds = {"small": 0.3, "large": 0.85}, {"small": 0.5e-3, "large": 1.5e-3}
    for looked_up, is_used in ((0.0, True), (0.9, False)):
        world = Repeating(looked_up, rates, seconds)
        world.machine = replace(world.machine, per_catch_up_token=3e-3)
        assert (used(world.run(300))["large"] > 50) == is_used


def test_what_is_learned_within_a_request_moves_it() -> None:
    """Every request has another best drafter, and nothing tells which beforehand."""
    names = ("d0", "d1", "d2")
    machine = Machine(dict.fromkeys(names, 1e-3), beside=True)
    rates = mixed_rates(names, spread=1.5)
    policy = make_policy("selection", "auto")
    world = Rounds(policy, machine, rates, max_tokens=300, live=4).run(400)
    right = wrong = 0
    for number, name in [(int(i), n) for c in world.played[-200:] for i, n in c.items()]:
        best = max(rates(number), key=rates(number).__getitem__)
        right, wrong = right + (name == best), wrong + (name != best)
    assert right > 0.6 * (right + wrong)
    assert world.num_switches / len(world.finished) < 4


def test_drafters_inside_a_step_serve_together_only_if_that_saves_time() -> None:
    """Each of four tenants has a specialist, and all requests wait for every drafter in use."""
    names = ("d0", "d1", "d2", "d3")

    def rates(number: int) -> dict[str, float]:
        return {name: 0.9 if number % 4 == i else 0.5 for i, name in enumerate(names)}

    def num_used(seconds: float, *, beside: bool = False) -> float:
        machine = Machine(dict.fromkeys(names, seconds), beside=beside)
        policy = make_policy("selection", "auto")
        world = Rounds(policy, machine, rates, tenant=lambda n: names[n % 4]).run(400)
        return fmean(len(set(chosen.values()) - {None}) for chosen in world.played[-100:])

    assert num_used(2e-3) < 1.3
    assert num_used(0.02e-3) > 3
    assert num_used(2e-3, beside=True) > 3


def test_where_replays_say_nothing_it_tries_instead() -> None:
    """`ratio` requests: without draws it would stay with what looks best at first."""
    rates = {"small": 0.3, "large": 0.9}
    sampling = SamplingParams(verification="ratio")
    machine = Machine({"small": 0.5e-3, "large": 0.8e-3})
    tried = play(rates, machine=machine, sampling=sampling, rounds=400)
    assert used(tried).most_common(1)[0][0] == "large"


def test_of_a_prompt_read_beside_the_target_the_rest_counts() -> None:
    """Control: inside the step, with other requests, or behind the prompt all of it does."""

    def reading(
        *, beside: bool = True, others: int = 0, is_decoding: bool = False, prompt_len: int = 100
    ) -> float:
        machine = Machine({"d": 1e-3}, per_catch_up_token=1e-3, beside=beside)
        state = RequestState(Request("r", prompt_len, 50), 0)
        if is_decoding:
            state.append((0,))
        view = View(machine.make_drafters(), machine.estimators(), 0.0, {"d": others})
        savings = Savings([state], view.drafters, view, 1, 4, np.zeros(2))
        return float(savings.reading[0, 0])

    # The target reads 100 tokens in 10 + 100 * 0.05 ms.
    assert reading() == pytest.approx(0.1 - 0.015)
    assert reading(prompt_len=8) == 0.0
    assert reading(beside=False) == reading(others=1) == pytest.approx(0.1)
    assert reading(is_decoding=True) == pytest.approx(0.101)


def test_places_are_kept_to_and_lent_by_worth() -> None:
    machine = Machine(SECONDS, capacity=4, beside=True)
    world = play({"small": 0.3, "large": 0.9}, machine=machine, live=8)
    chosen = used(world)
    assert chosen["large"] == pytest.approx(0.5 * chosen.total(), rel=0.1)


def test_a_replay_is_worth_its_time_where_it_may_change_the_choice() -> None:
    """Requests differ, and prompts do not say how."""

    def num_read(per_catch_up_token: float) -> float:
        names = ("d0", "d1", "d2")
        machine = Machine(dict.fromkeys(names, 1e-3), per_catch_up_token=per_catch_up_token)
        policy = make_policy("selection", "auto")
        rates = mixed_rates(names, spread=1.5)
        world = Rounds(policy, machine, rates, max_tokens=200, live=1).run(1500)
        return world.num_replayed / len(world.finished)

    assert num_read(0.02e-3) > 0.5
    assert num_read(10e-3) < 0.05


def test_what_a_replay_says_is_acted_upon_in_the_next_round() -> None:
    """Not when the request is looked at again anyway, by when half of it may be over."""
    policy = make_policy("selection", "auto")
    world = Rounds(policy, Machine({"one": 0.5e-3, "two": 0.5e-3}), lambda _: {})
    state = RequestState(Request("r", 20, 400), 0)
    asked: set[str] = set()
    while not asked:
        state.drafter = policy.select([state], world.work())["r"]
        asked = {p.drafter for p in policy.replays([state], world.work())} - {state.drafter}
        state.round += 1
        state.num_output_tokens += 3
    (other,) = asked
    policy.replayed(state, Replayed("r", 0, other, num_tokens=100, num_matched=100))
    assert policy.select([state], world.work())["r"] == other


def test_longer_drafts_than_survival_is_estimated_for_are_no_error() -> None:
    assert used(play({"small": 0.85, "large": 0.2}, rounds=20, options={"k_max": 64}), 10)["small"]


def test_a_request_joins_a_drafter_for_which_it_waits_anyway() -> None:
    """It would not pay for the drafter alone, nor for its share of it."""
    machine = Machine({"small": 6e-3})

    def played(rare: float, common: float) -> Counter[bool]:
        """Whether requests have the drafter, of which one in eight accepts `rare`."""
        policy = make_policy("selection", "auto")
        world = Rounds(policy, machine, lambda n: {"small": (rare, common)[n % 8 > 0]}, live=8)
        seen = [(int(i), n) for chosen in world.run(300).played[-100:] for i, n in chosen.items()]
        return Counter(name is not None for number, name in seen if number % 8 == 0)

    joined, alone = played(0.45, 0.9), played(0.45, 0.45)
    assert joined[True] > 0.9 * joined.total()
    assert alone[True] < 0.1 * alone.total()


def test_where_look_up_makes_some_tokens_a_request_waits_for_the_others_all_the_same() -> None:
    """In nearly every round of many requests somebody drafts."""
    world = Repeating(0.4, {"small": 0.6}, {"small": 4e-3}, live=32)
    chosen = used(world.run(200))
    assert chosen["small"] > 0.95 * chosen.total()
