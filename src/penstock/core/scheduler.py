"""The scheduler: apply events, schedule steps, update from results. Synchronous, deterministic."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable

from penstock.core.accounts import Accounts
from penstock.core.blocks import BlockPool, hash_blocks
from penstock.core.cohort import Cohort, CountedState, decode_run, num_later_blocks
from penstock.core.drafting import Drafting
from penstock.core.fairness import Fairness
from penstock.core.items import ItemWriter
from penstock.core.lanes import DraftLanes
from penstock.core.learn import Estimators
from penstock.core.memory import KVMemory
from penstock.core.policies.admission import AdmissionPolicy
from penstock.core.policies.allocation import AllocationPolicy
from penstock.core.policies.pipeline import Pipeline
from penstock.core.policies.pipeline.barrier import Barrier
from penstock.core.policies.selection import SelectionPolicy
from penstock.core.refusal import refusal
from penstock.core.state import OPEN, Drafter, DraftStage, Outcome, RequestState, Tenant
from penstock.core.step import Step, newest
from penstock.core.types import (
    NO_DRAFTER,
    TARGET,
    Arrive,
    Cancel,
    DecodeRun,
    DrafterDown,
    DrafterUp,
    DraftOrder,
    DraftReady,
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
from penstock.core.waiting import WaitingRequests


class Scheduler:
    """Composes admission, selection and allocation over paged KV memory.

    `pool` is the target's KV; `drafters` come with pools of their own, with the same block size.
    A drafter without a lane of its own drafts inside the target's step; for the others `pipeline`
    says when the target waits (default: rounds). `counted`: requests of
    which only lengths are known, and that use no drafter, are advanced together, and steps in
    which nothing else happens are planned at once; it changes no decision. `runs_ahead`: the
    executor begins the next round before it is planned, for which blocks are kept where there are.
    """

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
        estimators: Estimators | None = None,
        counted: bool = False,
        runs_ahead: bool = False,
        fairness: bool = False,
    ) -> None:
        self.pool = pool
        self.max_model_len = max_model_len
        self.estimators = estimators or Estimators()
        self.tenants = {t.name: t for t in tenants}
        self.running: dict[str, RequestState] = {}
        self.num_preemptions = 0
        self._counted = counted
        self._solo: dict[str, RequestState] = {}
        self._cohorts: dict[Hashable, Cohort] = {}
        self._drafters = {d.name: d for d in drafters}
        self._knows_drafters = bool(self._drafters)
        pools = {d.name: d.pool for d in self._drafters.values() if d.pool is not None}
        if any(p.block_size != pool.block_size for p in pools.values()):
            raise ValueError("all models must use the same KV block size")
        self.memory = KVMemory({TARGET: pool, **pools})
        self._states: dict[str, RequestState] = {}
        self._admission = admission
        self._selection = selection
        self._pipeline = pipeline or Barrier(Barrier.Options())
        is_fair = fairness and admission.knows_tenants
        self._drafting = Drafting(
            self._drafters,
            self.memory,
            selection,
            allocation,
            self._pipeline,
            self.estimators,
            self.tenants,
            self.running,
            self._states.values,
            runs_ahead=runs_ahead,
            is_fair=is_fair,
        )
        self._draft_lanes = DraftLanes(
            self._drafters,
            self.memory,
            self._drafting,
            self.estimators,
            self._pipeline,
            self.running,
            self._states.values,
        )
        self._accounts = Accounts(self.tenants, self.estimators, self._cohorts, is_fair=is_fair)
        self._fairness = Fairness(self._accounts, self.estimators) if is_fair else None
        self.waiting = WaitingRequests(
            admission.queue_of,
            self._accounts.queues(lambda: admission.new_queue(self.estimators)),
        )
        self._item_writer = ItemWriter(pool, self._drafting, admission, runs_ahead=runs_ahead)
        self._step = Step(
            pool=pool,
            running=self.running,
            solo=self._solo,
            cohorts=self._cohorts,
            waiting=self.waiting,
            estimators=self.estimators,
            may_run=self._may_run,
            draft_reserve=self._drafting.reserve,
            release=self._preempt,
            leave_cohort=self._leave_cohort,
            accounts=self._accounts,
            choose_victim=newest if self._fairness is None else self._fairness.victim,
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
        return self._draft_lanes.lanes

    @property
    def num_unfinished(self) -> int:
        return len(self._states)

    # --- events ---------------------------------------------------------------------------------

    def apply(self, event: Event, now: float) -> list[Output]:
        """Take in something from outside."""
        self._draft_lanes.invalidate()
        match event:
            case Arrive(request):
                return self._arrive(request, now)
            case Cancel(request_id):
                return self._cancel(request_id)
            case DraftReady(request_id):
                self._draft_lanes.ready(event, self._states.get(request_id), now)
            case DrafterUp():
                self._knows_drafters = True
                self._draft_lanes.up(event)
            case DrafterDown(name):
                self._draft_lanes.down(name)
            case Reconfigure(tenant, weight):
                self._tenant(tenant).weight = weight
                self._accounts.num_changes += 1
        return []

    def _arrive(self, request: Request, now: float) -> list[Output]:
        error = refusal(request, self._states, self.max_model_len, self.pool, self._drafters)
        if error is not None:
            return [Output(request.id, finish_reason=FinishReason.REFUSED, error=error)]
        kind = CountedState if self._can_count(request) else RequestState
        state = kind(request, self._num_requests, self._next_epoch())
        self._num_requests += 1
        self.estimators.traffic.arrived(request, now)
        if request.prompt_token_ids is not None and not state.block_hashes:
            hashes = hash_blocks(request.prompt_token_ids, self.pool.block_size, request.tenant)
            state.block_hashes = list(hashes)
        self._states[request.id] = state
        self._tenant(request.tenant)
        self.waiting.append(state)
        self._new_requests[request.id] = request
        return []

    def _can_count(self, request: Request) -> bool:
        """Whether the request's tokens make no difference to anybody."""
        return (
            self._counted
            and request.prompt_token_ids is None
            and not request.block_hashes
            and not request.stop_token_ids
            and (request.drafter == NO_DRAFTER or not self._drafters)
        )

    def _cancel(self, request_id: str) -> list[Output]:
        state = self._states.get(request_id)
        if state is None:
            return []
        return [self._finish(state, FinishReason.CANCELLED)]

    def _next_epoch(self) -> int:
        """No two lives of a request id share an epoch, so nothing late can be mistaken."""
        self._num_epochs += 1
        return self._num_epochs

    def _tenant(self, name: str) -> Tenant:
        tenant = self.tenants.get(name)
        if tenant is None:
            tenant = self.tenants[name] = Tenant(name)
        return tenant

    # --- schedule -------------------------------------------------------------------------------

    def schedule(self, now: float, lane: str = TARGET) -> StepPlan:
        """Compose the lane's next step. An empty plan means that there is nothing to do now."""
        plan_id = self._num_plans
        items: tuple[VerifyItem, ...] = ()
        orders: tuple[DraftOrder, ...] = ()
        decodes, wake_at, stalled = None, None, None
        if lane == TARGET:
            step = self._target_step(now)
            if step.scheduled:
                items = self._items(step, plan_id)
                if self._drafters:
                    orders = self._drafting.replays(lane, step.scheduled_states, plan_id, now)
            if step.decoding:
                decodes = self._decodes(step, plan_id)
            wake_at, stalled = step.wake_at, step.stalled
        else:
            orders = self._draft_lanes.order(lane, self._admission.draft_budget, plan_id, now)
            if not orders:
                orders = self._drafting.replays(lane, self.running.values(), plan_id, now)
        if items or orders or decodes:
            self._in_flight.add(plan_id)
        self._num_plans += 1
        new_requests: tuple[Request, ...] = ()
        forgotten: tuple[str, ...] = ()
        if self._new_requests:
            new_requests, self._new_requests = tuple(self._new_requests.values()), {}
        if self._forgotten:
            forgotten, self._forgotten = tuple(self._forgotten), []
        return StepPlan(
            plan_id,
            lane,
            now,
            items,
            decodes,
            orders,
            new_requests,
            self.memory.take_released_tables(),
            forgotten,
            wake_at,
            stalled,
        )

    def _target_step(self, now: float) -> Step:
        """Wait for drafts, or let the admission policy choose who runs."""
        step = self._step
        step.begin(now)
        if self._drafters:
            self._drafting.select(self._solo.values(), now)
            self._draft_lanes.invalidate()
        if self._drafters and self._draft_lanes.are_used:
            held, step.wake_at = self._draft_lanes.hold_until(
                now, self._solo.values(), self._has_draft
            )
            if held is not None and held > now:
                step.wake_at = _earlier(held, step.wake_at)
                return step
        self._compose(step)
        return step

    def _compose(self, step: Step) -> None:
        """Let the admission policy choose who runs."""
        woken = step.wake_at
        if self._fairness is None:
            self._admission.compose(step)
        else:
            # A drafter with a lane would wait for a paused request, not the target.
            may_pause = not self._draft_lanes.are_used
            self._fairness.compose(step, self._admission, may_pause=may_pause)
        if step.wake_at is not None or woken is not None:
            step.wake_at = _earlier(step.wake_at, woken)
        self.num_preemptions += step.num_preempted + step.num_displaced
        if self._drafters:
            self._drafting.select(step.scheduled_states, step.now)

    def _items(self, step: Step, plan_id: int) -> tuple[VerifyItem, ...]:
        items = self._item_writer.items(step)
        for s, item in zip(step.scheduled.values(), items, strict=True):
            s.state.in_flight = True
            order = item.draft
            s.state.plans[plan_id] = (TARGET,) if order is None else (TARGET, order.drafter)
        return items

    def _decodes(self, step: Step, plan_id: int) -> DecodeRun:
        repeatable = step.repeatable and not step.scheduled
        return decode_run(step.decoding, self.pool, plan_id, repeatable, step.wake_at)

    def _may_run(self, state: RequestState) -> bool:
        return not state.is_paused and self._has_draft(state) and self._pipeline.joins(state)

    def _has_draft(self, state: RequestState) -> bool:
        """Whether a request waits for nothing but its verification, or its prefill."""
        if state.in_flight or state.draft.stage is DraftStage.ORDERED:
            return False
        if not state.drafter:
            return True
        drafter = self._drafting.drafter_of(state)
        if drafter is None or not self._drafting.is_beside(drafter):
            return True
        is_drafted = state.draft.stage in (DraftStage.HELD, DraftStage.SKIPPED)
        return is_drafted or not state.is_decoding

    # --- results --------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """Take in what a plan came to: advance or roll back, free blocks, feed the estimators."""
        if plan.id not in self._in_flight:
            return []
        self._in_flight.discard(plan.id)
        if result.verdicts or result.failures or result.drafts or plan.decodes:
            self._draft_lanes.invalidate()
        for order in plan.drafts:
            self._plan_ended(order.request_id, plan.id)
        for item in plan.items:
            self._plan_ended(item.request_id, plan.id)
        self.memory.plan_ended(plan.id)
        if self._drafters:
            self.estimators.step_times.observe(result)
        if result.work is not None:
            self.estimators.step_model.observe(result.work, result.work_seconds)
        if plan.drafts or result.drafts or result.failed_drafters:
            self._draft_lanes.ended(plan, result, self._states)
        outputs: list[Output] = []
        if plan.items:
            outputs = self._judge(plan, result)
            if self._drafters:
                self._draft_lanes.stepped(result)
        if plan.decodes is not None:
            outputs += self._advance_cohorts(plan.decodes, result)
        return outputs

    def _judge(self, plan: StepPlan, result: StepResult) -> list[Output]:
        verdicts = {v.request_id: v for v in result.verdicts}
        failures = {f.request_id: f.reason for f in result.failures} if result.failures else {}
        outputs, outcomes = [], []
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
                output = self._advance(state, item, verdict, result.finished_at)
                if output is not None:
                    outputs.append(output)
                    outcomes.append(Outcome(state, verdict))
        self._drafting.observe(outcomes, result.finished_at)
        return outputs

    def _advance(
        self, state: RequestState, item: VerifyItem, verdict: Verdict, now: float
    ) -> Output | None:
        known = item.start + item.num_scheduled_tokens
        if item.draft is not None:
            self._drafting.drafted(state, item.draft, verdict.num_proposed)
        verified = state.num_known_tokens + verdict.num_accepted
        for kv in state.kv.values():
            # Roll back: positions of rejected drafts are written over in the next round.
            kv.num_computed_tokens = min(kv.num_computed_tokens, verified)
        state.kv[TARGET].num_computed_tokens = known + verdict.num_accepted
        if not item.samples:
            if state.block_hashes or state.request.prompt_token_ids is not None:
                self.memory.commit(state)
            return None
        if self._accounts.are_kept and item.num_scheduled_tokens == 1 and state.num_output_tokens:
            self._accounts.charge_decode(state, known, verdict.num_proposed)
        state.next_round()
        self.estimators.acceptance.observe(verdict)
        new_tokens, reason = self._cut(state, verdict.token_ids)
        first = not state.num_output_tokens
        if first:
            state.first_token_at = now
        num_new = len(new_tokens)
        if isinstance(state, CountedState):
            state.append_counted(num_new)
            # Those too that it had made in a cohort before it was preempted.
            num_new = state.num_output_tokens - state.num_announced
            state.num_announced += num_new
        else:
            state.append(new_tokens)
            self.memory.commit(state)
        if reason is not None:
            self.estimators.lengths.ended(state.num_output_tokens)
            self._forget(state)
        return Output(
            state.request.id,
            new_tokens,
            num_new,
            reason,
            None,
            verdict.drafter,
            verdict.num_proposed,
            min(verdict.num_accepted, num_new),
            state.num_cached_tokens if first else 0,
            verdict.logprobs[:num_new],
        )

    def _advance_cohorts(self, run: DecodeRun, result: StepResult) -> list[Output]:
        """Give the members their tokens. Only those that have ended have something to tell."""
        outputs = []
        cohorts = [self._cohorts[group] for group in run.groups]
        if result.repeats > 1:
            self.pool.count(num_later_blocks(cohorts, result.repeats))
        for cohort in cohorts:
            cohort.plan_id = None
            left = cohort.advance(result.repeats)
            if len(left) > 1:
                # In the order of admission, as they would end one by one.
                ids = {state.request.id: state for state in left}
                left = [ids[i] for i in self.running if i in ids]
            for state in left:
                self._solo[state.request.id] = state
                num_output = state.num_output_tokens
                if num_output == state.request.max_tokens:
                    self.estimators.lengths.ended(num_output)
                    outputs.append(self._finish(state, FinishReason.LENGTH))
        return outputs

    def _cut(
        self, state: RequestState, token_ids: tuple[int, ...]
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """Tokens up to the first stop token (kept) or to `max_tokens`."""
        most = state.num_remaining_tokens
        kept = token_ids[:most]
        stops = state.request.stop_token_ids
        if stops and not stops.isdisjoint(kept):
            end = next(i for i, token in enumerate(kept, 1) if token in stops)
            return kept[:end], FinishReason.STOP
        return kept, FinishReason.LENGTH if len(kept) == most else None

    def _plan_ended(self, request_id: str, plan_id: int) -> None:
        state = self._states.get(request_id)
        if state is not None:
            state.plans.pop(plan_id, None)

    # --- ends -----------------------------------------------------------------------------------

    def _preempt(self, state: RequestState) -> None:
        self._leave_cohort(state)
        state.num_charged_tokens = max(state.num_charged_tokens, state.num_computed_tokens)
        self.memory.release(state)
        state.epoch = self._next_epoch()
        # Its drafter may be full when it comes back.
        state.draft = OPEN

    def _finish(
        self, state: RequestState, reason: FinishReason, error: str | None = None
    ) -> Output:
        num_tokens = 0
        if isinstance(state, CountedState):
            self._leave_cohort(state)
            num_tokens = state.num_output_tokens - state.num_announced
        self._forget(state)
        return Output(state.request.id, (), num_tokens, reason, error)

    def _leave_cohort(self, state: RequestState) -> None:
        if isinstance(state, CountedState) and state.cohort is not None:
            state.cohort.leave(state)
            self._solo[state.request.id] = state

    def _forget(self, state: RequestState) -> None:
        if state.status is Status.RUNNING:
            del self.running[state.request.id]
            del self._solo[state.request.id]
            self._accounts.moved(state, running=-1)
        else:
            self.waiting.remove(state)
        state.status = Status.FINISHED
        self.memory.release(state)
        if self._knows_drafters:
            self.estimators.acceptance.forget(state.request.id)
            self._selection.forget(state.request.id)
        if self._new_requests.pop(state.request.id, None) is None:
            self._forgotten.append(state.request.id)
        del self._states[state.request.id]


def _earlier(a: float | None, b: float | None) -> float | None:
    """The earlier of two times; None and infinity are never."""
    earliest = min(math.inf if a is None else a, math.inf if b is None else b)
    return None if earliest == math.inf else earliest
