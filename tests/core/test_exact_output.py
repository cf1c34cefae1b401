"""Whatever drafts, fails, is preempted or comes late: the output is the target's own, and no plan
ever reads KV that is not its request's."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.core.fakes import VOCAB, Corruption, ToyDrafter, ToyExecutor, target_only
from tests.core.world import Chaos, World, make_request, make_scheduler
from tests.products import covering

from penstock.core.context import Context
from penstock.core.kv import BlockPool, hash_blocks
from penstock.core.phases import admit, observe
from penstock.core.policies.base import SelectionPolicy, View
from penstock.core.policies.registry import make_policy
from penstock.core.scheduler import Scheduler
from penstock.core.state import DraftRound, DraftStage, RequestState
from penstock.core.table import KVMemory
from penstock.core.types import (
    DraftReady,
    FinishReason,
    Match,
    Output,
    Request,
    StepPlan,
    StepResult,
)

DRAFTERS = (
    ToyDrafter("good", accuracy=0.85),
    ToyDrafter("poor", accuracy=0.4, eagerness=0.8),
    ToyDrafter("lookup", accuracy=0.6, has_kv=False, eagerness=0.7),
)
ROUGH = Chaos(cancel=0.03, fail=0.02, drafter_down=0.03, repeat=0.2, early=0.3, patience=0.3)
OWN_LANES = {"inline": (), "one-lane": ("good",), "all-lanes": ("good", "poor", "lookup")}


class Restless(SelectionPolicy):
    """Another drafter, or none, at every round."""

    name = "restless"

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def select(self, states: Sequence[RequestState], view: View) -> dict[str, str | None]:
        names = [*view.drafters, None]
        return {s.request.id: names[(self._seed + s.order + s.round) % len(names)] for s in states}


class Erring:
    """Look-up that mostly finds what comes, now and then with a wrong token in it, or nothing."""

    name = "look-up"

    def match(self, state: RequestState, num_tokens: int) -> Match | None:
        rng = random.Random(f"{state.request.id} {state.num_known_tokens}")
        begin = state.num_output_tokens
        found = target_only(state.request)[begin : begin + rng.randrange(12)]
        tokens = [rng.randrange(VOCAB) if rng.random() < 0.1 else t for t in found]
        return Match(tuple(tokens[:num_tokens]), rng.randrange(40), "own") if tokens else None

    def release_request(self, state: RequestState) -> None:
        """Keep nothing."""


def make_requests(rng: random.Random, num: int) -> list[Request]:
    """Prompts with common beginnings, of two tenants, drafters by name, and predictions of some."""
    names = ["auto", "none", *(d.name for d in DRAFTERS)]
    requests = [
        make_request(
            f"r{i}",
            prompt_len=rng.randrange(1, 40),
            max_tokens=rng.randrange(1, 40),
            seed=rng.randrange(3),
            tenant=rng.choice(["us", "them"]),
            stop_token_ids=frozenset([1]) if rng.random() < 0.3 else frozenset(),
            drafter=rng.choice(names),
            max_draft_tokens=rng.choice([None, None, 0, 2]),
        )
        for i in range(num)
    ]
    for i, request in enumerate(requests):
        if rng.random() < 0.4:
            right = target_only(request)
            prediction = [rng.randrange(VOCAB) if rng.random() < 0.2 else t for t in right]
            requests[i] = replace(request, prediction=tuple(prediction))
    return requests


def make_world(
    seed: int,
    *,
    own_lanes: Sequence[str] = (),
    depth: int = 1,
    restless: bool = False,
    num_blocks: int = 60,
    drafter_blocks: int = 40,
    chaos: Chaos = ROUGH,
    executor_type: type[ToyExecutor] = ToyExecutor,
) -> tuple[World, list[Request]]:
    requests = make_requests(random.Random(seed), 10)
    if restless:
        requests = [replace(r, drafter="auto") for r in requests]
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        drafters=DRAFTERS,
        own_lanes=own_lanes,
        drafter_blocks=drafter_blocks,
        selection=Restless(seed) if restless else None,
        allocation=make_policy("allocation", "priced") if seed % 2 else None,
        look_up=Erring() if seed else None,
    )
    executor = executor_type(4, {d.name: d for d in DRAFTERS}, depth)
    return World(scheduler, executor, chaos=chaos, seed=seed), requests


@pytest.mark.parametrize(
    ("num_blocks", "drafter_blocks", "lanes", "depth", "restless"),
    covering([20, 60], [3, 40], OWN_LANES, [1, 3], [False, True]),
)
def test_output_is_the_targets_own_in_a_rough_world(
    num_blocks: int, drafter_blocks: int, lanes: str, depth: int, restless: bool
) -> None:
    for seed in range(3):
        world, requests = make_world(
            seed,
            own_lanes=OWN_LANES[lanes],
            depth=depth,
            restless=restless,
            num_blocks=num_blocks,
            drafter_blocks=drafter_blocks,
        )
        world.run(requests)
        world.check_outputs()
        world.check_empty()


@pytest.mark.parametrize("lanes", OWN_LANES)
def test_a_calm_world_finishes_everything_and_drafts_are_accepted(lanes: str) -> None:
    world, requests = make_world(0, own_lanes=OWN_LANES[lanes], chaos=Chaos())
    world.run(requests)
    world.check_outputs()
    world.check_empty()
    reasons = {end.finish_reason for end in world.ends.values()}
    assert reasons <= {FinishReason.STOP, FinishReason.LENGTH}
    assert world.executor.num_accepted > 30


def test_a_rough_world_is_rough() -> None:
    """The trials above would mean little if nothing happened in them."""
    preemptions = cached = 0
    reasons = set()
    for seed in range(4):
        world, requests = make_world(seed, own_lanes=OWN_LANES["one-lane"], depth=3, num_blocks=20)
        world.run(requests)
        preemptions += world.scheduler.table.counters.preemptions
        cached += sum(e.num_cached_tokens for e in world.log if isinstance(e, Output))
        reasons |= {end.finish_reason for end in world.ends.values()}
    assert preemptions > 10
    assert cached > 50
    assert reasons == set(FinishReason) - {FinishReason.REFUSED}


def assert_noticed(**options: object) -> None:
    """In one of twelve worlds, by what is read rather than by the output."""
    for seed in range(12):
        world, requests = make_world(seed, **options)
        try:
            world.run(requests)
            world.check_outputs()
        except Corruption:
            return
        except AssertionError:
            continue
    pytest.fail("nothing was noticed")


def test_notices_blocks_freed_under_a_plan_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    def release(
        memory: KVMemory, state: RequestState, pool_names: Sequence[str] | None = None
    ) -> None:
        for name in list(state.kv) if pool_names is None else pool_names:
            kv = state.kv.pop(name, None)
            if kv is not None:
                memory._released_tables.append((state.request.id, name))
                memory.pools[name].free(kv.blocks)

    monkeypatch.setattr(KVMemory, "release", release)
    assert_noticed(depth=3, num_blocks=20)


def test_notices_prefixes_shared_between_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    def unsalted(token_ids: Sequence[int], block_size: int, salt: str) -> tuple[bytes, ...]:
        return hash_blocks(token_ids, block_size, "")

    monkeypatch.setattr(admit, "hash_blocks", unsalted)
    assert_noticed()


def test_notices_a_prefix_cache_that_outlives_its_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockPool, "drop_cache", lambda pool: None)
    assert_noticed(chaos=replace(ROUGH, drafter_down=0.2))


def test_notices_a_missing_rollback() -> None:
    class Boaster(ToyExecutor):
        """Says that the KV of every draft position may stay."""

        def _verify(self, job, item):  # type: ignore[no-untyped-def]
            verdict = super()._verify(job, item)
            return verdict._replace(num_accepted=verdict.num_proposed)

    assert_noticed(executor_type=Boaster, chaos=Chaos())


def test_notices_old_drafts_taken_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def ready(ctx: Context, event: DraftReady, now: float, *, is_read: bool = True) -> None:
        state = ctx.table.requests.get(event.request_id)
        if state is not None and event.num_draft_tokens:
            num = event.num_draft_tokens
            held = DraftStage.HELD
            state.draft = DraftRound(held, num_draft_tokens=num, drafter=event.drafter)

    monkeypatch.setattr(observe, "draft_ready", ready)
    assert_noticed(own_lanes=OWN_LANES["all-lanes"])


def test_notices_blocks_shared_before_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = Scheduler.schedule

    def hasty(scheduler: Scheduler, now: float, lane: str = "target") -> StepPlan:
        plan = schedule(scheduler, now, lane)
        for item in plan.items:
            state = scheduler.table.requests[item.request_id]
            blocks = state.kv["target"].blocks
            for block, block_hash in zip(blocks, state.block_hashes, strict=False):
                scheduler.pool.commit(block, block_hash)
        return plan

    monkeypatch.setattr(Scheduler, "schedule", hasty)
    assert_noticed(chaos=Chaos(patience=0.5), depth=3)


def test_notices_a_plan_ended_before_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of one lane taken as the end of another lane's plans."""
    update = Scheduler.update

    def careless(scheduler: Scheduler, plan: StepPlan, result: StepResult) -> list[object]:
        for plan_id in list(scheduler.table.in_flight):
            scheduler.table.memory.plan_ended(plan_id)
        return update(scheduler, plan, result)

    monkeypatch.setattr(Scheduler, "update", careless)
    assert_noticed(depth=3, num_blocks=20, own_lanes=OWN_LANES["one-lane"])


def test_the_fake_tells_what_is_wrong() -> None:
    world, requests = make_world(0)
    world.arrive(requests[1])
    job = world.executor.jobs[0]
    job.plan = job.plan._replace(items=(job.plan.items[0]._replace(start=1),))
    with pytest.raises(Corruption, match=r"target KV of r1 at position 0 .* is not that of"):
        world.executor.begin("target")
