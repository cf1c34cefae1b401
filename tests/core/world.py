"""A scheduler and a `ToyExecutor`, and the rough world around them."""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.core.fakes import ToyDrafter, ToyExecutor, embedding_of, target_only

from lab.rivals import policy_named
from penstock.core.kv import BlockPool
from penstock.core.learn import Estimators
from penstock.core.lookup import LookUp
from penstock.core.loop import Loop
from penstock.core.policies.base import Pipeline, ReplayProposal, SelectionPolicy, View
from penstock.core.policies.registry import make_pipeline, make_policy, policy_names
from penstock.core.scheduler import Scheduler
from penstock.core.state import Drafter, RequestState
from penstock.core.types import (
    TARGET,
    Arrive,
    Cancel,
    DrafterDown,
    DrafterUp,
    DraftReady,
    Event,
    FairnessRule,
    FinishReason,
    Output,
    Request,
    StepPlan,
    StepResult,
    Tenant,
)
from penstock.sim.clock import VirtualClock

ADMISSION = {"max_num_batched_tokens": 64, "max_num_seqs": 16}
GATED = {f"{name}, gated": (name, {"gated": True}) for name in ("wait", "nested_wait")}
ADMISSIONS: dict[str, tuple[str, dict[str, Any]]] = GATED | {
    name: (policy_named(name).name, {}) for name in (*policy_names("admission"), "vllm_v0")
}
"""Every admission policy as it is, and those with thresholds gated: name or path, and options."""


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    drafters: Sequence[ToyDrafter] = (),
    own_lanes: Collection[str] = (),
    drafter_blocks: int | None = None,
    admission: Mapping[str, Any] = ADMISSION,
    selection: Any = None,
    allocation: Any = None,
    pipeline: str | Pipeline = "async",
    max_model_len: int = 256,
    tenants: Sequence[Tenant] = (),
    learn: Estimators | None = None,
    groups_decodes: bool = False,
    fairness: FairnessRule = False,
    look_up: LookUp | None = None,
) -> Scheduler:
    def pool() -> BlockPool:
        return BlockPool(drafter_blocks or num_blocks, block_size)

    return Scheduler(
        BlockPool(num_blocks, block_size),
        [
            Drafter(
                d.name,
                pool() if d.has_kv else None,
                d.name in own_lanes,
                max_len=d.max_len,
                vocab_size=d.vocab_size,
            )
            for d in drafters
        ],
        admission=make_policy("admission", "vllm_v1", dict(admission)),
        selection=selection or make_policy("selection", "single"),
        allocation=allocation or make_policy("allocation", "fixed", {"k": 4}),
        pipeline=make_pipeline(pipeline) if isinstance(pipeline, str) else pipeline,
        max_model_len=max_model_len,
        tenants=tenants,
        learn=learn,
        groups_decodes=groups_decodes,
        fairness=fairness,
        look_up=look_up,
    )


def replace_policies(scheduler: Scheduler, **policies: Any) -> None:
    """Policies that no name stands for, in a scheduler that is there already."""
    scheduler._ctx = replace(scheduler._ctx, **policies)


def make_request(
    request_id: str, prompt_len: int = 6, max_tokens: int = 8, seed: int = 0, **fields: Any
) -> Request:
    """A request with a prompt of its own; equal seeds make equal beginnings."""
    rng = random.Random(seed)
    prompt = tuple(rng.randrange(40) for _ in range(prompt_len))
    return Request(request_id, prompt_len, max_tokens, prompt_token_ids=prompt, **fields)


class Rotating(SelectionPolicy):
    """Another drafter, or none, for every request in every round."""

    name = "rotating"

    def select(self, states: Sequence[RequestState], view: View) -> dict[str, str | None]:
        names = [*view.drafters, None]
        return {s.request.id: names[(s.order + s.round) % len(names)] for s in states}

    def replays(self, states: Sequence[RequestState], view: View) -> list[ReplayProposal]:
        """The drafter of the next round, so that its KV is ready."""
        names = [*view.drafters, None]
        after = [(s, names[(s.order + s.round + 1) % len(names)]) for s in states]
        return [ReplayProposal(s, name) for s, name in after if name is not None]


@dataclass(frozen=True, slots=True)
class Chaos:
    """Probabilities, each turn. `repeat`: an old DraftReady comes again. `early`: a DraftReady
    comes ahead of its plan's result. `patience`: a lane's next plan goes no further."""

    cancel: float = 0.0
    fail: float = 0.0
    drafter_down: float = 0.0
    repeat: float = 0.0
    early: float = 0.0
    patience: float = 0.0


class World:
    """Turns the loop, moves the executor, and checks after every turn what must always hold."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: ToyExecutor,
        *,
        chaos: Chaos = Chaos(),
        seed: int = 0,
        admission: Mapping[str, Any] = ADMISSION,
    ) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.loop = Loop(scheduler, executor, VirtualClock(), [self])
        self.chaos = chaos
        self.rng = random.Random(seed)
        self.max_num_batched_tokens = admission["max_num_batched_tokens"]
        self.max_num_seqs = admission["max_num_seqs"]
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Output] = {}
        self.plans: list[StepPlan] = []
        self.log: list[StepPlan | StepResult | Output] = []
        self._in_target: set[str] = set()
        self._down: set[str] = set()
        self._past_drafts: list[DraftReady] = []

    def on_plan(self, plan: StepPlan) -> None:
        self.log.append(plan)
        self.plans.append(plan)
        assert plan.num_rows <= self.max_num_batched_tokens
        for item in plan.items:
            assert item.request_id not in self._in_target, "a request in two target plans"
            self._in_target.add(item.request_id)

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        self.log.append(result)
        epochs = {i.request_id: i.epoch for i in plan.items}
        for state in self.scheduler.table.running.values():
            if epochs.get(state.request.id) == state.epoch:
                self._in_target.discard(state.request.id)

    def on_output(self, output: Output) -> None:
        self.log.append(output)
        assert output.request_id not in self.ends, "an output after the end"
        self.tokens[output.request_id] += output.token_ids
        if output.finish_reason is not None:
            self.ends[output.request_id] = output
            self._in_target.discard(output.request_id)

    @property
    def scheduler_ids(self) -> set[str]:
        return self.requests.keys() - self.ends.keys()

    def arrive(self, *requests: Request) -> None:
        self.turn(*self.arrivals(requests))

    def arrivals(self, requests: Sequence[Request]) -> list[Event]:
        for request in requests:
            self.requests[request.id] = request
            self.tokens[request.id] = []
            self.ends.pop(request.id, None)
        return [Arrive(r) for r in requests]

    def turn(self, *events: Event) -> None:
        self.loop.turn(events)
        self.check()

    def step(self, lane: str = TARGET) -> None:
        """End the lane's plan in flight, take its result in, and plan again."""
        self.executor.run(lane)
        self.turn()
        self.turn()

    def read_prompts(self) -> None:
        """Let drafters beside the target read the prompts that it is still reading."""
        self.turn()
        for lane in self.executor.drafters:
            while self.executor.lanes.get(lane):
                self.step(lane)

    def run(self, requests: Sequence[Request] = (), max_turns: int = 5000) -> None:
        """Let requests arrive now and then, and the world be as rough as it is, until all are
        done."""
        coming = list(requests)
        for _ in range(max_turns):
            events = self._happenings()
            while coming and self.rng.random() < 0.5:
                events += self.arrivals([coming.pop(0)])
            self.turn(*events)
            self.move()
            if not coming and not self.scheduler.num_unfinished and self.executor.is_idle:
                self.turn()
                return
        raise AssertionError(f"{sorted(self.scheduler_ids)} unfinished after {max_turns} turns")

    def _happenings(self) -> list[Event]:
        events: list[Event] = []
        live = sorted(self.scheduler_ids)
        if live and self.rng.random() < self.chaos.cancel:
            events.append(Cancel(self.rng.choice(live)))
        if self._past_drafts and self.rng.random() < self.chaos.repeat:
            events.append(self.rng.choice(self._past_drafts))
        for name in self.executor.drafters:
            if self.rng.random() < self.chaos.drafter_down:
                events.append(self.take_down(name))
            elif name in self._down and self.rng.random() < 0.3:
                self._down.discard(name)
                events.append(DrafterUp(name))
        return events

    def take_down(self, drafter: str) -> DrafterDown:
        """Lose a drafter in the executor; the event tells the scheduler of it."""
        self._down.add(drafter)
        self.executor.lose(drafter)
        return DrafterDown(drafter)

    def move(self) -> None:
        """Let lanes begin, end and report, in a random order and not always."""
        executor = self.executor
        for lane in self.rng.sample(sorted(executor.lanes), len(executor.lanes)):
            if not executor.lanes[lane] or self.rng.random() < self.chaos.patience:
                continue
            if not executor.lanes[lane][0].begun:
                executor.begin(lane)
            if self.rng.random() < self.chaos.patience:
                continue
            failing = [i for i in self.requests if self.rng.random() < self.chaos.fail]
            result = executor.end(lane, frozenset(failing))
            self._past_drafts += result.drafts
            if self.rng.random() < self.chaos.early:
                self.turn(*result.drafts)
        for result in self.rng.sample(executor.ended, len(executor.ended)):
            if self.rng.random() >= self.chaos.patience:
                executor.report(result)

    def check(self) -> None:
        scheduler, memory = self.scheduler, self.scheduler.table.memory
        assert len(scheduler.table.running) <= self.max_num_seqs
        assert (
            len(scheduler.table.running) + len(scheduler.table.waiting) == scheduler.num_unfinished
        )
        assert scheduler.num_unfinished == len(self.scheduler_ids)
        states = (*scheduler.table.running.values(), *scheduler.table.waiting)
        for name, pool in memory.pools.items():
            pool.check()
            owned = {b for s in states if name in s.kv for b in s.kv[name].blocks}
            deferred = {b for d in memory._deferred if d.pool is pool for b in d.kv.blocks}
            assert pool.num_used_blocks == len(owned | deferred)
            for state in states:
                if name in state.kv:
                    kv = state.kv[name]
                    assert kv.num_computed_tokens <= len(kv.blocks) * pool.block_size
                    assert kv.num_committed_blocks <= len(kv.blocks)
        for state in scheduler.table.waiting:
            assert not state.kv

    def check_outputs(self) -> None:
        """Every request has ended, with the target's own output or a beginning of it."""
        assert self.ends.keys() == self.requests.keys()
        for request_id, request in self.requests.items():
            expected, tokens = target_only(request), self.tokens[request_id]
            end = self.ends[request_id]
            if request.pooling is not None:
                whole = embedding_of(request) if end.finish_reason is FinishReason.STOP else b""
                assert (tokens, end.embedding) == ([], whole), request_id
                assert request.pooling == "last" or not end.num_cached_tokens
            elif end.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert tokens == expected, request_id
                stopped = bool(expected) and expected[-1] in request.stop_token_ids
                assert (end.finish_reason is FinishReason.STOP) == stopped
            else:
                assert tokens == expected[: len(tokens)], request_id

    def check_empty(self) -> None:
        """Nothing is left behind."""
        assert self.loop.num_plans_in_flight == 0
        assert self.scheduler.table.memory.num_deferred_blocks == 0
        assert all(p.num_used_blocks == 0 for p in self.scheduler.table.memory.pools.values())
        assert not self.scheduler.learn.acceptance._tokens._by_request
        assert not self.executor.texts
        assert not self.executor.tables


def kv_of(scheduler: Scheduler, request_id: str, pool: str = TARGET) -> Any:
    """A live request's KV counters in one pool."""
    states = (*scheduler.table.running.values(), *scheduler.table.waiting)
    return next(s for s in states if s.request.id == request_id).kv[pool]
