"""Lanes of their own: results out of order, late and repeated drafts, ends in mid-flight."""

from typing import Any

from tests.core.fakes import ToyDrafter, ToyExecutor, target_only
from tests.core.world import ADMISSION, World, kv_of, make_request, make_scheduler

from penstock.core.state import DraftStage, RequestState
from penstock.core.types import (
    TARGET,
    Cancel,
    DrafterUp,
    DraftReady,
    DraftSource,
    FinishReason,
    StepPlan,
)


def make_world(*names: str, accuracy: float = 1.0, depth: int = 1, **options: Any) -> World:
    """Drafters with lanes of their own, k = 4, blocks of 4 tokens."""
    drafters = [ToyDrafter(name, accuracy) for name in names or ("d",)]
    own_lanes = [d.name for d in drafters]
    scheduler = make_scheduler(drafters=drafters, own_lanes=own_lanes, **options)
    return World(scheduler, ToyExecutor(4, {d.name: d for d in drafters}, depth))


def state_of(world: World, request_id: str) -> RequestState:
    return world.scheduler.table.requests[request_id]


def num_deferred(world: World) -> int:
    return world.scheduler.table.memory.num_deferred_blocks


def prefilled(world: World, *request_ids: str, **fields: Any) -> None:
    """Let requests of 6 prompt tokens arrive and make their first token each; their drafts are
    then in flight."""
    seeds = range(len(request_ids))
    world.arrive(
        *(make_request(r, seed=s, **fields) for r, s in zip(request_ids, seeds, strict=True))
    )
    world.read_prompts()
    world.step()


def last_plan(world: World, lane: str) -> StepPlan:
    return next(p for p in reversed(world.plans) if p.lane == lane)


def ready(world: World, request_id: str, drafter: str = "d", num: int = 4) -> DraftReady:
    state = state_of(world, request_id)
    return DraftReady(request_id, state.epoch, state.round, drafter, num)


def test_a_round_on_two_lanes() -> None:
    world = make_world()
    world.arrive(make_request("r"))
    (item,) = last_plan(world, TARGET).items
    assert (item.start, item.num_scheduled_tokens, item.samples) == (0, 6, True)
    assert (item.source, len(item.new_blocks)) == (DraftSource.NONE, 2)

    world.turn()
    (order,) = last_plan(world, "d").drafts
    assert (order.start, order.num_catch_up_tokens, order.max_draft_tokens) == (0, 6, 0)
    assert len(order.new_blocks) == 2, "the drafter reads the prompt at the same time"

    world.step("d")
    world.step()
    (order,) = last_plan(world, "d").drafts
    assert (order.start, order.num_catch_up_tokens, order.max_draft_tokens) == (6, 1, 4)
    assert len(order.new_blocks) == 1, "7 known tokens and 3 of 4 draft tokens are written"
    assert not world.executor.lanes[TARGET], "the target waits for the draft"

    world.executor.run("d")
    world.turn()
    assert kv_of(world.scheduler, "r", "d").num_computed_tokens == 10
    world.turn()
    (item,) = last_plan(world, TARGET).items
    assert (item.source, item.drafter, item.num_draft_tokens) == (DraftSource.HELD, "d", 4)
    assert (item.start, item.num_scheduled_tokens) == (6, 1)

    world.executor.run(TARGET)
    world.turn()
    assert world.tokens["r"] == target_only(world.requests["r"])[:6]
    assert kv_of(world.scheduler, "r").num_computed_tokens == 11
    assert kv_of(world.scheduler, "r", "d").num_computed_tokens == 10, "the last was never fed"
    world.turn()
    (order,) = last_plan(world, "d").drafts
    assert (order.start, order.num_catch_up_tokens) == (10, 2)


def test_a_prompt_that_the_target_reads_in_parts_is_read_whole_beside_it() -> None:
    world = make_world(admission={"max_num_batched_tokens": 4, "max_num_seqs": 4})
    world.arrive(make_request("r", prompt_len=18))
    world.turn()
    reading = world.plans[:]
    for _ in range(4):
        world.step()
        assert not world.tokens["r"]
    assert [p for p in world.plans if p.lane == "d"] == reading[1:]
    world.step()
    assert len(world.tokens["r"]) == 1
    assert not world.executor.lanes[TARGET], "the draft waits for the rest of the reading"
    world.step("d")
    (order,) = last_plan(world, "d").drafts
    assert (order.start, order.num_catch_up_tokens) == (18, 1)
    world.run()
    world.check_outputs()
    world.check_empty()


def test_a_request_goes_on_without_drafts_until_its_prompt_is_read() -> None:
    """Where drafts are made inside the target's step, which would else wait for the reading."""
    world = make_world(pipeline="auto")
    world.arrive(make_request("r"))
    world.turn()
    (order,) = last_plan(world, "d").drafts
    assert (order.start, order.num_catch_up_tokens, order.max_draft_tokens) == (0, 6, 0)
    for num_tokens in (1, 2, 3):
        world.step()
        assert len(world.tokens["r"]) == num_tokens
    world.step("d")
    world.step()
    (item,) = last_plan(world, TARGET).items
    assert item.draft is not None
    assert (item.source, item.draft.start) == (DraftSource.INLINE, 6)
    world.run()
    world.check_outputs()
    world.check_empty()


def test_cancelled_while_a_drafter_reads_the_prompt() -> None:
    world = make_world()
    world.arrive(make_request("r"))
    world.turn()
    world.executor.begin("d")
    world.turn(Cancel("r"))
    world.step()
    assert num_deferred(world) == 2, "of the drafter"
    world.step("d")
    world.check_empty()


def test_a_draft_is_no_longer_than_ordered_and_never_negative() -> None:
    for claimed, held in ((99, 4), (-3, 0)):
        world = make_world()
        prefilled(world, "r")
        world.scheduler.apply(ready(world, "r", num=claimed), 0.0)
        state = state_of(world, "r")
        assert state.draft.num_draft_tokens == held


def test_cancelled_while_a_drafter_drafts() -> None:
    world = make_world()
    prefilled(world, "r")
    world.executor.begin("d")
    world.turn(Cancel("r"))
    assert world.scheduler.pool.num_used_blocks == 0, "the drafter never touches the target's KV"
    assert num_deferred(world) == 3
    world.step("d")
    world.check_empty()


def test_a_cancelled_id_may_come_again_at_once() -> None:
    world = make_world()
    world.arrive(make_request("r"))
    world.executor.begin(TARGET)
    world.turn(Cancel("r"))
    again = make_request("r", prompt_len=9, seed=3)
    world.arrive(again)
    world.executor.run(TARGET)
    world.turn()
    assert world.tokens["r"] == [], "the first life's answer is not the second's"
    world.run()
    assert world.tokens["r"] == target_only(again)
    world.check_empty()


def test_cancelled_before_the_executor_hears_of_it() -> None:
    world = make_world()
    request = make_request("r")
    events = [*world.arrivals([request]), Cancel("r"), *world.arrivals([request]), Cancel("r")]
    for event in events:
        world.loop.scheduler.apply(event, 0.0)
    plan = world.scheduler.schedule(0.0)
    assert (plan.new_requests, plan.forgotten, plan.items) == ((), (), ())


def test_preempted_with_a_held_draft() -> None:
    world = make_world(num_blocks=5, drafter_blocks=20)
    prefilled(world, "old", "new", max_tokens=10)
    state = state_of(world, "new")
    while True:
        world.executor.run("d")
        world.turn()
        held, epoch, late = state.draft, state.epoch, ready(world, "new")
        world.turn()
        if world.scheduler.table.counters.preemptions:
            break
        world.step()
    assert held.stage is DraftStage.HELD
    (item,) = last_plan(world, TARGET).items
    assert item.request_id == "old", "both cannot grow: the newest gives way"
    assert state.draft.stage is not DraftStage.HELD
    assert state.epoch > epoch
    assert not state.kv
    assert last_plan(world, TARGET).released == (("new", TARGET), ("new", "d"))

    world.turn(late)
    assert state.draft.stage is not DraftStage.HELD, "a draft of the old epoch"
    world.run()
    world.check_outputs()
    world.check_empty()


def test_preemption_frees_the_target_while_a_drafter_drafts() -> None:
    """A drafter's plan in flight holds back the drafter's blocks only."""
    world = make_world("a", "b", num_blocks=6, admission={**ADMISSION, "watermark": 0.0})
    prefilled(world, "old", drafter="a", max_tokens=12)
    world.arrive(make_request("mid", seed=5, drafter="b"), make_request("new", seed=6, drafter="b"))
    world.turn()
    world.executor.run("b")
    world.step()
    assert [o.request_id for o in last_plan(world, "b").drafts] == ["mid", "new"]
    world.executor.begin("b")
    for _ in range(2):
        world.step("a")
        world.step()
    assert world.scheduler.table.counters.preemptions == 1
    assert {s.request.id for s in world.scheduler.table.running.values()} == {"old", "mid"}
    assert num_deferred(world) == 3, "the drafter's blocks of the victim"
    assert state_of(world, "new").draft.order is None
    world.run()
    world.check_outputs()
    world.check_empty()


def test_a_drafter_goes_down_in_mid_draft_and_comes_back() -> None:
    world = make_world()
    prefilled(world, "r")
    state = state_of(world, "r")
    late = ready(world, "r")
    world.executor.begin("d")
    world.turn(world.take_down("d"))
    assert state.draft.order is None
    assert "d" not in state.kv
    (item,) = last_plan(world, TARGET).items
    assert (item.source, item.num_draft_tokens) == (DraftSource.NONE, 0), "it goes on alone"

    world.turn(DrafterUp("d"), late)
    world.executor.run("d")
    world.turn()
    assert state.draft.stage is not DraftStage.HELD
    assert num_deferred(world) == 0
    world.executor.run(TARGET)
    world.turn()
    assert len(world.tokens["r"]) == 2
    world.turn()
    (order,) = last_plan(world, "d").drafts
    assert (order.start, order.num_catch_up_tokens) == (0, 8), "its KV is lost"
    assert len(order.new_blocks) == 3
    world.run()
    world.check_outputs()
    world.check_empty()


def test_a_late_draft_answers_no_order_given_after_the_drafter_came_back() -> None:
    world = make_world()
    prefilled(world, "r")
    late = ready(world, "r")
    world.scheduler.apply(world.take_down("d"), 0.0)
    world.scheduler.apply(DrafterUp("d"), 0.0)
    plan = world.scheduler.schedule(0.0, "d")
    assert plan.is_empty, "not in the same round"
    world.scheduler.apply(late, 0.0)
    assert state_of(world, "r").draft.stage is not DraftStage.HELD


def test_a_failed_draft_leaves_the_request_to_go_on_alone() -> None:
    world = make_world()
    prefilled(world, "r")
    world.executor.report(world.executor.end("d", frozenset(["r"])))
    world.turn()
    world.turn()
    (item,) = last_plan(world, TARGET).items
    assert item.source is DraftSource.NONE
    world.step()
    (order,) = last_plan(world, "d").drafts
    assert order.start == 4, "only of its KV what had been read before"
    world.run()
    world.check_outputs()


def test_a_failed_item_ends_its_request_alone() -> None:
    world = make_world()
    world.arrive(make_request("r"), make_request("s", seed=5))
    world.executor.report(world.executor.end(TARGET, frozenset(["r"])))
    world.turn()
    assert world.ends["r"].finish_reason is FinishReason.ERROR
    assert world.ends["r"].error == "the target failed"
    assert len(world.tokens["s"]) == 1
    world.run()
    world.check_outputs()
    world.check_empty()


def test_an_item_without_an_answer_is_an_error() -> None:
    world = make_world()
    world.arrive(make_request("r"))
    result = world.executor.end(TARGET)
    world.executor.ended[0] = silent = result._replace(verdicts=())
    world.executor.report(silent)
    world.turn()
    assert world.ends["r"].error == "the executor gave no answer"


def test_held_drafts_are_cut_to_the_token_budget() -> None:
    """Each lane sees the whole budget, so that together they may draft too much."""
    admission = {"max_num_batched_tokens": 8, "max_num_seqs": 4}
    world = make_world("a", "b", "c", admission=admission)
    world.max_num_batched_tokens = 8
    prefilled(world, "r", drafter="a")
    for seed, (name, drafter) in enumerate({"s": "b", "t": "c"}.items(), 5):
        world.arrive(make_request(name, seed=seed, drafter=drafter))
        world.turn()
        world.executor.run(drafter)
        world.step()
    for lane in "abc":
        world.executor.run(lane)
    world.turn()
    world.turn()
    items = last_plan(world, TARGET).items
    assert [(i.request_id, i.source, i.num_draft_tokens) for i in items] == [
        ("r", DraftSource.HELD, 4),
        ("s", DraftSource.HELD, 1),
        ("t", DraftSource.NONE, 0),
    ]
    world.run()
    world.check_outputs()
