"""Drafters that work beside the target: orders that are out, drafts that are held, deadlines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from penstock.core.drafting import Drafting
from penstock.core.learn import Estimators
from penstock.core.memory import KVMemory
from penstock.core.policies.allocation import Grant
from penstock.core.policies.pipeline import Pipeline
from penstock.core.state import SKIPPED, Drafter, DraftRound, DraftStage, RequestState
from penstock.core.types import TARGET, DrafterUp, DraftOrder, DraftReady, StepPlan, StepResult


class DraftLanes:
    """The rounds of every request that drafts in a lane of its own: due, ordered, held or, where
    no draft came, undrafted; then the target verifies, and the next round begins."""

    def __init__(
        self,
        drafters: dict[str, Drafter],
        memory: KVMemory,
        drafting: Drafting,
        estimators: Estimators,
        pipeline: Pipeline,
        running: Mapping[str, RequestState],
        live_states: Callable[[], Iterable[RequestState]],
    ) -> None:
        self._drafters = drafters
        self._memory = memory
        self._drafting = drafting
        self._estimators = estimators
        self._pipeline = pipeline
        self._running = running
        self._live_states = live_states
        self._has_local = any(d.has_lane for d in drafters.values())
        self.lanes: tuple[str, ...] = ()
        """Drafters' lanes, in the order in which they came, and the target's after them, so that a
        draft can start before the next verification."""
        self._note_lanes()
        self._due: dict[str, list[RequestState]] | None = None
        self._grants: dict[str, Grant] | None = None

    @property
    def are_used(self) -> bool:
        """Whether anybody may draft beside the target, or may still do so."""
        return self._has_local or len(self.lanes) > 1

    def invalidate(self) -> None:
        """Something has happened: what was found due, and allocated, is out of date."""
        self._due = self._grants = None

    def stepped(self, result: StepResult) -> None:
        """A target step has ended: the pipeline may have the next ones done in another way."""
        view = self._drafting.view(self._drafters, result.finished_at)
        self._pipeline.stepped(self._running.values(), view, result)
        self._note_lanes()

    def _note_lanes(self) -> None:
        beside = (d.name for d in self._drafters.values() if self._drafting.is_beside(d))
        self.lanes = (*beside, TARGET)

    # --- drafters come and go -------------------------------------------------------------------

    def up(self, event: DrafterUp) -> None:
        """A known drafter is back, or a draft server has come."""
        drafter = self._drafters.get(event.drafter)
        if drafter is None:
            drafter = self._drafters[event.drafter] = Drafter(event.drafter, remote=True)
            self._note_lanes()
        if drafter.remote:
            drafter.max_draft_tokens, drafter.tenant = event.max_draft_tokens, event.tenant
            drafter.takes_assignments = event.takes_assignments
        drafter.up, drafter.silent = True, False

    def down(self, name: str) -> None:
        """Its KV and its drafts are gone; its requests finish their round without them, so that a
        late draft cannot answer a new order after it has come back."""
        drafter = self._drafters.get(name)
        if drafter is None:
            return
        drafter.up = False
        for state in self._live_states():
            if state.drafter == name and state.draft.stage in (DraftStage.ORDERED, DraftStage.HELD):
                state.draft = SKIPPED
            self._memory.release(state, [name])
        self._memory.drop_cache(name)
        if drafter.remote:
            del self._drafters[name]
            self._note_lanes()
            self._estimators.links.forget(name)

    # --- orders ---------------------------------------------------------------------------------

    def order(
        self, lane: str, budget: Callable[[int], int], plan_id: int, now: float
    ) -> tuple[DraftOrder, ...]:
        """Orders for every request of a lane whose next draft is due. `budget`: draft positions
        that may join so many others in a step; all requests that speculate share them."""
        waiting = self._find_due(now).get(lane, [])
        drafter = self._drafters.get(lane)
        if not waiting or drafter is None:
            return ()
        due = self._pipeline.next_drafts(lane, waiting)
        taken = {s.request.id for s in due}
        self._find_due(now)[lane] = [s for s in waiting if s.request.id not in taken]
        grants = self._allocate(budget, now)
        orders = []
        for state in due:
            order = self._write(state, drafter, grants.get(state.request.id, Grant(0)), now)
            if order is None:
                state.draft = SKIPPED
                continue
            state.draft = DraftRound(DraftStage.ORDERED, order, now)
            if not drafter.remote:
                state.plans[plan_id] = (lane,)
            orders.append(order)
        return tuple(orders)

    def _find_due(self, now: float) -> dict[str, list[RequestState]]:
        """By lane; lanes that are asked in one turn share the search."""
        if self._due is None:
            self._drafting.select(self._running.values(), now)
            self._due = {}
            beside = self._divide()
            for state in beside:
                if _is_due(state) and state.drafter is not None:
                    self._due.setdefault(state.drafter, []).append(state)
        return self._due

    def _divide(self) -> list[RequestState]:
        """Who drafts in a lane."""
        beside = [s for s in self._running.values() if s.is_decoding and self._beside(s)]
        self._pipeline.divide(beside)
        return beside

    def _beside(self, state: RequestState) -> bool:
        drafter = self._drafting.drafter_of(state)
        return drafter is not None and self._drafting.is_beside(drafter)

    def _allocate(self, budget: Callable[[int], int], now: float) -> dict[str, Grant]:
        """Grants of all requests that speculate: lanes that are asked in one turn share them."""
        if self._grants is None:
            states = [s for s in self._running.values() if s.is_decoding and self._beside(s)]
            num = len(states)
            self._grants = self._drafting.allocate(states, budget(num), num, num, now)
        return self._grants

    def _write(
        self, state: RequestState, drafter: Drafter, grant: Grant, now: float
    ) -> DraftOrder | None:
        if not grant.num_draft_tokens:
            return None
        order = self._drafting.order(state, state.num_known_tokens, grant)
        if order is None or not drafter.remote:
            return order
        patience = self._estimators.links.patience(drafter.name, order.max_draft_tokens)
        return order._replace(deadline=now + patience)

    # --- answers --------------------------------------------------------------------------------

    def ended(self, plan: StepPlan, result: StepResult, states: Mapping[str, RequestState]) -> None:
        """Take in what became of a plan's own orders, and of drafters that failed in its step."""
        if result.failed_drafters:
            self._lose(plan, result.failed_drafters, states)
        self._drafting.end_replays(plan.drafts, result.replays, states)
        for ready in result.drafts:
            self.ready(ready, states.get(ready.request_id), result.finished_at)
        failed = {f.request_id for f in result.failures}
        for order in plan.drafts:
            state = states.get(order.request_id)
            self.end_unanswered(order, state, has_failed=order.request_id in failed)

    def _lose(
        self, plan: StepPlan, drafters: Collection[str], states: Mapping[str, RequestState]
    ) -> None:
        """Nothing is known of the KV that these drafters were to read in a target step."""
        for order in (*plan.drafts, *(i.draft for i in plan.items if i.draft is not None)):
            state = states.get(order.request_id)
            if order.drafter in drafters and state is not None and state.epoch == order.epoch:
                self._memory.release(state, [order.drafter])

    def ready(self, event: DraftReady, state: RequestState | None, now: float) -> None:
        """Hold a draft, once: whatever is late, repeated or of an old epoch is ignored, but shows
        that its drafter lives."""
        drafter = self._drafters.get(event.drafter)
        if drafter is not None:
            drafter.silent = False
        if state is None or (event.epoch, event.round) != (state.epoch, state.round):
            return
        order, ordered_at = state.draft.order, state.draft.ordered_at
        if order is None or order.drafter != event.drafter:
            return
        num_draft_tokens = max(0, min(event.num_draft_tokens, order.max_draft_tokens))
        self._estimators.links.observe(event.drafter, num_draft_tokens, now - ordered_at)
        self._drafting.drafted(state, order, num_draft_tokens)
        held = DraftRound(DraftStage.HELD, num_draft_tokens=num_draft_tokens)
        state.draft = held if num_draft_tokens else SKIPPED

    def end_unanswered(
        self, order: DraftOrder, state: RequestState | None, *, has_failed: bool
    ) -> None:
        """A lane that ended without a draft for an order leaves the request to go on alone; a draft
        server answers later. Where it failed, nothing is known of its KV."""
        drafter = self._drafters.get(order.drafter)
        if drafter is not None and drafter.remote:
            return
        if has_failed and state is not None and state.epoch == order.epoch:
            self._memory.release(state, [order.drafter])
        if state is not None and state.draft.order == order:
            state.draft = SKIPPED

    def expire(self, now: float) -> None:
        """Give up what is overdue. A draft server that misses a deadline gets no more orders until
        it is heard from, so that it delays the others once and not in every round."""
        for state in self._running.values():
            order = state.draft.order
            if order is not None and order.deadline is not None and order.deadline <= now:
                self._drafters[order.drafter].silent = True
        for state in self._running.values():
            order = state.draft.order
            if order is not None and self._drafters[order.drafter].silent:
                state.draft = SKIPPED

    def hold_until(
        self, now: float, states: Iterable[RequestState], may_run: Callable[[RequestState], bool]
    ) -> tuple[float | None, float | None]:
        """Until when the target waits for drafts (None: not at all), and when the first deadline
        of a draft is. Who is not held back joins by `joins`."""
        self.expire(now)
        self._divide()
        pending = [s for s in self._running.values() if s.draft.order is not None]
        ready = [s for s in states if s.is_decoding and may_run(s)]
        held = self._pipeline.hold_until(ready, pending, self._drafting.view(self._drafters, now))
        deadlines = [s.draft.order.deadline for s in pending if s.draft.order is not None]
        return held, min((d for d in deadlines if d is not None), default=None)


def _is_due(state: RequestState) -> bool:
    return state.is_decoding and not state.in_flight and state.draft.stage is DraftStage.CHOSEN
