"""Select a drafter, allocate draft lengths, and write the draft orders of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from penstock.core.learn import Estimators
from penstock.core.memory import KVMemory
from penstock.core.policies.allocation import AllocationPolicy, Grant
from penstock.core.policies.pipeline import Pipeline
from penstock.core.policies.selection import ReplayWish, SelectionPolicy, usable
from penstock.core.state import (
    CHOSEN,
    Drafter,
    DraftStage,
    Outcome,
    RequestState,
    SequenceKV,
    Tenant,
)
from penstock.core.types import AUTO_DRAFTER, NO_DRAFTER, TARGET, DraftOrder, Replayed
from penstock.core.view import NO_ROOM, DraftCandidate, Loads, Room, View

_Read = tuple[int, int, tuple[int, ...]]
"""Of a catch-up: its first position, its tokens, and the blocks that are new to the executor."""


class Drafting:
    """The drafting half of the scheduler."""

    def __init__(
        self,
        drafters: dict[str, Drafter],
        memory: KVMemory,
        selection: SelectionPolicy,
        allocation: AllocationPolicy,
        pipeline: Pipeline,
        estimators: Estimators,
        tenants: Mapping[str, Tenant],
        running: Mapping[str, RequestState],
        live_states: Callable[[], Iterable[RequestState]],
        *,
        runs_ahead: bool = False,
        is_fair: bool = False,
    ) -> None:
        self._runs_ahead = runs_ahead
        self._is_fair = is_fair
        self.drafters = drafters
        self._memory = memory
        self._selection = selection
        self._allocation = allocation
        self._pipeline = pipeline
        self._estimators = estimators
        self._tenants = tenants
        self._running = running
        self._live_states = live_states
        self._replaying: dict[tuple[str, str], tuple[DraftOrder, SequenceKV | None]] = {}
        """Replays in flight by request and drafter, with the KV that each one extends."""

    def is_beside(self, drafter: Drafter) -> bool:
        """Whether it works beside the target, in a lane, and not inside the target's step."""
        return drafter.remote or (drafter.has_lane and self._pipeline.drafts_beside)

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
            if state.draft.stage is not DraftStage.OPEN:
                continue
            state.draft = CHOSEN
            wanted = state.request.drafter
            if wanted == NO_DRAFTER or not self.drafters or state.request.max_draft_tokens == 0:
                state.drafter = None
            elif wanted != AUTO_DRAFTER:
                state.drafter = wanted if self._is_open(wanted, state) else None
            else:
                free.append(state)
        if free:
            self._choose(free, now)

    def _choose(self, states: list[RequestState], now: float) -> None:
        """Ask the policy, once for all requests to which the same drafters are open."""
        limited = [d for d in self.drafters.values() if d.is_limited]
        if not limited and not any(d.remote for d in self.drafters.values()):
            self._ask(states, self.view(self.drafters, now))
            return
        alike: dict[tuple[str, tuple[str, ...]], list[RequestState]] = {}
        for state in states:
            closed = tuple([d.name for d in limited if not d.can_read(state)])
            alike.setdefault((state.request.tenant, closed), []).append(state)
        for (name, closed), own in alike.items():
            tenant = self._tenants[name]
            open_to = {
                n: d
                for n, d in self.drafters.items()
                if d.takes_assignments and d.may_see(tenant) and n not in closed
            }
            self._ask(own, self.view(open_to, now))

    def view(self, drafters: Mapping[str, Drafter], now: float, room: Room = NO_ROOM) -> View:
        """The moment, as far as these drafters go."""
        return View(
            drafters,
            self._estimators,
            now,
            Loads(self._running),
            self._tenants,
            frozenset(n for n, d in self.drafters.items() if self.is_beside(d)),
            room,
            self._is_fair,
        )

    def _is_open(self, drafter: str, state: RequestState) -> bool:
        """A request cannot take its prompt where its tenant's may not go, even by name; nor to
        where it cannot be read."""
        known = self.drafters.get(drafter)
        if known is None or not known.may_see(self._tenants[state.request.tenant]):
            return False
        return known.can_read(state)

    def _ask(self, states: list[RequestState], view: View) -> None:
        chosen = self._selection.select(states, view)
        for state in states:
            state.drafter = chosen[state.request.id]

    def observe(self, outcomes: Sequence[Outcome], now: float) -> None:
        """Tell the policies what a target step came to."""
        self._allocation.observe(outcomes, now)
        if self.drafters:
            self._selection.observe(outcomes, self.view(self.drafters, now))

    def reserve(self, state: RequestState) -> int:
        """Draft positions that admission keeps free for a running request."""
        if state.draft.stage is DraftStage.HELD:
            return state.draft.num_draft_tokens
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
        room = Room(max(0, budget), num_rows, num_sampled)
        grants = self._allocation.allocate(candidates, self.view(self.drafters, now, room))
        return {c.state.request.id: g for c, g in zip(candidates, grants, strict=True)}

    def order(self, state: RequestState, num_known: int, grant: Grant) -> DraftOrder | None:
        """Order a catch-up to `num_known` known tokens and what was granted, or None where
        there is nothing to do or no memory for it: a draft is never worth a preemption."""
        drafter = self.drafter_of(state)
        if drafter is None:
            return None
        length = grant.num_draft_tokens
        if drafter.pool is None:
            read: _Read | None = (num_known, 0, ()) if length else None
        else:
            read = self._read(state, drafter, num_known, length)
        if read is None:
            return None
        start, num_catch_up, new_blocks = read
        return DraftOrder(
            state.request.id,
            state.epoch,
            state.round,
            drafter.name,
            start,
            num_catch_up,
            length,
            new_blocks,
            grant.min_survival,
        )

    def _read(
        self, state: RequestState, drafter: Drafter, num_known: int, length: int, evict: bool = True
    ) -> _Read | None:
        """Start, tokens and new blocks of a catch-up to `num_known` tokens, with room for `length`
        draft tokens behind it, and for the next round's if the executor runs ahead and memory
        allows it; None where there is nothing to read or no memory for it."""
        pool = drafter.pool
        assert pool is not None
        is_new = drafter.name not in state.kv
        kv = self._memory.start_from_cache(state, drafter.name)
        num_catch_up = num_known - kv.num_computed_tokens
        missing = pool.blocks_for(num_known + max(length - 1, 0)) - len(kv.blocks)
        has_room = missing <= 0 or pool.can_allocate(missing)
        if not has_room and evict:
            has_room = self._make_room(drafter, missing, state)
        if num_catch_up <= 0 or not has_room:
            if is_new:
                # The executor has not heard of this table.
                self._memory.release(state, [drafter.name])
            return None
        if self._runs_ahead and length:
            with_next_round = pool.blocks_for(num_known + 2 * length) - len(kv.blocks)
            if pool.can_allocate(with_next_round + len(self._running)):
                missing = with_next_round
        new_blocks = kv.grow(pool, missing) if missing > 0 else []
        return (
            kv.num_computed_tokens,
            num_catch_up,
            tuple(kv.blocks if is_new else new_blocks),
        )

    def drafted(self, state: RequestState, order: DraftOrder, num_proposed: int) -> None:
        """Note what the drafter's KV holds after an order was carried out."""
        kv = state.kv.get(order.drafter)
        if kv is not None:
            computed = order.start + order.num_catch_up_tokens + max(num_proposed - 1, 0)
            kv.num_computed_tokens = computed

    # --- replays --------------------------------------------------------------------------------

    def replays(
        self, lane: str, states: Iterable[RequestState], plan_id: int, now: float
    ) -> tuple[DraftOrder, ...]:
        """Orders for what the policy would like to have read by the drafters of a lane, those that
        draft inside the step in the target's, and the most important first. They take only memory
        that is free, and are registered with the plan."""
        if not self._selection.has_wishes:
            return ()
        drafters = {
            n: d
            for n, d in usable(self.drafters).items()
            if not d.remote and lane == (n if self.is_beside(d) else TARGET)
        }
        if not drafters:
            return ()
        free = [s for s in states if s.is_decoding and s.request.drafter == AUTO_DRAFTER]
        local = {n: d for n, d in self.drafters.items() if not d.remote}
        wishes = self._selection.replays(free, self.view(local, now)) if free else []
        orders = []
        for wish in wishes:
            drafter = drafters.get(wish.drafter)
            order = None if drafter is None else self._replay(wish, drafter)
            if order is not None:
                state = wish.state
                state.plans[plan_id] = (*state.plans.get(plan_id, ()), wish.drafter)
                orders.append(order)
        return tuple(orders)

    def _replay(self, wish: ReplayWish, drafter: Drafter) -> DraftOrder | None:
        """None where it has nothing to read, or cannot, or is at work on the request already."""
        state, name = wish.state, drafter.name
        if any(name in pools for pools in state.plans.values()) or not drafter.can_read(state):
            return None
        num_known = state.num_known_tokens
        if drafter.pool is None:
            read: _Read | None = (num_known, 0, ()) if wish.evaluate else None
        else:
            read = self._read(state, drafter, num_known, 0, evict=False)
        if read is None:
            return None
        start, num_catch_up, new_blocks = read
        order = DraftOrder(
            state.request.id,
            state.epoch,
            state.round,
            name,
            start,
            num_catch_up,
            0,
            new_blocks,
            evaluate=wish.evaluate,
        )
        self._replaying[state.request.id, name] = (order, state.kv.get(name))
        return order

    def end_replays(
        self,
        orders: Iterable[DraftOrder],
        replays: Iterable[Replayed],
        states: Mapping[str, RequestState],
    ) -> None:
        """Take in what the replays of a plan came to; those without an answer have failed."""
        answers = {(r.request_id, r.drafter): r for r in replays}
        for order in orders:
            key = (order.request_id, order.drafter)
            if order.max_draft_tokens or self._replaying.get(key, (None,))[0] is not order:
                continue
            _, kv = self._replaying.pop(key)
            state, answer = states.get(order.request_id), answers.get(key)
            if state is None or state.epoch != order.epoch or answer is None:
                continue
            if state.kv.get(order.drafter) is kv:
                self.drafted(state, order, 0)
            self._selection.replayed(state, answer)

    # --- memory ---------------------------------------------------------------------------------

    def _limit(self, state: RequestState, drafter: Drafter) -> int:
        """Most draft tokens that could still be of use: the target adds one token itself. The
        drafter reads all of its draft but the last token."""
        limit = min(state.num_remaining_tokens - 1, drafter.max_draft_tokens)
        if drafter.max_len is not None:
            limit = max(0, min(limit, drafter.max_len - state.num_known_tokens + 1))
        wanted = state.request.max_draft_tokens
        return limit if wanted is None else max(0, min(limit, wanted))

    def _make_room(self, drafter: Drafter, num_blocks: int, keep: RequestState) -> bool:
        """A drafter's KV is only a cache: take it from requests that now draft with another, or
        not at all. Their tables are dropped; they catch up if they come back."""
        pool = drafter.pool
        assert pool is not None
        for state in self._live_states():
            if state is not keep and state.drafter != drafter.name:
                self._memory.release(state, [drafter.name])
            if pool.can_allocate(num_blocks):
                return True
        return False
