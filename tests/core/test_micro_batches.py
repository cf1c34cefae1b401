"""Groups of requests: drafted for and verified in turn, of equal size, and never twice."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.fakes import ToyDrafter, ToyExecutor
from tests.core.world import Rotating, World, make_request, make_scheduler
from tests.products import first_fast

from penstock.core.learn import Estimators
from penstock.core.policies.base import Pipeline, View
from penstock.core.policies.pipeline.auto import Auto
from penstock.core.policies.pipeline.micro_batches import MicroBatches
from penstock.core.policies.pipeline.parts.division import Division
from penstock.core.policies.registry import make_pipeline
from penstock.core.state import Drafter, DraftRound, DraftStage, RequestState
from penstock.core.types import (
    TARGET,
    DrafterDown,
    DrafterUp,
    DraftOrder,
    DraftSource,
    Request,
    StepResult,
    Verdict,
)
from penstock.fluid.step_profile import DrafterProfile, StepProfile

A_DEVICE_EACH = StepProfile(
    "a device each",
    1000,
    (0, 100),
    (0.0, 0.1),
    drafters=tuple(DrafterProfile(n, (0, 100), (0.0, 0.1)) for n in ("a", "b", "d")),
)


def make_world(pipeline: str | Pipeline, *names: str, selection: object = None) -> World:
    """Drafters with lanes of their own, right in half of their guesses."""
    drafters = [ToyDrafter(name, 0.5) for name in names or ("d",)]
    scheduler = make_scheduler(
        drafters=drafters,
        own_lanes=[d.name for d in drafters],
        pipeline=pipeline,
        num_blocks=256,
        selection=selection,
        learn=Estimators(A_DEVICE_EACH),
    )
    return World(scheduler, ToyExecutor(4, {d.name: d for d in drafters}))


def prefill(world: World, requests: Sequence[Request]) -> None:
    world.arrive(*requests)
    world.read_prompts()
    while any(not s.num_output_tokens for s in world.scheduler.table.running.values()):
        world.executor.run(TARGET)
        world.turn()
    world.turn()


def in_flight(world: World, lane: str) -> set[str]:
    """Requests of a lane's plan."""
    plans = [job.plan for job in world.executor.lanes.get(lane, ())]
    return {i.request_id for p in plans for i in (*p.items, *p.drafts)}


def test_the_target_verifies_one_group_while_the_other_is_drafted_for() -> None:
    world = make_world("2")
    prefill(world, [make_request(n, seed=i, max_tokens=60) for i, n in enumerate("rstu")])
    first = in_flight(world, "d")
    assert len(first) == 2
    assert not in_flight(world, TARGET), "nothing to verify yet"
    for _ in range(6):
        world.step("d")
        verified, drafted = in_flight(world, TARGET), in_flight(world, "d")
        assert verified == first
        assert drafted == set("rstu") - first, "at the same time"
        assert all(
            i.source is DraftSource.HELD for i in world.plans[-1].items or world.plans[-2].items
        )
        world.step()
        assert not in_flight(world, TARGET), "its group is being drafted for still"
        first = drafted


def test_a_group_waits_for_its_slowest_lane_and_another_goes_first() -> None:
    world = make_world("2", "a", "b")
    names = {"r": "a", "s": "a", "t": "b", "u": "b"}
    prefill(
        world,
        [
            make_request(n, seed=i, drafter=d, max_tokens=60)
            for i, (n, d) in enumerate(names.items())
        ],
    )
    slow = in_flight(world, "a") | in_flight(world, "b")
    assert len(slow) == 2, "one request of each drafter"
    world.step("b")
    assert not in_flight(world, TARGET), "half of the group is there"
    assert len(in_flight(world, "b") - slow) == 1, "its lane goes on with the next group"
    world.step("b")
    assert not in_flight(world, TARGET)
    world.step("a")
    assert in_flight(world, TARGET) == slow
    world.executor.run("a")
    world.step()
    assert in_flight(world, TARGET) == set(names) - slow


@pytest.mark.parametrize("pipeline", first_fast(["2", "auto", "async", "5%", "3", "5"], 4))
@pytest.mark.parametrize("rotating", [False, True])
def test_everybody_finishes_whatever_is_late(pipeline: str, rotating: bool) -> None:
    world = make_world(pipeline, "a", "b", selection=Rotating() if rotating else None)
    requests = [make_request(f"r{i}", seed=i, max_tokens=30 + i) for i in range(11)]
    world.chaos = world.chaos.__class__(patience=0.5)
    world.run(requests)
    world.check_outputs()
    world.check_empty()
    assert world.executor.num_accepted > 0


def test_those_that_do_not_draft_join_any_group() -> None:
    world = make_world("2")
    drafting = [make_request(n, seed=i, max_tokens=60) for i, n in enumerate("rs")]
    prefill(world, [*drafting, make_request("alone", seed=9, drafter="none", max_tokens=60)])
    steps = []
    for _ in range(6):
        world.step("d")
        steps.append(in_flight(world, TARGET))
        world.step()
    assert all("alone" in step for step in steps)
    assert Counter(n for step in steps for n in step - {"alone"}) == {"r": 3, "s": 3}


def test_a_failed_lane_holds_no_request_up() -> None:
    world = make_world("2")
    prefill(world, [make_request(n, seed=i) for i, n in enumerate("rstu")])
    lost = in_flight(world, "d")
    world.executor.report(world.executor.end("d", frozenset(lost)))
    world.turn()
    world.turn()
    assert in_flight(world, TARGET) == lost, "without drafts"
    assert all(i.source is DraftSource.NONE for i in world.plans[-1].items)
    world.run()
    world.check_outputs()
    world.check_empty()


def test_auto_begins_and_ends_micro_batches_as_the_batch_changes() -> None:
    pipeline = Auto(Auto.Options())
    world = make_world(pipeline)
    assert not world.scheduler._ctx.beside, "nothing is known yet"
    world.run([make_request("r", max_tokens=12)])
    assert pipeline.num == 0, "one request cannot be in two places"
    assert any(i.source is DraftSource.INLINE for p in world.plans for i in p.items)

    world.arrive(*(make_request(n, seed=i, max_tokens=40) for i, n in enumerate("stuv")))
    for _ in range(12):
        world.move()
        world.turn()
    assert pipeline.num > 1
    assert world.scheduler._ctx.beside == {"d"}
    world.run()
    world.check_outputs()
    world.check_empty()
    world.run([make_request("w", max_tokens=12)])
    assert pipeline.num == 0
    assert not world.scheduler._ctx.beside


def test_auto_leaves_it_where_step_times_promise_nothing() -> None:
    pipeline = Auto(Auto.Options())
    world = make_world(pipeline)
    flat = StepProfile("flat", 1000, (0,), (0.1,), drafters=(DrafterProfile("d", (1,), (0.01,)),))
    world.scheduler.learn.times.profile = flat
    world.run([make_request(f"r{i}", seed=i, max_tokens=20) for i in range(6)])
    assert pipeline.num == 0
    assert not any(o.max_draft_tokens for p in world.plans if p.lane != TARGET for o in p.drafts)


@pytest.mark.parametrize(("start", "expected"), [(0.0, 8), (0.1, 1)])
def test_a_percentage_splits_while_the_targets_throughput_lasts(start, expected) -> None:
    """Eight requests make eight groups where only rows take time, and rounds where a step does."""
    pipeline = make_pipeline("5%")
    world = make_world(pipeline)
    world.scheduler.learn.times.profile = replace(A_DEVICE_EACH, token_seconds=(start, start + 0.1))
    assert world.scheduler._ctx.beside == {"d"}, "from the first step on"
    view = View({}, world.scheduler.learn)
    assert pipeline.hold_until([], [state(0, "d", is_free=False)], view) == math.inf, "rounds"
    world.arrive(*(make_request(f"r{i}", seed=i, max_tokens=40) for i in range(8)))
    nums = []
    for _ in range(40):
        world.move()
        world.turn()
        nums.append(pipeline.num)
    assert nums[-1] == expected
    world.run()
    world.check_outputs()
    world.check_empty()


def test_auto_gives_up_a_pipeline_that_is_slower_than_promised() -> None:
    """The profile promises twice the rate; steps beside drafters take four times as long."""
    pipeline = Auto(Auto.Options())
    estimators = Estimators(A_DEVICE_EACH)
    drafters = {"d": Drafter("d", has_lane=True)}
    running = [state(i, "d", is_free=True) for i in range(8)]
    for made in running:
        made.append([1])
        made.kv_of(TARGET).num_computed_tokens = made.num_known_tokens - 1
    now, nums = 0.0, []
    for number in range(600):
        slow = 4.0 if pipeline.num else 1.0
        num = max(1, pipeline.num)
        took = slow * 0.001 * 8 * 5 / num
        verdicts = tuple(
            Verdict(s.request.id, 0, 0, (1,), "d", num_proposed=4) for s in running[: 8 // num]
        )
        result = StepResult(number, TARGET, now, now + took, verdicts=verdicts)
        now += took
        pipeline.stepped(running, View(drafters, estimators), result)
        nums.append(pipeline.num)
    assert max(nums) > 1, "it was tried"
    assert nums[-100:] == [0] * 100


def test_auto_leaves_drafters_without_lanes_as_they_are() -> None:
    """Not a plan differs from `off`; the same drafter with a lane gets micro-batches."""
    plans = {}
    for name, own_lanes in (("off", []), ("auto", []), ("auto with lanes", ["d"])):
        drafter = ToyDrafter("d", 0.5)
        scheduler = make_scheduler(
            drafters=[drafter],
            own_lanes=own_lanes,
            pipeline=name.split()[0],
            num_blocks=256,
            learn=Estimators(A_DEVICE_EACH),
        )
        world = World(scheduler, ToyExecutor(4, {"d": drafter}))
        world.run([make_request(f"r{i}", seed=i, max_tokens=40) for i in range(8)])
        plans[name] = world.plans
    assert plans["auto"] == plans["off"]
    assert plans["auto with lanes"] != plans["off"]


def test_auto_takes_draft_servers_as_they_come_and_go() -> None:
    """They work beside the target at once, and the target does not wait for all of them."""
    pipeline = Auto(Auto.Options())
    drafters = [ToyDrafter("d", 0.5)]
    scheduler = make_scheduler(
        drafters=drafters, own_lanes=["d"], pipeline=pipeline, learn=Estimators(A_DEVICE_EACH)
    )
    assert scheduler.lanes == ("d", TARGET)
    scheduler.apply(DrafterUp("edge", 8), 0.0)
    assert scheduler.lanes == ("d", "edge", TARGET)
    assert scheduler._ctx.beside == {"edge"}
    assert pipeline.hold_until([], [], View({}, scheduler.learn)) is None
    scheduler.apply(DrafterDown("edge"), 0.0)
    assert not scheduler._ctx.beside


def state(number: int, drafter: str, *, is_free: bool) -> RequestState:
    made = RequestState(Request(f"r{number}", 4, 9), number)
    made.drafter = drafter
    if not is_free:
        order = DraftOrder(f"r{number}", 0, 0, drafter, 0, 1, 2)
        made.draft = DraftRound(DraftStage.ORDERED, order)
    return made


@given(
    num=st.integers(2, 6),
    members=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.booleans()), max_size=40
    ),
)
def test_divisions_are_balanced_as_far_as_requests_may_move(num, members) -> None:
    division = Division(num)
    states = [state(i, d, is_free=free) for i, (d, _, free) in enumerate(members)]
    before = {}
    for made, (_, group, _) in zip(states, members, strict=True):
        division.put(made, group % num)
        before[made.request.id] = group % num
    division.balance()
    after = division.groups()
    assert after.keys() == before.keys()
    for made in states:
        if made.draft.order is not None:
            assert after[made.request.id] == before[made.request.id]
    for drafter in "abc":
        own = [s for s in states if s.drafter == drafter]
        sizes = Counter(after[s.request.id] for s in own)
        for made in own:
            if made.draft.order is None:
                group = after[made.request.id]
                assert sizes[group] - min(sizes[g] for g in range(num)) <= 1
    if all(s.draft.order is None for s in states):
        totals = Counter(after.values())
        assert max(totals[g] for g in range(num)) - min(totals[g] for g in range(num)) <= 1


def test_a_newcomer_goes_where_there_are_fewest() -> None:
    pipeline = MicroBatches(MicroBatches.Options(3))
    states = [state(i, "a", is_free=True) for i in range(5)]
    for count in range(1, 6):
        pipeline.divide(states[:count])
        sizes = Counter(pipeline.group_of(s) for s in states[:count])
        assert max(sizes.values()) - min(sizes[g] for g in range(3)) <= 1
    assert pipeline.group_of(state(9, "a", is_free=True)) is None


def test_one_micro_batch_is_no_pipeline() -> None:
    for num in ("0", "1", "65"):
        with pytest.raises(ValueError, match="a number of micro-batches from 2 to 64"):
            make_pipeline(num)
