"""The scheduler: synchronous, deterministic methods over one table.

`apply` takes in events, `schedule` composes a lane's next step (`admit`, `select`, `allocate`,
`draft`, `verify`), `update` takes in its result (`observe`)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable
from typing import Any

from penstock.core import drafters
from penstock.core.accounts import Accounts
from penstock.core.context import Context
from penstock.core.fairness import Fairness
from penstock.core.groups import DecodeGroup, repeated_run
from penstock.core.kv import BlockPool
from penstock.core.learn import Estimators
from penstock.core.lookup import LookUp
from penstock.core.phases import admit, allocate, draft, observe, select, verify
from penstock.core.policies.base import (
    MOST_DRAFT_TOKENS,
    AdmissionPolicy,
    AllocationPolicy,
    Pipeline,
    SelectionPolicy,
)
from penstock.core.policies.declared import Gauge
from penstock.core.policies.registry import make_pipeline
from penstock.core.queues import WaitingRequests
from penstock.core.state import Drafter
from penstock.core.step import Step
from penstock.core.table import KVMemory, Table
from penstock.core.trials import Trials
from penstock.core.types import (
    TARGET,
    Arrive,
    Cancel,
    DecodeRun,
    DraftAhead,
    DrafterDown,
    DrafterUp,
    DraftOrder,
    DraftReady,
    Event,
    FairnessRule,
    FinishReason,
    Output,
    Reconfigure,
    StateCopy,
    StepPlan,
    StepResult,
    Tenant,
    VerifyItem,
)

_TARGET_ALONE = (TARGET,)


class Scheduler:
    """Composes admission, selection and allocation over paged KV memory.

    pool: the target's KV; `drafters` have pools of their own, with the same block size. pipeline:
    None is `off`. groups_decodes: requests without a draft advance together, which changes no
    decision; the executor can do that. max_num_seqs, max_draft_tokens: its room for requests (None
    is no limit), and for the tokens of one draft. look_up: in texts, for all requests."""

    def __init__(
        self,
        pool: BlockPool,
        drafters: Iterable[Drafter],
        *,
        admission: AdmissionPolicy,
        selection: SelectionPolicy,
        allocation: AllocationPolicy,
        pipeline: Pipeline | None = None,
        max_model_len: int,
        tenants: Iterable[Tenant] = (),
        learn: Estimators | None = None,
        groups_decodes: bool = False,
        fairness: FairnessRule = False,
        max_num_seqs: int | None = None,
        max_draft_tokens: int = MOST_DRAFT_TOKENS,
        look_up: LookUp | None = None,
    ) -> None:
        learn = learn or Estimators()
        by_name = {d.name: d for d in drafters}
        pools = {d.name: d.pool for d in by_name.values() if d.pool is not None}
        if any(p.block_size != pool.block_size for p in pools.values()):
            raise ValueError("all models must use the same KV block size")
        weighs_time = selection.weighs_time or allocation.weighs_time
        is_fair = bool(fairness) and not admission.may_idle
        known_tenants = {t.name: t for t in tenants}
        groups: dict[Hashable, DecodeGroup] = {}
        accounts = Accounts(known_tenants, learn, groups, is_fair=is_fair)
        new_queue = accounts.queues(lambda: admission.new_queue(learn))
        self.table = Table(
            KVMemory({TARGET: pool, **pools}),
            by_name,
            known_tenants,
            groups,
            accounts,
            WaitingRequests(admission.queue_of, new_queue),
        )
        self._ctx = Context(
            self.table,
            learn,
            admission,
            selection,
            allocation,
            pipeline or make_pipeline("off"),
            Trials(learn.times) if weighs_time else None,
            Fairness(accounts, learn, is_strict=fairness == "strict") if is_fair else None,
            max_model_len,
            groups_decodes,
            math.inf if max_num_seqs is None else max_num_seqs,
            max_draft_tokens,
            look_up,
        )
        # A run that may repeat, and the table's version if nothing happens until then.
        self._repeatable: tuple[DecodeRun, int] | None = None

    @property
    def learn(self) -> Estimators:
        """The estimators."""
        return self._ctx.learn

    @property
    def look_up(self) -> LookUp | None:
        """Look-up in texts."""
        return self._ctx.look_up

    @property
    def pool(self) -> BlockPool:
        """The target's KV."""
        return self.table.memory.pools[TARGET]

    @property
    def lanes(self) -> tuple[str, ...]:
        """Lanes, drafters' first, so that a draft can start before the next verification.

        A drafter with a lane reads prompts in it wherever it drafts."""
        drafters = self.table.drafters
        if not drafters:
            return _TARGET_ALONE
        return (*[n for n, d in drafters.items() if d.is_remote or d.has_lane], TARGET)

    @property
    def gauges(self) -> dict[str, Any]:
        """Numbers behind the last decisions of all policies (`policies.base.Gauges`)."""
        ctx = self._ctx
        drafting = {**ctx.selection.gauges, **ctx.allocation.gauges}
        return {**ctx.admission.gauges, **drafting, **ctx.pipeline.gauges}

    @property
    def metrics(self) -> dict[Gauge, Any]:
        """Gauges that the policies declare for `/metrics`."""
        ctx, known = self._ctx, self.gauges
        policies = (ctx.admission, ctx.selection, ctx.allocation, ctx.pipeline)
        return {g: known[g.name] for p in policies for g in p.metrics if g.name in known}

    @property
    def num_unfinished(self) -> int:
        return len(self.table.requests)

    def apply(self, event: Event, now: float) -> list[Output]:
        """Take in an event."""
        ctx, table = self._ctx, self.table
        if isinstance(event, DraftAhead):
            # It changes no draft that is due.
            observe.draft_ahead(ctx, event)
            return []
        table.counters.version += 1
        match event:
            case Arrive(request):
                return admit.arrive(ctx, request, now)
            case Cancel(request_id):
                state = table.requests.get(request_id)
                if state is not None:
                    return [observe.finish(ctx, state, FinishReason.CANCELLED)]
            case DraftReady():
                observe.draft_ready(ctx, event, now)
            case DrafterUp():
                drafters.up(ctx, event)
            case DrafterDown(name):
                drafters.down(ctx, name)
            case Reconfigure(tenants):
                table.reconfigure(tenants)
        return []

    def schedule(self, now: float, lane: str = TARGET) -> StepPlan:
        """Compose the lane's next step; an empty plan means that there is nothing to do now."""
        ctx, table = self._ctx, self.table
        plan_id = table.counters.plans
        table.counters.plans += 1
        if lane == TARGET and (run := self._next_of_run(now, plan_id)) is not None:
            table.in_flight.add(plan_id)
            return StepPlan(plan_id, lane, now, decodes=run, wake_at=run.until)
        items: tuple[VerifyItem, ...] = ()
        orders: tuple[DraftOrder, ...] = ()
        decodes, wake_at, stalled = None, None, None
        copies: tuple[StateCopy, ...] = ()
        if lane == TARGET:
            step = self._compose(now)
            grants = allocate.of_step(ctx, step)
            items = verify.items(ctx, step, grants, draft.of_step(ctx, step, grants), plan_id)
            copies = *step.copies, *verify.copies(ctx, items)
            if items and table.drafters:
                orders = draft.replays(ctx, lane, step.scheduled_states, plan_id, now)
            if step.decoding:
                decodes = verify.decodes(ctx, step, plan_id)
                self._note_run(decodes)
            wake_at, stalled = step.wake_at, step.stalled
        else:
            orders = self._orders_beside(lane, plan_id, now)
        if items or orders or decodes:
            table.in_flight.add(plan_id)
        new_requests, forgotten = table.updates.pop()
        return StepPlan(
            id=plan_id,
            lane=lane,
            created_at=now,
            items=items,
            decodes=decodes,
            drafts=orders,
            new_requests=new_requests,
            released=table.memory.take_released_tables(),
            forgotten=forgotten,
            wake_at=wake_at,
            stalled=stalled,
            copies=copies,
        )

    def _compose(self, now: float) -> Step:
        """Choose the requests of the target's step, and a drafter for each."""
        ctx, table = self._ctx, self.table
        if not table.drafters:
            return admit.compose(ctx, now)
        # Whether a request waits for a draft depends on its drafter.
        select.select(ctx, table.solo.values(), now)
        drafters.expire(ctx, now)
        step = admit.compose(ctx, now)
        select.select(ctx, step.scheduled_states, now)
        return step

    def _orders_beside(self, lane: str, plan_id: int, now: float) -> tuple[DraftOrder, ...]:
        """Return the orders of a drafter's lane: drafts that are due, or else texts to read."""
        ctx, table = self._ctx, self.table
        if lane not in ctx.beside:
            return draft.prompts(ctx, lane, plan_id)
        if table.due.version != table.counters.version:
            select.select(ctx, table.running.values(), now)
            draft.sort_due(ctx)
        if table.due.by_lane.get(lane):
            orders = draft.of_lane(ctx, lane, allocate.of_lanes(ctx, now), plan_id, now)
            if orders:
                return orders
        reading = draft.prompts(ctx, lane, plan_id)
        return reading or draft.replays(ctx, lane, table.running.values(), plan_id, now)

    def _next_of_run(self, now: float, plan_id: int) -> DecodeRun | None:
        """Return the last step's run once more if it may repeat and nothing has happened since."""
        if self._repeatable is None:
            return None
        (run, version), self._repeatable = self._repeatable, None
        is_same = version == self.table.counters.version and not self.table.in_flight
        if not is_same or (run.until is not None and now >= run.until):
            return None
        run = repeated_run(run, self.table.groups[run.groups[0]], self.pool, plan_id)
        self._note_run(run)
        return run

    def _note_run(self, run: DecodeRun) -> None:
        """Note a planned run, which may repeat after its result, the next change of the table.

        Not beside another plan in flight, which may have taken memory."""
        if run.change is not None and run.max_repeats > 1 and not self.table.in_flight:
            self._repeatable = (run, self.table.counters.version + 1)

    def update(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """Take in the result of a plan, once."""
        table = self.table
        if plan.id not in table.in_flight:
            return []
        table.in_flight.discard(plan.id)
        if result.verdicts or result.failures or result.drafts or plan.decodes:
            # A draft server's plan ends as soon as its orders are sent: that changes nothing.
            table.counters.version += 1
        outputs = observe.observe(self._ctx, plan, result)
        run = plan.decodes
        if run is not None and run.num_requests > len(table.groups[run.groups[0]]):
            self._repeatable = None
        return outputs
