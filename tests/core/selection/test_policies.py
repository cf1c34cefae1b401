"""What every policy owes its requests, whatever it learns."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from tests.core.selection.rounds import Machine, Rates, Rounds, mixed_rates
from tests.products import covering

from lab.rivals import policy_named
from penstock.core.learn import Estimators
from penstock.core.policies.base import SelectionPolicy, View
from penstock.core.policies.registry import PolicyError
from penstock.core.policies.selection.parts.goodput import RoundTimes
from penstock.core.state import DrafterStatus, RequestState
from penstock.core.types import Request

NAMES = ("d0", "d1", "d2", "d3", "d4")
SECONDS = (0.5e-3, 1e-3, 1.6e-3, 2.4e-3, 3e-3)
LEARNING = ("epsilon_greedy", "lbss")
POLICIES = ("single", "greedy", *LEARNING)


def make_machine(**changes: Any) -> Machine:
    return Machine(dict(zip(NAMES, SECONDS, strict=True)), **changes)


def play(
    policy: str, rounds: int = 150, options: dict[str, Any] | None = None, **changes: Any
) -> Rounds:
    machine = changes.pop("machine", None) or make_machine(beside=True)
    prompt_len = changes.pop("prompt_len", lambda n: 20 + 37 * n % 200)
    world = Rounds(
        policy_named(policy, **(options or {})).make("selection"),
        machine,
        changes.pop("rates", mixed_rates(NAMES)),
        prompt_len=prompt_len,
        **changes,
    )
    return world.run(rounds)


@pytest.mark.parametrize(
    ("policy", "beside", "capacity"), covering(POLICIES, [False, True], [1, 2, 4], strength=1)
)
def test_capacities_hold_and_no_place_is_left_unused(policy, beside, capacity) -> None:
    """The world itself checks that no drafter has more requests than it takes."""
    world = play(policy, machine=make_machine(beside=beside, capacity=capacity), live=8)
    assert world.finished
    if policy in ("greedy", "lbss") and capacity == 1:
        drafting = [sum(n is not None for n in chosen.values()) for chosen in world.played]
        assert max(drafting) == 5


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "first"), covering([*LEARNING, "auto"], [0, 4], strength=1))
def test_a_bad_beginning_is_not_held_against_a_drafter_for_ever(policy, first) -> None:
    def rates(number: int) -> dict[str, float]:
        return {"d0": 0.05 if number <= first else 0.9}

    machine = Machine({"d0": 1e-3}, per_row=0.3e-3)
    options = {"lbss": {"alpha": 2}}.get(policy, {})
    world = play(policy, 2500, options, machine=machine, rates=rates, live=1, seed=first)
    late = [name for chosen in world.played[-500:] for name in chosen.values()]
    assert late.count("d0") > 0.7 * len(late)


@pytest.mark.parametrize("policy", POLICIES)
def test_drafters_that_come_and_go_are_left_and_used_again(policy: str) -> None:
    world = play(policy, 0, live=6, machine=make_machine(beside=True, capacity=4))
    rng = random.Random(3)
    for _ in range(200):
        for drafter in world.drafters.values():
            if rng.random() < 0.15:
                drafter.status = rng.choice([*DrafterStatus])
        world.round()
    for drafter in world.drafters.values():
        drafter.status = DrafterStatus.UP
    world.run(60)
    used = {n for chosen in world.played[-20:] for n in chosen.values()}
    assert used - {None}
    assert len(world.finished) > 10


@pytest.mark.parametrize("policy", POLICIES)
def test_a_drafter_that_was_never_heard_of_may_come(policy: str) -> None:
    world = play(policy, 20)
    late = world.drafters.pop("d0")
    world.run(40)
    world.drafters["d0"] = late
    world.run(40)
    assert len(world.finished) > 5


@pytest.mark.parametrize("policy", POLICIES)
def test_without_a_usable_drafter_nothing_is_drafted(policy: str) -> None:
    chosen = policy_named(policy).make("selection")
    states = [RequestState(Request(n, 5, 5), i) for i, n in enumerate("rs")]
    assert chosen.select(states, View({}, Estimators())) == {"r": None, "s": None}
    drafters = make_machine().make_drafters()
    for drafter in drafters.values():
        drafter.status = DrafterStatus.DOWN
    assert set(chosen.select(states, View(drafters, Estimators())).values()) == {None}
    assert chosen.select([], View(drafters, Estimators())) == {}


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_measured_yet_is_no_hindrance(policy: str) -> None:
    world = play(policy, 0)
    world.estimators = Estimators()
    world.run(40)
    assert any(n is not None for chosen in world.played for n in chosen.values())


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_makes_the_same_choices(policy: str) -> None:
    first, again = play(policy), play(policy)
    assert first.played == again.played
    assert first.now == again.now


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["epsilon_greedy", "lbss"])
def test_another_seed_makes_others(policy: str) -> None:
    assert play(policy, options={"seed": 1}).played != play(policy).played


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_kept_of_requests_that_have_ended(policy: str) -> None:
    world = play(policy, 120, live=4)
    live = {s.request.id for s in world.states}
    parts = [world.policy, *(p for p in [getattr(world.policy, "_observed", None)] if p)]
    names = ("_by_request", "_courses")
    kept = [set(getattr(p, n)) for p in parts for n in names if hasattr(p, n)]
    assert all(keys <= live for keys in kept)
    assert bool(kept) == (policy in LEARNING)


@pytest.mark.parametrize("policy", LEARNING)
def test_where_drafting_never_pays_it_ends(policy: str) -> None:
    """Drafters that are hardly ever right, and take as long as the target."""
    machine = Machine(dict.fromkeys(NAMES, 8e-3), beside=True)
    options = {"explore": 0.0} if policy == "epsilon_greedy" else {}
    world = play(
        policy,
        300,
        options,
        machine=machine,
        rates=lambda _: dict.fromkeys(NAMES, 0.02),
        live=2,
        max_tokens=400,
    )
    late = [n for chosen in world.played[150:] for n in chosen.values()]
    if policy == "lbss":
        # It goes on exploring, but exploits nothing.
        courses = world.policy._courses.values()
        assert late.count(None) > len(late) / 2 or all(c.exploring for c in courses)
    else:
        assert late.count(None) > 0.8 * len(late)


def test_learning_beats_the_worst_and_comes_near_the_best() -> None:
    """One drafter is right for every request, the others are poor."""
    rates = dict.fromkeys(NAMES, 0.2) | {"d3": 0.9}
    found = {}
    for name in ("lbss", "single"):
        options = {"drafter": "d3"} if name == "single" else {}
        found[name] = play(name, 300, options, rates=lambda _: rates, max_tokens=300).goodput
    worst = play("single", 300, {"drafter": "d4"}, rates=lambda _: rates, max_tokens=300).goodput
    assert found["lbss"] > 1.3 * worst
    assert found["lbss"] > 0.75 * found["single"]


def test_requests_that_differ_get_different_drafters() -> None:
    """Even numbers are one specialist's, odd ones another's."""

    def rates(number: int) -> dict[str, float]:
        good = "d1" if number % 2 else "d2"
        return dict.fromkeys(NAMES, 0.15) | {good: 0.95}

    world = play("lbss", 250, rates=rates, max_tokens=400)
    right = total = 0
    for chosen in world.played[50:]:
        for request_id, name in chosen.items():
            total += 1
            right += name == ("d1" if int(request_id) % 2 else "d2")
    assert right > 0.45 * total


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("greedy", {"order": ("a", "a")}, "twice"),
        ("greedy", {"boundaries": (5, 5)}, "rise"),
        ("greedy", {"order": ("a", "b"), "boundaries": (5, 6)}, "one boundary fewer"),
        ("epsilon_greedy", {"explore": 1.5}, "a finite number from 0 to 1"),
        ("lbss", {"alpha": 5, "beta": 2}, "multiple of beta"),
        ("lbss", {"alpha": 0, "beta": 1}, "alpha must be a whole number from 1"),
        ("lbss", {"corrections": ["none"]}, "a list, each fading or modelled_time or"),
        ("auto", {"k_max": 0}, "k_max must be a whole number from 1 to 1024"),
    ],
)
def test_bad_options_are_refused_in_one_line(policy, options, message) -> None:
    with pytest.raises(PolicyError, match=message) as caught:
        policy_named(policy, **options).make("selection")
    assert "\n" not in str(caught.value)


class Clairvoyant(SelectionPolicy):
    """Knows every acceptance, and gives each request what is best for it alone."""

    name = "clairvoyant"

    def __init__(self, machine: Machine, rates: Rates) -> None:
        self._machine = machine
        self._rates = rates

    def select(self, states: Sequence[RequestState], view: View) -> dict[str, str | None]:
        times = RoundTimes(view, len(states))
        drafters = self._machine.make_drafters()

        def worth(state: RequestState, name: str) -> float:
            state.drafter = name
            rate = self._rates(int(state.request.id))[name]
            return max(
                sum(rate**i for i in range(n + 1)) / times.seconds(drafters[name], len(states), n)
                for n in range(1, 5)
            )

        return {s.request.id: max(NAMES, key=lambda n, s=s: worth(s, n)) for s in states}
