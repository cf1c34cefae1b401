"""Select a drafter, allocate draft lengths, and write the draft orders of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from penstock.core.allocation import AllocationPolicy, DraftCandidate, Grant, StepWork
from penstock.core.estimators import Estimators
from penstock.core.memory import KVMemory
from penstock.core.selection import SelectionPolicy
from penstock.core.state import Drafter, RequestState, Tenant
from penstock.core.types import AUTO_DRAFTER, NO_DRAFTER, DraftOrder


class Drafting:
    """The drafting half of the scheduler."""

    def __init__(
        self,
        drafters: dict[str, Drafter],
        memory: KVMemory,
        selection: SelectionPolicy,
        allocation: AllocationPolicy,
        estimators: Estimators,
        tenants: Mapping[str, Tenant],
        live_states: Callable[[], Iterable[RequestState]],
    ) -> None:
        self.drafters = drafters
        self._memory = memory
        self._selection = selection
        self._allocation = allocation
        self._estimators = estimators
        self._tenants = tenants
        self._live_states = live_states

    def drafter_of(self, state: RequestState) -> Drafter | None:
        """The request's drafter while it is up and answers."""
        drafter = self.drafters.get(state.drafter) if state.drafter else None
        return drafter if drafter is not None and drafter.up and not drafter.silent else None

    def select(self, states: Iterable[RequestState], now: float) -> None:
        """Give every request its drafter, once a round: the one that it names, or the policy's
        choice. Lanes that asked again could each be told of another."""
        if not self.drafters:
            return
        free = []
        for state in states:
            if state.selected_round == state.round:
                continue
            state.selected_round = state.round
            wanted = state.request.drafter
            if wanted == NO_DRAFTER or not self.drafters or state.request.max_draft_tokens == 0:
                state.drafter = None
            elif wanted != AUTO_DRAFTER:
                state.drafter = wanted if self._may_see(wanted, state) else None
            else:
                free.append(state)
        if free:
            self._choose(free, now)

    def _choose(self, states: list[RequestState], now: float) -> None:
        """Ask the policy, once for all requests to which the same drafters are open."""
        if not any(d.remote for d in self.drafters.values()):
            self._ask(states, self.drafters, now)
            return
        loads = Counter(s.drafter for s in self._live_states())
        for drafter in self.drafters.values():
            drafter.num_requests = loads[drafter.name]
        by_tenant: dict[str, list[RequestState]] = {}
        for state in states:
            by_tenant.setdefault(state.request.tenant, []).append(state)
        for name, own in by_tenant.items():
            tenant = self._tenants[name]
            open_to = {
                n: d for n, d in self.drafters.items() if d.takes_assignments and d.may_see(tenant)
            }
            self._ask(own, open_to, now)

    def _may_see(self, drafter: str, state: RequestState) -> bool:
        """A request cannot take its prompt where its tenant's may not go, even by name."""
        known = self.drafters.get(drafter)
        return known is not None and known.may_see(self._tenants[state.request.tenant])

    def _ask(self, states: list[RequestState], drafters: Mapping[str, Drafter], now: float) -> None:
        chosen = self._selection.select(states, drafters, now)
        for state in states:
            state.drafter = chosen[state.request.id]

    def reserve(self, state: RequestState) -> int:
        """Draft positions that admission keeps free for a running request."""
        if state.held is not None:
            return state.held.num_draft_tokens
        drafter = self.drafter_of(state)
        if drafter is None or not state.is_decoding:
            return 0
        return min(self._allocation.reserve(state), self._limit(state, drafter))

    def allocate(
        self,
        states: Iterable[RequestState],
        budget: int,
        num_rows: int,
        num_sampled: int,
        now: float,
    ) -> dict[str, Grant]:
        """Grants by request id; a request that may not draft is left out."""
        candidates = []
        for state in states:
            drafter = self.drafter_of(state)
            if drafter is None or not state.is_decoding:
                continue
            candidates.append(DraftCandidate(state, drafter.name, self._limit(state, drafter)))
        if not candidates:
            return {}
        work = StepWork(max(0, budget), num_rows, num_sampled, self._estimators, now, self._tenants)
        grants = self._allocation.allocate(candidates, work)
        return {c.state.request.id: g for c, g in zip(candidates, grants, strict=True)}

    def order(self, state: RequestState, num_known: int, grant: Grant) -> DraftOrder | None:
        """Order a catch-up to `num_known` known tokens and what was granted, or None where
        there is nothing to do or no memory for it: a draft is never worth a preemption."""
        drafter = self.drafter_of(state)
        if drafter is None:
            return None
        length = grant.num_draft_tokens
        if drafter.pool is None:
            start, num_catch_up = num_known, 0
            new_blocks: list[int] = []
            if length == 0:
                return None
        else:
            is_new = drafter.name not in state.kv
            kv = self._memory.start_from_cache(state, drafter.name)
            start = kv.num_computed_tokens
            num_catch_up = num_known - start
            missing = drafter.pool.blocks_for(num_known + max(length - 1, 0)) - len(kv.blocks)
            has_room = missing <= 0 or self._make_room(drafter, missing, state)
            if num_catch_up <= 0 or not has_room:
                if is_new:
                    # The executor has not heard of this table.
                    self._memory.release(state, [drafter.name])
                return None
            new_blocks = drafter.pool.allocate(missing) if missing > 0 else []
            kv.blocks += new_blocks
            new_blocks = kv.blocks[:] if is_new else new_blocks
        return DraftOrder(
            state.request.id,
            state.epoch,
            state.round,
            drafter.name,
            start,
            num_catch_up,
            length,
            tuple(new_blocks),
            grant.min_survival,
        )

    def drafted(self, state: RequestState, order: DraftOrder, num_proposed: int) -> None:
        """Note what the drafter's KV holds after an order was carried out."""
        kv = state.kv.get(order.drafter)
        if kv is not None:
            computed = order.start + order.num_catch_up_tokens + max(num_proposed - 1, 0)
            kv.num_computed_tokens = computed

    def _limit(self, state: RequestState, drafter: Drafter) -> int:
        """Most draft tokens that could still be of use: the target adds one token itself."""
        limit = min(state.num_remaining_tokens - 1, drafter.max_draft_tokens)
        wanted = state.request.max_draft_tokens
        return limit if wanted is None else max(0, min(limit, wanted))

    def _make_room(self, drafter: Drafter, num_blocks: int, keep: RequestState) -> bool:
        """A drafter's KV is only a cache: take it from requests that now draft with another, or
        not at all. Their tables are dropped; they catch up if they come back."""
        pool = drafter.pool
        assert pool is not None
        if pool.can_allocate(num_blocks):
            return True
        for state in self._live_states():
            if state is not keep and state.drafter != drafter.name:
                self._memory.release(state, [drafter.name])
            if pool.can_allocate(num_blocks):
                return True
        return False
