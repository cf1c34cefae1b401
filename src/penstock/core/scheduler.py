"""The scheduler: apply events, schedule steps, update from results. Synchronous, deterministic."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from penstock.core.admission import AdmissionPolicy
from penstock.core.allocation import AllocationPolicy
from penstock.core.blocks import BlockPool, hash_blocks
from penstock.core.drafting import Drafting
from penstock.core.estimators import Estimators
from penstock.core.memory import KVMemory
from penstock.core.selection import SelectionPolicy
from penstock.core.state import Drafter, HeldDraft, RequestState, Tenant
from penstock.core.step import ScheduledTokens, Step
from penstock.core.types import (
    AUTO_DRAFTER,
    NO_DRAFTER,
    TARGET,
    Arrive,
    Cancel,
    DrafterDown,
    DrafterUp,
    DraftOrder,
    DraftReady,
    DraftSource,
    Event,
    FinishReason,
    Output,
    Reconfigure,
    Request,
    Status,
    StepPlan,
    StepResult,
    Verdict,
    VerifyItem,
)


class Scheduler:
    """Composes admission, selection and allocation over paged KV memory.

    `pool` is the target's KV; `drafters` come with pools of their own, with the same block size.
    A drafter without a lane of its own drafts inside the target's step.
    """

    def __init__(
        self,
        pool: BlockPool,
        drafters: Iterable[Drafter],
        *,
        admission: AdmissionPolicy,
        selection: SelectionPolicy,
        allocation: AllocationPolicy,
        max_model_len: int,
        tenants: Iterable[Tenant] = (),
    ) -> None:
        self.pool = pool
        self.max_model_len = max_model_len
        self.estimators = Estimators()
        self.tenants = {t.name: t for t in tenants}
        self.running: list[RequestState] = []
        self.waiting: deque[RequestState] = deque()
        self.num_preemptions = 0
        self._drafters = {d.name: d for d in drafters}
        pools = {d.name: d.pool for d in self._drafters.values() if d.pool is not None}
        if any(p.block_size != pool.block_size for p in pools.values()):
            raise ValueError("all models must use the same KV block size")
        self.memory = KVMemory({TARGET: pool, **pools})
        self._states: dict[str, RequestState] = {}
        self._admission = admission
        self._selection = selection
        self._drafting = Drafting(
            self._drafters,
            self.memory,
            selection,
            allocation,
            self.estimators,
            self._states.values,
        )
        self._in_flight: set[int] = set()
        self._num_plans = 0
        self._num_requests = 0
        self._num_epochs = 0
        self._new_requests: dict[str, Request] = {}
        self._forgotten: list[str] = []

    @property
    def lanes(self) -> tuple[str, ...]:
        """Drafters' lanes first, so that a draft can start before the next verification."""
        own = tuple(d.name for d in self._drafters.values() if d.own_lane)
        return (*own, TARGET)

    @property
    def num_unfinished(self) -> int:
        return len(self._states)

    # --- events ---------------------------------------------------------------------------------

    def apply(self, event: Event, now: float) -> list[Output]:
        """Take in something from outside."""
        match event:
            case Arrive(request):
                return self._arrive(request)
            case Cancel(request_id):
                return self._cancel(request_id)
            case DraftReady():
                self._draft_ready(event)
            case DrafterUp(name):
                if name in self._drafters:
                    self._drafters[name].up = True
            case DrafterDown(name):
                self._drafter_down(name)
            case Reconfigure(tenant, weight):
                self._tenant(tenant).weight = weight
        return []

    def _arrive(self, request: Request) -> list[Output]:
        error = self._refusal(request)
        if error is not None:
            return [Output(request.id, finish_reason=FinishReason.REFUSED, error=error)]
        state = RequestState(request, self._num_requests, self._next_epoch())
        self._num_requests += 1
        if request.prompt_token_ids is not None and not state.block_hashes:
            hashes = hash_blocks(request.prompt_token_ids, self.pool.block_size, request.tenant)
            state.block_hashes = list(hashes)
        self._states[request.id] = state
        self._tenant(request.tenant)
        self.waiting.append(state)
        self._new_requests[request.id] = request
        return []

    def _refusal(self, request: Request) -> str | None:
        total = request.prompt_len + request.max_tokens
        if request.id in self._states:
            return f"a request with id {request.id!r} is already running"
        if request.prompt_len < 1 or request.max_tokens < 1:
            return "a request needs at least 1 prompt token and at least 1 token to make"
        if total > self.max_model_len:
            return (
                f"{request.prompt_len} prompt tokens and {request.max_tokens} to make are more "
                f"than the context of {self.max_model_len} tokens"
            )
        if total > self.pool.capacity_tokens:
            return (
                f"{request.prompt_len} prompt tokens and {request.max_tokens} to make are more "
                f"than the KV memory of {self.pool.capacity_tokens} tokens"
            )
        if request.drafter not in (AUTO_DRAFTER, NO_DRAFTER, *self._drafters):
            allowed = ", ".join((AUTO_DRAFTER, NO_DRAFTER, *self._drafters))
            return f"unknown drafter {request.drafter!r}; choose from {allowed}"
        return None

    def _cancel(self, request_id: str) -> list[Output]:
        state = self._states.get(request_id)
        if state is None:
            return []
        return [self._finish(state, FinishReason.CANCELLED)]

    def _draft_ready(self, event: DraftReady) -> None:
        """Hold a draft, once: whatever is late, repeated or of an old epoch is ignored."""
        state = self._states.get(event.request_id)
        if state is None or (event.epoch, event.round) != (state.epoch, state.round):
            return
        order = state.draft_order
        if order is None or order.drafter != event.drafter:
            return
        state.draft_order = None
        num_draft_tokens = max(0, min(event.num_draft_tokens, order.max_draft_tokens))
        self._drafting.drafted(state, order, num_draft_tokens)
        if num_draft_tokens:
            state.held = HeldDraft(event.drafter, num_draft_tokens)
        else:
            state.undrafted_round = state.round

    def _drafter_down(self, name: str) -> None:
        """Its KV and its drafts are gone; its requests finish their round without them, so that a
        late draft cannot answer a new order after it has come back."""
        if name not in self._drafters:
            return
        self._drafters[name].up = False
        for state in self._states.values():
            if name in (d.drafter for d in (state.draft_order, state.held) if d is not None):
                state.draft_order = state.held = None
                state.undrafted_round = state.round
            self.memory.release(state, [name])
        self.memory.drop_cache(name)

    def _next_epoch(self) -> int:
        """No two lives of a request id share an epoch, so nothing late can be mistaken."""
        self._num_epochs += 1
        return self._num_epochs

    def _tenant(self, name: str) -> Tenant:
        return self.tenants.setdefault(name, Tenant(name))

    # --- schedule -------------------------------------------------------------------------------

    def schedule(self, now: float, lane: str = TARGET) -> StepPlan:
        """Compose the lane's next step. An empty plan means that there is nothing to do now."""
        plan_id = self._num_plans
        if lane == TARGET:
            items, wake_at = self._schedule_target(now, plan_id)
            orders: tuple[DraftOrder, ...] = ()
        else:
            items, wake_at = (), None
            orders = self._schedule_drafter(now, lane, plan_id)
        if items or orders:
            self._in_flight.add(plan_id)
        self._num_plans += 1
        new_requests, self._new_requests = tuple(self._new_requests.values()), {}
        forgotten, self._forgotten = tuple(self._forgotten), []
        return StepPlan(
            id=plan_id,
            lane=lane,
            created_at=now,
            items=items,
            drafts=orders,
            new_requests=new_requests,
            released=self.memory.take_released_tables(),
            forgotten=forgotten,
            wake_at=wake_at,
        )

    def _schedule_target(
        self, now: float, plan_id: int
    ) -> tuple[tuple[VerifyItem, ...], float | None]:
        self._drafting.select(self.running, now)
        step = Step(
            now=now,
            pool=self.pool,
            running=self.running,
            waiting=self.waiting,
            may_run=self._may_run,
            draft_reserve=self._drafting.reserve,
            release=self._preempt,
        )
        self._admission.compose(step)
        self.num_preemptions += step.num_preempted
        scheduled = list(step.scheduled.values())
        self._drafting.select([s.state for s in scheduled], now)
        lengths = self._draft_lengths(step, scheduled)
        items = tuple(self._item(s, lengths.get(s.state.request.id, 0)) for s in scheduled)
        for s, item in zip(scheduled, items, strict=True):
            s.state.in_flight = True
            order = item.draft
            s.state.plans[plan_id] = (TARGET,) if order is None else (TARGET, order.drafter)
        return items, step.wake_at

    def _may_run(self, state: RequestState) -> bool:
        if state.in_flight:
            return False
        drafter = self._drafting.drafter_of(state)
        if drafter is None or not drafter.own_lane:
            return True
        is_drafted = state.held is not None or state.undrafted_round == state.round
        return is_drafted or not state.is_decoding

    def _draft_lengths(self, step: Step, scheduled: list[ScheduledTokens]) -> dict[str, int]:
        """Draft lengths: held drafts as far as the step's budget goes, then what drafts inside
        this step."""
        num_rows = step.num_tokens
        budget = self._admission.draft_budget(num_rows)
        lengths: dict[str, int] = {}
        inline = []
        for s in scheduled:
            drafter = self._drafting.drafter_of(s.state)
            if s.state.held is not None:
                length = min(s.state.held.num_draft_tokens, budget)
                lengths[s.state.request.id] = length
                budget -= length
                num_rows += length
            elif drafter is not None and not drafter.own_lane:
                inline.append(s.state)
        num_sampled = sum(s.samples for s in scheduled)
        lengths |= self._drafting.allocate(inline, budget, num_rows, num_sampled)
        return lengths

    def _item(self, scheduled: ScheduledTokens, length: int) -> VerifyItem:
        state = scheduled.state
        source, order, drafter = DraftSource.NONE, None, None
        if state.held is not None and scheduled.samples:
            length = self._grow_for_draft(scheduled, length)
            if length:
                source, drafter = DraftSource.HELD, state.held.drafter
        else:
            inline = self._drafting.drafter_of(state)
            if inline is not None and not inline.own_lane:
                order = self._inline_order(scheduled, length)
            length = order.max_draft_tokens if order is not None else 0
            if length:
                source, drafter = DraftSource.INLINE, state.drafter
        state.held = None
        return VerifyItem(
            request_id=state.request.id,
            epoch=state.epoch,
            round=state.round,
            start=scheduled.start,
            num_scheduled_tokens=scheduled.num_tokens,
            samples=scheduled.samples,
            source=source,
            drafter=drafter,
            num_draft_tokens=length,
            draft=order,
            new_blocks=tuple(scheduled.new_blocks),
        )

    def _inline_order(self, scheduled: ScheduledTokens, length: int) -> DraftOrder | None:
        """A draft, or beside a chunk of prefill the same chunk for the drafter."""
        state = scheduled.state
        if state.is_decoding and not length:
            return None
        length = self._grow_for_draft(scheduled, length)
        return self._drafting.order(state, scheduled.start + scheduled.num_tokens, length)

    def _grow_for_draft(self, scheduled: ScheduledTokens, length: int) -> int:
        """Room in the target's KV for as much of a draft as fits into free blocks."""
        blocks = scheduled.state.kv_of(TARGET).blocks
        end = scheduled.start + scheduled.num_tokens
        block_size = self.pool.block_size
        if end + length <= len(blocks) * block_size:
            return length
        length = min(length, (len(blocks) + self.pool.num_free_blocks) * block_size - end)
        new_blocks = self.pool.allocate(self.pool.blocks_for(end + length) - len(blocks))
        blocks += new_blocks
        scheduled.new_blocks += new_blocks
        return length

    def _schedule_drafter(self, now: float, lane: str, plan_id: int) -> tuple[DraftOrder, ...]:
        drafter = self._drafters[lane]
        if not drafter.up:
            return ()
        self._drafting.select(self.running, now)
        states = [
            s
            for s in self.running
            if s.drafter == lane
            and s.is_decoding
            and not s.in_flight
            and s.held is None
            and s.draft_order is None
            and s.undrafted_round != s.round
        ]
        budget = self._admission.draft_budget(len(states))
        lengths = self._drafting.allocate(states, budget, len(states), len(states))
        orders = []
        for state in states:
            length = lengths.get(state.request.id, 0)
            order = self._drafting.order(state, state.num_known_tokens, length) if length else None
            if order is None:
                state.undrafted_round = state.round
                continue
            state.draft_order = order
            state.plans[plan_id] = (lane,)
            orders.append(order)
        return tuple(orders)

    # --- results --------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """Take in what a plan came to: advance or roll back, free blocks, feed the estimators."""
        if plan.id not in self._in_flight:
            return []
        self._in_flight.discard(plan.id)
        for order in plan.drafts:
            self._plan_ended(order.request_id, plan.id)
        for item in plan.items:
            self._plan_ended(item.request_id, plan.id)
        self.memory.plan_ended(plan.id)
        self.estimators.step_times.observe(result)
        for ready in result.drafts:
            self._draft_ready(ready)
        for order in plan.drafts:
            self._end_unanswered(order)
        return self._judge(plan, result)

    def _judge(self, plan: StepPlan, result: StepResult) -> list[Output]:
        verdicts = {v.request_id: v for v in result.verdicts}
        failures = {f.request_id: f.reason for f in result.failures}
        outputs = []
        for item in plan.items:
            state = self._states.get(item.request_id)
            if state is None or state.epoch != item.epoch:
                continue
            state.in_flight = False
            verdict = verdicts.get(item.request_id)
            if verdict is None or item.request_id in failures:
                reason = failures.get(item.request_id, "the executor gave no answer")
                outputs.append(self._finish(state, FinishReason.ERROR, reason))
            else:
                output = self._advance(state, item, verdict)
                if output is not None:
                    outputs.append(output)
        return outputs

    def _advance(self, state: RequestState, item: VerifyItem, verdict: Verdict) -> Output | None:
        known = item.start + item.num_scheduled_tokens
        if item.draft is not None:
            self._drafting.drafted(state, item.draft, verdict.num_proposed)
        verified = state.num_known_tokens + verdict.num_accepted
        for kv in state.kv.values():
            # Roll back: positions of rejected drafts are written over in the next round.
            kv.num_computed_tokens = min(kv.num_computed_tokens, verified)
        state.kv[TARGET].num_computed_tokens = known + verdict.num_accepted
        if not item.samples:
            self.memory.commit(state)
            return None
        state.round += 1
        self.estimators.acceptance.observe(verdict)
        self._selection.observe(state, verdict)
        new_tokens, reason = self._cut(state, verdict.token_ids)
        first = not state.output_token_ids
        state.append(new_tokens)
        self.memory.commit(state)
        self._tenant(state.request.tenant).num_tokens_served += len(new_tokens)
        if reason is not None:
            self._forget(state)
        return Output(
            request_id=state.request.id,
            token_ids=new_tokens,
            finish_reason=reason,
            drafter=verdict.drafter,
            num_proposed=verdict.num_proposed,
            num_accepted=min(verdict.num_accepted, len(new_tokens)),
            num_cached_tokens=state.num_cached_tokens if first else 0,
            logprobs=verdict.logprobs[: len(new_tokens)],
        )

    def _cut(
        self, state: RequestState, token_ids: tuple[int, ...]
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """Tokens up to the first stop token (kept) or to `max_tokens`."""
        kept = token_ids[: state.num_remaining_tokens]
        stops = state.request.stop_token_ids
        if stops and not stops.isdisjoint(kept):
            end = next(i for i, token in enumerate(kept, 1) if token in stops)
            return kept[:end], FinishReason.STOP
        is_last = len(kept) == state.num_remaining_tokens
        return kept, FinishReason.LENGTH if is_last else None

    def _plan_ended(self, request_id: str, plan_id: int) -> None:
        state = self._states.get(request_id)
        if state is not None:
            state.plans.pop(plan_id, None)

    def _end_unanswered(self, order: DraftOrder) -> None:
        """A lane that ended without a draft for an order leaves the request to go on alone."""
        state = self._states.get(order.request_id)
        if state is not None and state.draft_order == order:
            state.draft_order = None
            state.undrafted_round = state.round

    # --- ends -----------------------------------------------------------------------------------

    def _preempt(self, state: RequestState) -> None:
        self.memory.release(state)
        state.epoch = self._next_epoch()
        state.held = None
        state.draft_order = None

    def _finish(
        self, state: RequestState, reason: FinishReason, error: str | None = None
    ) -> Output:
        self._forget(state)
        return Output(state.request.id, finish_reason=reason, error=error)

    def _forget(self, state: RequestState) -> None:
        if state.status is Status.RUNNING:
            self.running.remove(state)
        else:
            self.waiting.remove(state)
        state.status = Status.FINISHED
        self.memory.release(state)
        self.estimators.acceptance.forget(state.request.id)
        if self._new_requests.pop(state.request.id, None) is None:
            self._forgotten.append(state.request.id)
        del self._states[state.request.id]
