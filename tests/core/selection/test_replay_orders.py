"""Replays of inline drafters: they read what is verified, are exact, and never spoil anything."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from tests.core.fakes import Corruption, ToyDrafter, ToyExecutor
from tests.core.world import Chaos, World, make_request, make_scheduler
from tests.products import first_fast

from penstock.core.phases import draft, observe
from penstock.core.policies.base import ReplayProposal, SelectionPolicy, View
from penstock.core.state import RequestState
from penstock.core.types import TARGET, Cancel, DrafterDown, DraftOrder, Replayed

GOOD = ToyDrafter("good", accuracy=0.85)
POOR = ToyDrafter("poor", accuracy=0.4)
LOOKUP = ToyDrafter("lookup", accuracy=0.6, has_kv=False)
DRAFTERS = (GOOD, POOR, LOOKUP)
CALM = Chaos()
ROUGH = Chaos(cancel=0.03, fail=0.02, drafter_down=0.03, patience=0.3)


class Curious(SelectionPolicy):
    """Another drafter, or none, in every round, and replays of some of the others."""

    name = "curious"

    def __init__(self, seed: int = 0, share: float = 1.0, drafter: str | None = None) -> None:
        self._rng = random.Random(seed)
        self._share = share
        self._drafter = drafter
        self.answers: list[tuple[RequestState, Replayed]] = []

    def select(self, states: Sequence[RequestState], view: View) -> dict[str, str | None]:
        if self._drafter is not None:
            return {s.request.id: self._drafter for s in states}
        names = [*view.drafters, None]
        return {s.request.id: names[(s.order + s.round) % len(names)] for s in states}

    def replays(self, states: Sequence[RequestState], view: View) -> list[ReplayProposal]:
        proposals = [
            ReplayProposal(s, name, self._rng.random() < 0.7)
            for s in states
            for name in view.drafters
            if self._rng.random() < self._share
        ]
        self._rng.shuffle(proposals)
        return proposals

    def replayed(self, state: RequestState, replayed: Replayed) -> None:
        self.answers.append((state, replayed))


def make_world(
    policy: Curious, seed: int = 0, chaos: Chaos = CALM, depth: int = 1, **options: Any
) -> World:
    scheduler = make_scheduler(drafters=DRAFTERS, selection=policy, **options)
    executor = ToyExecutor(4, {d.name: d for d in DRAFTERS}, depth)
    return World(scheduler, executor, chaos=chaos, seed=seed)


def replay_orders(world: World) -> list[DraftOrder]:
    return [o for p in world.plans for o in p.drafts if o.max_draft_tokens == 0]


@pytest.mark.parametrize("own_lanes", [(), ("good", "lookup")], ids=["inline", "lanes"])
@pytest.mark.parametrize("seed", first_fast(range(10), 2))
def test_output_and_kv_stay_right_with_any_replays(seed, own_lanes) -> None:
    rng = random.Random(seed)
    blocks = {"num_blocks": 40, "drafter_blocks": rng.choice([12, 40])}
    policy = Curious(seed, share=rng.choice([0.3, 1.0]))
    world = make_world(policy, seed, ROUGH, depth=1 + 2 * (seed % 2), own_lanes=own_lanes, **blocks)
    world.run(
        [
            make_request(f"r{i}", rng.randrange(1, 30), rng.randrange(1, 30), rng.randrange(3))
            for i in range(25)
        ]
    )
    world.check_outputs()
    world.check_empty()
    assert replay_orders(world)
    assert not world.scheduler.table.replays


def test_a_replay_brings_kv_up_to_the_verified_text_and_counts_guesses() -> None:
    policy = Curious(drafter="poor")
    policy.replays = lambda states, work: [ReplayProposal(s, "good", True) for s in states]  # type: ignore[method-assign]
    world = make_world(policy)
    world.run([make_request("r", 6, 30)])
    orders = replay_orders(world)
    assert [o.drafter for o in orders] == ["good"] * len(orders)
    assert orders[0].start == 0
    for before, after in itertools.pairwise(orders):
        assert after.start == before.start + before.num_catch_up_tokens
    counted = sum(a.num_tokens for _, a in policy.answers)
    assert counted > 10
    assert 0 < sum(a.num_matched for _, a in policy.answers) <= counted


def test_a_drafter_does_not_replay_a_request_that_it_drafts_for() -> None:
    policy = Curious(drafter="good")
    world = make_world(policy)
    world.run([make_request(f"r{i}", 6, 20, i) for i in range(3)])
    for plan in world.plans:
        drafting = {(i.request_id, i.drafter) for i in plan.items if i.draft is not None}
        replaying = [(o.request_id, o.drafter) for o in plan.drafts]
        assert drafting.isdisjoint(replaying)
        assert len(set(replaying)) == len(replaying)


def test_only_requests_that_leave_the_choice_open_are_replayed() -> None:
    world = make_world(Curious())
    world.run([make_request("named", 6, 12, drafter="good"), make_request("r", 6, 12, 1)])
    assert {o.request_id for o in replay_orders(world)} == {"r"}


def test_drafters_that_are_down_and_lanes_replay_nothing_in_the_targets_step() -> None:
    policy = Curious(drafter="lookup")
    scheduler = make_scheduler(drafters=DRAFTERS, own_lanes=["poor"], selection=policy)
    world = World(scheduler, ToyExecutor(4, {d.name: d for d in DRAFTERS}))
    world.turn(DrafterDown("good"))
    world.run([make_request("r", 6, 12)])
    world.check_outputs()
    replayed = {o.drafter for p in world.plans if p.lane == TARGET for o in p.drafts}
    assert replayed <= {"lookup"}


def test_a_replay_takes_no_memory_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(Curious(), drafter_blocks=4)
    evicted: list[int] = []
    monkeypatch.setattr(draft, "_make_room", lambda *_: bool(evicted.append(1)))
    monkeypatch.setattr(draft, "order", lambda *_: None)
    world.run([make_request(f"r{i}", 8, 20, i) for i in range(4)])
    assert replay_orders(world)
    assert not evicted


def test_an_answer_for_kv_that_was_lost_meanwhile_is_not_believed() -> None:
    """The plan ends after the drafter went down and came up again."""
    policy = Curious(drafter="poor")
    world = make_world(policy)
    until_replayed(world)
    assert any(o.drafter == "good" for o in replay_orders(world))
    state = world.scheduler.table.running["r"]
    world.turn(DrafterDown("good"))
    kv = world.scheduler.table.memory.start_from_cache(state, "good")
    world.executor.run(TARGET)
    world.turn()
    assert kv.num_computed_tokens == 0


def test_negative_control_believing_more_than_was_read_is_caught(monkeypatch) -> None:
    def too_far(state: RequestState, order: DraftOrder, num: int) -> None:
        kv = state.kv.get(order.drafter)
        if kv is not None:
            kv.num_computed_tokens = order.start + order.num_catch_up_tokens + 1

    monkeypatch.setattr(observe, "_drafted", too_far)
    with pytest.raises((Corruption, AssertionError)):
        make_world(Curious()).run([make_request(f"r{i}", 8, 20, i) for i in range(4)])


def test_blocks_of_a_cancelled_request_are_kept_until_its_replay_has_ended() -> None:
    world = make_world(Curious(drafter="poor"))
    until_replayed(world)
    world.turn(Cancel("r"))
    assert world.scheduler.table.memory.pools["good"].num_used_blocks > 0
    world.step()
    world.check_empty()


def until_replayed(world: World) -> None:
    """One request, up to the plan that first replays it, which is then in flight."""
    world.arrive(make_request("r", 6, 30))
    while not replay_orders(world):
        world.step()
