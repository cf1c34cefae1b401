from types import MappingProxyType
from typing import Any

import pytest
from tests.core.fakes import ToyDrafter, ToyExecutor, target_only
from tests.core.world import World, kv_of, make_request, make_scheduler, replace_policies

from penstock.core.kv import BlockPool, hash_blocks
from penstock.core.policies.allocation.fixed import Fixed
from penstock.core.policies.declared import Gauge
from penstock.core.policies.registry import make_policy
from penstock.core.scheduler import Scheduler
from penstock.core.state import Drafter, RequestState
from penstock.core.table import KVMemory
from penstock.core.types import (
    TARGET,
    Arrive,
    Cancel,
    DraftSource,
    FinishReason,
    Output,
    Request,
    StateCopy,
    Status,
    StepResult,
    Verdict,
)

DRAFTER = ToyDrafter("d", accuracy=1.0)


def make_world(*drafters: ToyDrafter, **options: Any) -> World:
    scheduler = make_scheduler(drafters=drafters, **options)
    return World(scheduler, ToyExecutor(4, {d.name: d for d in drafters}))


def refused(scheduler: Scheduler, request: Request) -> str:
    (output,) = scheduler.apply(Arrive(request), 0.0)
    assert output.finish_reason is FinishReason.REFUSED
    assert output.request_id == request.id
    assert "\n" not in output.error
    return output.error


def test_refusals_say_what_is_wrong() -> None:
    scheduler = make_scheduler(num_blocks=16, max_model_len=100, drafters=[DRAFTER])
    assert "at least 1 prompt token" in refused(scheduler, Request("r", 0, 4))
    assert "at least 1 token to make" in refused(scheduler, Request("r", 4, 0))
    assert "the context of 100 tokens" in refused(scheduler, Request("r", 60, 41))
    assert "the KV memory of 64 tokens" in refused(scheduler, Request("r", 60, 5))
    error = refused(scheduler, Request("r", 4, 4, drafter="x"))
    assert error == "unknown drafter 'x'; choose from auto, none, d"
    assert scheduler.num_unfinished == 0

    assert scheduler.apply(Arrive(Request("r", 60, 4)), 0.0) == []
    assert "already running" in refused(scheduler, Request("r", 4, 4))
    assert scheduler.num_unfinished == 1


def test_metrics_are_the_gauges_that_policies_declare() -> None:
    class Known(Fixed):
        length = Gauge("length", "Draft tokens of a request.")
        metrics = (length, Gauge("unknown", "Not known yet."))
        gauges = MappingProxyType({"length": 3, "by_request": {"r": 1.0}})

    scheduler = make_scheduler(drafters=[DRAFTER])
    replace_policies(scheduler, allocation=Known(Known.Options()))
    assert scheduler.gauges == Known.gauges
    assert scheduler.metrics == {Known.length: 3}


def test_models_must_share_a_block_size() -> None:
    with pytest.raises(ValueError, match="same KV block size"):
        Scheduler(
            BlockPool(8, 4),
            [Drafter("d", BlockPool(8, 8))],
            admission=make_policy("admission", "vllm_v1"),
            selection=make_policy("selection", "single"),
            allocation=make_policy("allocation", "fixed"),
            max_model_len=16,
        )


def test_a_step_of_drafting_and_verifying() -> None:
    world = make_world(DRAFTER)
    world.arrive(make_request("r"))
    (item,) = world.plans[-1].items
    assert item.source is DraftSource.NONE
    assert item.draft is None, "a drafter reads a prompt when its first draft is ordered"
    world.step()
    (item,) = world.plans[-1].items
    assert (item.source, item.drafter, item.num_draft_tokens) == (DraftSource.INLINE, "d", 4)
    assert (item.start, item.num_scheduled_tokens, item.samples) == (6, 1, True)
    assert (item.draft.start, item.draft.num_catch_up_tokens) == (0, 7)
    world.executor.run(TARGET)
    world.turn()
    assert kv_of(world.scheduler, "r").num_computed_tokens == 11
    assert kv_of(world.scheduler, "r", "d").num_computed_tokens == 10


def test_a_rejected_draft_is_rolled_back_in_both_models() -> None:
    world = make_world(ToyDrafter("d", accuracy=0.0))
    world.arrive(make_request("r"))
    world.step()
    world.executor.run(TARGET)
    world.turn()
    assert kv_of(world.scheduler, "r").num_computed_tokens == 7
    assert kv_of(world.scheduler, "r", "d").num_computed_tokens == 7
    assert world.tokens["r"] == target_only(world.requests["r"])[:2]


def test_a_long_prompt_goes_in_chunks() -> None:
    admission = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
    world = make_world(DRAFTER, admission=admission)
    world.max_num_batched_tokens = 16
    world.run([make_request("r", prompt_len=40)])
    chunks = [(i.start, i.num_scheduled_tokens, i.samples) for p in world.plans for i in p.items]
    assert chunks[:3] == [(0, 16, False), (16, 16, False), (32, 8, True)]
    catch_ups = [i.draft.num_catch_up_tokens for p in world.plans[:4] for i in p.items if i.draft]
    assert catch_ups == [41]
    world.check_outputs()


def test_a_prompt_to_embed_makes_no_token() -> None:
    """It ends with the chunk that ends it; without an answer of the executor with an error."""
    admission = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
    world = make_world(DRAFTER, admission=admission)
    world.max_num_batched_tokens = 16
    requests = [make_request(x, 40, 0, pooling=x) for x in ("last", "mean")]
    world.run([requests[0]])
    chunks = [(i.start, i.num_scheduled_tokens, i.samples) for p in world.plans for i in p.items]
    assert chunks == [(0, 16, False), (16, 16, False), (32, 8, False)]
    assert not world.scheduler.learn.lengths._num_since
    world.run([requests[1], make_request("again", 40, 0, pooling="last")])
    assert [world.ends[x].num_cached_tokens for x in ("last", "mean", "again")] == [0, 0, 36]
    world.check_outputs()
    world.check_empty()
    scheduler = make_scheduler()
    scheduler.apply(Arrive(make_request("r", 4, 0, pooling="last")), 0.0)
    plan = scheduler.schedule(0.0)
    (item,) = plan.items
    verdict = Verdict("r", item.epoch, item.round)
    (output,) = scheduler.update(plan, StepResult(plan.id, TARGET, 0.0, 1.0, (verdict,)))
    assert (output.finish_reason, output.error) == (
        FinishReason.ERROR,
        "the executor gives no embeddings",
    )
    assert scheduler.num_unfinished == 0


def test_the_output_ends_at_the_first_stop_token() -> None:
    request = make_request("r", max_tokens=30, seed=1)
    free = target_only(request)
    stopping = make_request("r", max_tokens=30, seed=1, stop_token_ids=frozenset([free[7], 99]))
    world = make_world(DRAFTER)
    world.run([stopping])
    assert world.ends["r"].finish_reason is FinishReason.STOP
    assert world.tokens["r"] == free[: free.index(free[7]) + 1]
    assert world.ends["r"].num_accepted <= len(world.ends["r"].token_ids)


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 6, 7])
def test_the_output_ends_at_max_tokens(max_tokens: int) -> None:
    request = make_request("r", max_tokens=max_tokens)
    world = make_world(DRAFTER)
    world.run([request])
    assert world.ends["r"].finish_reason is FinishReason.LENGTH
    assert world.tokens["r"] == target_only(request)
    drafts = [i.num_draft_tokens for p in world.plans for i in p.items]
    assert sum(drafts) <= max(0, max_tokens - 2), "no draft token that could not be of use"


@pytest.mark.parametrize("fields", [{"drafter": "none"}, {"max_draft_tokens": 0}])
def test_a_request_may_want_no_drafts(fields: dict[str, Any]) -> None:
    world = make_world(DRAFTER)
    world.run([make_request("r", **fields)])
    assert all(i.draft is None for p in world.plans for i in p.items)


def test_a_request_may_limit_its_drafts_and_name_its_drafter() -> None:
    world = make_world(ToyDrafter("other"), DRAFTER)
    world.run([make_request("r", max_tokens=20, drafter="d", max_draft_tokens=2)])
    items = [i for p in world.plans for i in p.items if i.num_draft_tokens]
    assert {i.drafter for i in items} == {"d"}
    assert max(i.num_draft_tokens for i in items) == 2


def test_equal_beginnings_are_computed_once() -> None:
    world = make_world(DRAFTER)
    world.run([make_request("r", prompt_len=14)])
    world.run([make_request("s", prompt_len=18)])
    first = next(i for p in world.plans for i in p.items if i.request_id == "s")
    assert first.start == 12, "three full blocks"
    assert len(first.new_blocks) == 5, "shared blocks are in the table that is announced"
    cached = [e.num_cached_tokens for e in world.log if isinstance(e, Output) and e.token_ids]
    assert [c for c in cached if c] == [12]
    world.check_outputs()


def test_output_is_shared_too_but_never_the_last_known_token() -> None:
    first = make_request("r", prompt_len=8, max_tokens=8)
    world = make_world()
    world.run([first])
    assert first.prompt_token_ids is not None
    longer = (*first.prompt_token_ids, *world.tokens["r"])
    for request_id, prompt in (("s", longer), ("t", longer[:12])):
        world.run([Request(request_id, len(prompt), 4, prompt_token_ids=prompt)])
    starts = {i.request_id: i.start for p in reversed(world.plans) for i in p.items}
    assert starts["s"] == 12
    assert starts["t"] == 8, "11 of 12 tokens may come from the cache, and two blocks are full"


def test_hashes_may_be_given_without_tokens() -> None:
    scheduler = make_scheduler()
    hashes = hash_blocks(range(8), 4, "")
    for name in ("r", "s"):
        scheduler.apply(Arrive(Request(name, 10, 2, block_hashes=hashes)), 0.0)
        plan = scheduler.schedule(0.0)
        (item,) = plan.items
        verdict = Verdict(name, item.epoch, item.round, token_ids=(1, 2))
        scheduler.update(plan, StepResult(plan.id, TARGET, 0.0, 0.0, verdicts=(verdict,)))
    assert item.start == 8
    assert scheduler.num_unfinished == 0


def test_a_drafters_cache_may_reach_further_than_the_targets_chunk() -> None:
    """Its table is announced whole, when it is first used, and shared blocks are not rewritten."""
    admission = {"max_num_batched_tokens": 8, "max_num_seqs": 4}
    world = make_world(DRAFTER, num_blocks=12, drafter_blocks=60, admission=admission)
    world.run([make_request("r", prompt_len=30)])
    world.run([make_request("s", prompt_len=44, max_tokens=4, seed=9)])
    world.run([make_request("t", prompt_len=30, max_tokens=8)])
    items = [i for p in world.plans for i in p.items if i.request_id == "t"]
    orders = [i.draft for i in items if i.draft is not None]
    assert items[0].start < orders[0].start == 28
    assert len(orders[0].new_blocks) >= 8
    world.check_outputs()


def test_a_short_prompts_output_is_salted_too() -> None:
    memory = KVMemory({TARGET: BlockPool(8, 4)})
    hashes = []
    for tenant in ("us", "them"):
        state = RequestState(Request(tenant, 2, 9, prompt_token_ids=(1, 2), tenant=tenant), 0)
        state.append((3, 4, 5))
        kv = state.kv_of(TARGET)
        kv.blocks, kv.num_computed_tokens = memory.pools[TARGET].allocate(1), 4
        memory.commit(state)
        hashes += state.block_hashes
    assert len(set(hashes)) == 2


def test_a_step_in_flight_keeps_the_blocks_of_target_and_inline_drafter() -> None:
    world = make_world(DRAFTER)
    world.arrive(make_request("r"))
    world.step()
    world.turn(Cancel("r"))
    assert [p.num_used_blocks for p in world.scheduler.table.memory.pools.values()] == [3, 3]
    world.step()
    world.check_empty()


def test_a_waiting_request_may_be_cancelled() -> None:
    world = make_world(num_blocks=4)
    world.arrive(make_request("r", prompt_len=14, max_tokens=2))
    world.arrive(make_request("s", prompt_len=10, max_tokens=2))
    assert [s.status for s in world.scheduler.table.waiting] == [Status.WAITING]
    world.turn(Cancel("s"), Cancel("unknown"))
    assert world.ends["s"].finish_reason is FinishReason.CANCELLED
    world.run()
    world.check_empty()


def test_an_old_plan_is_taken_in_once() -> None:
    world = make_world()
    world.arrive(make_request("r"))
    plan = world.plans[-1]
    result = world.executor.run(TARGET)
    world.turn()
    before = list(world.tokens["r"])
    assert world.scheduler.update(plan, result) == []
    assert world.tokens["r"] == before


def test_states_behind_prompts_are_copied_and_begun_with() -> None:
    """Chunk by chunk: in that with the place before the last full block. None is used after a
    step with copies has failed."""
    scheduler = make_scheduler(admission={"max_num_batched_tokens": 12, "max_num_seqs": 8})
    scheduler.pool.num_snapshots = 4

    def play(request: Request, *, fails: bool = False) -> list[tuple[StateCopy, ...]]:
        scheduler.apply(Arrive(request), 0.0)
        copies = []
        while scheduler.num_unfinished:
            plan = scheduler.schedule(0.0)
            copies.append(plan.copies)
            verdicts = tuple(
                Verdict(i.request_id, i.epoch, i.round, (7,) * i.samples)
                for i in plan.items
                if not fails
            )
            scheduler.update(plan, StepResult(plan.id, TARGET, 0.0, 0.0, verdicts))
        return copies

    prompt = make_request("a", 31, 3)
    saved = StateCopy("a", 0, 24, is_saved=True)
    assert play(prompt) == [(), (saved,), (), (), ()]
    longer = (*(prompt.prompt_token_ids or ()), *range(10))
    used = StateCopy("b", 0, 24, is_saved=False)
    again = [Request(n, 41, 1, prompt_token_ids=longer) for n in ("b", "c", "d", "e")]
    assert play(again[0]) == [(used, StateCopy("b", 1, 36, is_saved=True)), ()]
    assert play(again[1]) == [(StateCopy("c", 1, 36, is_saved=False),)]
    assert play(again[2], fails=True) == [(StateCopy("d", 1, 36, is_saved=False),)]
    assert play(again[3])[0] == ()
