"""Spin's Algorithms 1 and 2, with their evident intent."""

import itertools
from collections import Counter
from typing import Any

import pytest
from tests.core.selection.rounds import Machine, Rounds, mixed_rates

from penstock.core.policies.registry import make_policy
from penstock.core.state import DrafterStatus

NAMES = tuple(f"d{i}" for i in range(8))


def make_world(options: dict[str, Any] | None = None, **changes: Any) -> Rounds:
    machine = changes.pop("machine", None) or Machine(dict.fromkeys(NAMES, 1e-3), beside=True)
    settings: dict[str, Any] = {"live": 1, "max_tokens": 3000} | changes
    rates = settings.pop("rates", mixed_rates(tuple(machine.drafters)))
    return Rounds(make_policy("selection", "lbss", options), machine, rates, **settings)


def stages(world: Rounds, rounds: int) -> list[tuple[int, bool, int]]:
    """(epoch, exploring, rounds) of the first request, stage by stage (chunks are stages)."""
    found: list[tuple[int, bool, int]] = []
    for _ in range(rounds):
        world.round()
        course = world.policy._courses["0"]  # type: ignore[attr-defined]
        stage = (course.epoch, course.exploring, course.until)
        if not found or found[-1] != stage:
            found.append(stage)
    starts = [1] + [until for _, _, until in found]
    return [(e, x, until - start) for (e, x, until), start in zip(found, starts, strict=False)]


def test_epochs_explore_for_alpha_rounds_and_exploit_for_two_to_the_k() -> None:
    found = stages(make_world({"alpha": 6, "beta": 2}), 80)
    expected = [
        stage
        for epoch in (1, 2, 3, 4)
        for stage in [(epoch, True, 2)] * 3 + [(epoch, False, 2**epoch)]
    ]
    assert found[: len(expected)] == expected


def test_a_chunk_keeps_its_drafter_and_every_chunk_draws_again() -> None:
    draws: Counter[bool] = Counter()
    used: set[str | None] = set()
    for seed in range(30):
        world = make_world({"alpha": 12, "beta": 3, "seed": seed}).run(13)
        own = [chosen["0"] for chosen in world.played[1:13]]
        chunks = [set(own[i : i + 3]) for i in range(0, 12, 3)]
        assert all(len(chunk) == 1 for chunk in chunks)
        draws.update(a == b for a, b in itertools.pairwise(chunks))
        used |= set(own)
    assert used == set(NAMES)
    # One in eight by chance.
    assert 0 < draws[True] < 0.3 * draws.total()


def test_overflow_is_placed_on_the_next_drafter_with_room() -> None:
    """Nobody is dropped while there is a place anywhere, as Algorithm 2 does as printed."""
    machine = Machine(dict.fromkeys(NAMES, 1e-3), beside=True, capacity=1)
    world = make_world(machine=machine, live=8).run(4)
    for chosen in world.played:
        assert sorted(map(str, chosen.values())) == sorted(NAMES)


def test_a_drafter_lost_in_mid_chunk_is_replaced_for_the_rest_of_it() -> None:
    world = make_world({"alpha": 8, "beta": 4}).run(2)
    course = world.policy._courses["0"]  # type: ignore[attr-defined]
    until, lost = course.until, world.played[-1]["0"]
    assert lost is not None
    world.drafters[lost].status = DrafterStatus.DOWN
    world.run(1)
    assert world.played[-1]["0"] not in (lost, None)
    assert course.until == until


def test_instances_of_one_model_are_not_changed_for_each_other() -> None:
    names = ("a", "b", "c", "d")
    machine = Machine(
        dict.fromkeys(names, 1e-3), beside=True, models=dict.fromkeys(names, "m"), capacity=8
    )
    world = make_world(machine=machine, rates=lambda _: {"m": 0.7}, live=8).run(100)
    assert world.num_switches == 0
    assert set(world.policy._observed.by_model) == {"m"}  # type: ignore[attr-defined]


def wishes(world: Rounds) -> dict[str, str]:
    """What the first request would have read now, and by the round in which it is used."""
    decoding = [s for s in world.states if s.round]
    return {w.state.request.id: w.drafter for w in world.policy.replays(decoding, world.work())}


def test_the_next_chunks_drafter_reads_before_the_switch() -> None:
    world = make_world({"alpha": 60, "beta": 3})
    foreseen = 0
    for _ in range(55):
        world.round()
        course = world.policy._courses["0"]  # type: ignore[attr-defined]
        wished = wishes(world).get("0")
        if course.until == world.states[0].round and wished is not None:
            world.round()
            assert world.played[-1]["0"] == wished
            foreseen += 1
    assert foreseen > 8


def test_inside_a_step_and_without_fast_switch_nothing_is_read_early() -> None:
    inline = make_world(machine=Machine(dict.fromkeys(NAMES, 1e-3)), live=4).run(100)
    assert inline.num_replayed == 0
    assert make_world({"fast_switch": False}, live=4).run(100).num_replayed == 0
    assert make_world(live=4).run(100).num_replayed > 0


def test_fast_switching_saves_reading() -> None:
    machine = Machine(dict.fromkeys(NAMES, 1e-3), beside=True, per_catch_up_token=0.1e-3)
    found = [
        make_world({"fast_switch": fast}, machine=machine, live=4, prompt_len=400).run(200)
        for fast in (False, True)
    ]
    assert found[1].goodput > 1.05 * found[0].goodput


def test_a_switch_is_charged_with_the_text_that_it_has_to_read() -> None:
    """Every request keeps to its drafter where reading is as dear as it is said to be."""
    machine = Machine(dict.fromkeys(NAMES[:3], 1e-3), per_catch_up_token=1e-3)
    free, charged = (
        make_world({"corrections": added}, machine=machine, live=4, prompt_len=500).run(300)
        for added in (["modelled_time"], ["modelled_time", "switching"])
    )
    assert charged.num_switches < free.num_switches


def exploited(corrections: list[str], **changes: Any) -> Rounds:
    """A world in which drafting with any drafter takes longer than it saves."""
    machine = Machine(dict.fromkeys(NAMES[:3], 50e-3), beside=True)
    return make_world({"corrections": corrections}, machine=machine, live=4, **changes).run(200)


def test_to_the_letter_every_request_drafts_whatever_it_costs() -> None:
    for corrections, may_skip in (([], False), (["modelled_time", "no_drafter"], True)):
        played = exploited(corrections).played[2:]
        assert any(None in chosen.values() for chosen in played) == may_skip


def test_requests_beyond_all_places_draft_nothing() -> None:
    machine = Machine(dict.fromkeys(NAMES[:3], 1e-3), beside=True, capacity=1)
    world = make_world({"corrections": []}, machine=machine, live=5).run(100)
    for chosen in world.played:
        assert sorted(map(str, chosen.values())) == ["None", "None", *NAMES[:3]]


def test_rewards_to_the_letter_are_tokens_per_second_of_the_round_as_it_was() -> None:
    """The slowest drafter's round is everybody's."""
    machine = Machine({"d0": 1e-3, "d1": 20e-3}, verify=10e-3, per_row=0.0, beside=True)
    rates = dict.fromkeys(machine.drafters, 0.0)
    world = make_world({"corrections": []}, machine=machine, live=8, rates=lambda _: rates)
    seen = world.run(60).policy._observed.by_model  # type: ignore[attr-defined]
    # By its own steps d0 would make a token in 14 ms, d1 in 90.
    assert seen["d0"].value == pytest.approx(1 / 0.090, rel=0.1)
    assert seen["d1"].value == pytest.approx(1 / 0.090, rel=0.1)


def test_without_fading_estimates_are_means_of_everything() -> None:
    counts = {}
    for fading in ([], ["fading"]):
        world = make_world({"corrections": ["modelled_time", *fading]}, live=4).run(300)
        seen = world.policy._observed.by_model.values()  # type: ignore[attr-defined]
        counts[bool(fading)] = sum(mean.count for mean in seen)
    assert counts[False] == 4 * 299 > counts[True]
