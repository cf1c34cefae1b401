from typing import Any

import pytest
from tests.core.fakes import ToyDrafter, ToyExecutor
from tests.core.world import ADMISSIONS, World, make_request, make_scheduler

from penstock.core.kv import BlockPool
from penstock.core.learn import Estimators
from penstock.core.learn.times import step_work
from penstock.core.policies.registry import PolicyError, make_policy
from penstock.core.scheduler import Scheduler
from penstock.core.types import TARGET, Arrive, Verdict
from penstock.fluid.step_profile import PAPER_LINEAR

DRAFTER = ToyDrafter("d", accuracy=1.0)


def make_world(*drafters: ToyDrafter, budget: int, seqs: int, **options: Any) -> World:
    admission = {
        "max_num_batched_tokens": budget,
        "max_num_seqs": seqs,
        "watermark": options.pop("watermark", 0.0),
        "reserve_full_prompt": options.pop("reserve_full_prompt", True),
    }
    scheduler = make_scheduler(drafters=drafters, admission=admission, **options)
    executor = ToyExecutor(4, {d.name: d for d in drafters})
    return World(scheduler, executor, admission=admission)


def scheduled(world: World) -> list[tuple[str, int]]:
    """(request, known tokens) of the last target plan."""
    plan = next(p for p in reversed(world.plans) if p.lane == TARGET)
    return [(i.request_id, i.num_scheduled_tokens) for i in plan.items]


def test_running_requests_first_then_waiting_ones_in_order() -> None:
    world = make_world(budget=16, seqs=8)
    world.arrive(make_request("a", 6), make_request("b", 6, seed=1), make_request("c", 9, seed=2))
    assert scheduled(world) == [("a", 6), ("b", 6), ("c", 4)]
    world.step()
    world.turn(*world.arrivals([make_request("d", 30, seed=3)]))
    assert scheduled(world) == [("a", 1), ("b", 1), ("c", 5)]
    world.step()
    assert scheduled(world) == [("a", 1), ("b", 1), ("c", 1), ("d", 13)]


@pytest.mark.parametrize("policy", ["vllm_v1", "sarathi", "fluid_guided"])
def test_no_policy_admits_more_than_the_executor_has_room_for(policy: str) -> None:
    pool = BlockPool(1000, 4)
    scheduler = Scheduler(
        pool,
        [],
        admission=make_policy("admission", policy),
        selection=make_policy("selection", "single"),
        allocation=make_policy("allocation", "fixed"),
        max_model_len=256,
        learn=Estimators(PAPER_LINEAR),
        max_num_seqs=2,
    )
    for i in range(5):
        scheduler.apply(Arrive(make_request(str(i), seed=i)), 0.0)
    assert len(scheduler.schedule(1.0).items) == 2
    assert len(scheduler.table.running) == 2


def test_the_newest_is_preempted_and_comes_back_first() -> None:
    world = make_world(budget=64, seqs=8, num_blocks=6)
    world.arrive(*(make_request(n, 6, 12, seed=i) for i, n in enumerate("abc")))
    world.arrive(make_request("d", 6, 2, seed=9))
    while not world.scheduler.table.counters.preemptions:
        world.step()
    assert [s.request.id for s in world.scheduler.table.running.values()] == ["a", "b"]
    assert [s.request.id for s in world.scheduler.table.waiting] == ["c", "d"]
    world.run()
    world.check_outputs()
    world.check_empty()


def test_admission_leaves_the_watermark_free_but_never_waits_alone() -> None:
    world = make_world(budget=64, seqs=8, num_blocks=10, watermark=0.25)
    world.arrive(make_request("a", 24), make_request("b", 12, seed=1))
    assert [n for n, _ in scheduled(world)] == ["a"], "6 + 3 of 10 blocks would leave 1 of 2"
    world.run()
    big = make_world(budget=64, seqs=8, num_blocks=10, watermark=0.9)
    big.arrive(make_request("a", 36, 4))
    assert scheduled(big) == [("a", 36)]


@pytest.mark.parametrize(("reserve", "begun"), [(True, ["a"]), (False, ["a", "b"])])
def test_a_prompt_begins_only_where_all_of_it_fits(reserve: bool, begun: list[str]) -> None:
    """Or it would be preempted in the middle, by itself, and begin again and again."""
    world = make_world(budget=16, seqs=8, num_blocks=10, reserve_full_prompt=reserve)
    world.arrive(make_request("a", 10, 20))
    world.step()
    world.turn(*world.arrivals([make_request("b", 30, 4, seed=1)]))
    world.step()
    assert list(world.scheduler.table.running) == begun
    world.run()
    assert (world.scheduler.table.counters.preemptions == 0) == reserve
    world.check_outputs()


def test_a_long_prompt_leaves_room_for_drafts() -> None:
    world = make_world(DRAFTER, budget=20, seqs=4)
    world.arrive(make_request("a", 6, 30))
    world.step()
    world.turn(*world.arrivals([make_request("b", 60, seed=1)]))
    world.step()
    assert scheduled(world) == [("a", 1), ("b", 15)]
    assert [i.num_draft_tokens for i in world.plans[-1].items] == [4, 0]


def test_drafts_leave_room_for_prompts() -> None:
    """Sixteen requests that could draft 64 tokens must not keep others waiting for ever."""
    world = make_world(DRAFTER, budget=24, seqs=20, num_blocks=200)
    world.arrive(*(make_request(f"r{i}", 2, 60, seed=i) for i in range(12)))
    world.step()
    world.turn(*world.arrivals([make_request("late", 30, seed=99)]))
    world.step()
    assert scheduled(world) == [*((f"r{i}", 1) for i in range(12)), ("late", 6)]


def test_drafts_of_a_step_are_as_long_as_they_turned_out() -> None:
    world = make_world(DRAFTER, budget=64, seqs=4)
    world.arrive(make_request("a", 6, 30))
    world.step()
    (item,) = world.plans[-1].items
    granted = step_work(world.plans[-1])
    assert granted.num_draft_tokens == item.num_draft_tokens > 1
    short = step_work(world.plans[-1], [Verdict("a", item.epoch, item.round, num_proposed=1)])
    assert (short.num_draft_tokens, short.num_decodes) == (1, granted.num_decodes)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be a whole number from 1 to 1000000000, not 0"),
        ({"max_num_batched_tokens": 4, "max_num_seqs": 8}, "not 4 against 8"),
        ({"watermark": 1.0}, "watermark must be a finite number from 0 to below 1, not 1.0"),
        ({"watermark": float("nan")}, "watermark must be a finite number from 0 to .*, not nan"),
    ],
)
def test_bad_options(options: dict[str, Any], said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        make_policy("admission", "vllm_v1", options)


@pytest.mark.parametrize(("name", "options"), ADMISSIONS.values(), ids=ADMISSIONS)
def test_a_request_that_is_alone_is_served_unless_the_policy_may_idle(name, options) -> None:
    policy = make_policy("admission", name, options)
    scheduler = Scheduler(
        BlockPool(64, 4),
        [],
        admission=policy,
        selection=make_policy("selection", "single"),
        allocation=make_policy("allocation", "fixed"),
        max_model_len=256,
    )
    limits = {"max_num_batched_tokens": 10**6, "max_num_seqs": 10**6}
    world = World(scheduler, ToyExecutor(4), admission=limits)
    world.arrive(make_request("alone"))
    for _ in range(100):
        world.move()
        world.turn()
    assert bool(world.ends) == (not policy.may_idle)
    assert policy.may_idle == (name in ("wait", "nested_wait") and not options)
