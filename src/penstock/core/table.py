"""All mutable scheduling state: requests, drafters, tenants, KV and decode groups.

Policies and estimators keep their own memory besides."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from penstock.core.accounts import Accounts
from penstock.core.groups import DecodeGroup
from penstock.core.kv import BlockPool, SequenceKV, hash_blocks
from penstock.core.queues import WaitingRequests
from penstock.core.state import OPEN, Drafter, DrafterStatus, Grant, RequestState
from penstock.core.types import TARGET, DraftOrder, Request, Status, Tenant


@dataclass(slots=True)
class Counters:
    """Counts that only grow.

    epochs: given out so far; version: of the table, changed by every event and result; ahead:
    tokens that draft servers have sent ahead, and those that were drafts of a verification."""

    requests: int = 0
    epochs: int = 0
    plans: int = 0
    preemptions: int = 0
    version: int = 0
    ahead: int = 0
    ahead_used: int = 0


@dataclass(slots=True)
class ExecutorUpdates:
    """New and forgotten requests, which the executor learns with the next plan."""

    arrived: dict[str, Request] = field(default_factory=dict)
    forgotten: list[str] = field(default_factory=list)

    def pop(self) -> tuple[tuple[Request, ...], tuple[str, ...]]:
        """Return new requests and forgotten ids since the last call."""
        arrived: tuple[Request, ...] = ()
        forgotten: tuple[str, ...] = ()
        if self.arrived:
            arrived, self.arrived = tuple(self.arrived.values()), {}
        if self.forgotten:
            forgotten, self.forgotten = tuple(self.forgotten), []
        return arrived, forgotten


@dataclass(slots=True)
class DueDrafts:
    """Requests whose drafts are due in lanes, and their grants, for one version of the table.

    Lanes that are asked in one turn share the search."""

    version: int
    by_lane: dict[str, list[RequestState]]
    grants: dict[str, Grant] | None = None


@dataclass(slots=True)
class _Deferred:
    pool: BlockPool
    kv: SequenceKV
    readers: set[int]


class KVMemory:
    """Allocates, commits and releases the KV of every model.

    A released block returns to its pool only when every plan in flight that may read or write it
    has ended."""

    def __init__(self, pools: dict[str, BlockPool]) -> None:
        self.pools = pools
        self._deferred: list[_Deferred] = []
        self._released_tables: list[tuple[str, str]] = []

    @property
    def num_deferred_blocks(self) -> int:
        return sum(d.kv.num_blocks for d in self._deferred)

    def release(self, state: RequestState, pool_names: Sequence[str] | None = None) -> None:
        """Release a request's KV, in the named pools or in all."""
        for name in list(state.kv) if pool_names is None else pool_names:
            kv = state.kv.pop(name, None)
            if kv is None:
                continue
            self._released_tables.append((state.request.id, name))
            readers: set[int] = set()
            if state.plans:
                readers = {plan_id for plan_id, pools in state.plans.items() if name in pools}
            if readers:
                self._deferred.append(_Deferred(self.pools[name], kv, readers))
            else:
                kv.give_back(self.pools[name])

    def plan_ended(self, plan_id: int) -> None:
        """Free the blocks that only this plan was still reading."""
        if not self._deferred:
            return
        for deferred in self._deferred:
            deferred.readers.discard(plan_id)
            if not deferred.readers:
                deferred.kv.give_back(deferred.pool)
        self._deferred = [d for d in self._deferred if d.readers]

    def drop_cache(self, pool_name: str) -> None:
        """Forget the prefix cache of a model that has lost its KV."""
        if pool_name in self.pools:
            self.pools[pool_name].drop_cache()

    def take_released_tables(self) -> tuple[tuple[str, str], ...]:
        """Return (request, pool) of tables released since the last call."""
        if not self._released_tables:
            return ()
        released, self._released_tables = tuple(self._released_tables), []
        return released

    def start_from_cache(self, state: RequestState, pool_name: str) -> SequenceKV:
        """Return a drafter's KV of a request, started from the prefix cache when it is new."""
        kv = state.kv_of(pool_name)
        if not kv.blocks and state.block_hashes:
            pool = self.pools[pool_name]
            usable = (state.num_known_tokens - 1) // pool.block_size
            kv.start_from(pool, pool.match(state.block_hashes[:usable]))
        return kv

    def commit(self, state: RequestState) -> None:
        """Offer the request's full, verified blocks to the prefix caches."""
        if not state.block_hashes and state.request.prompt_token_ids is None:
            return
        known = state.num_known_tokens
        for name, kv in state.kv.items():
            pool = self.pools[name]
            if not pool.prefix_caching:
                continue
            full = min(kv.num_computed_tokens, known) // pool.block_size
            if full == kv.num_committed_blocks:
                continue
            if full > len(state.block_hashes):
                self._extend_hashes(state, pool.block_size)
            for i in range(kv.num_committed_blocks, min(full, len(state.block_hashes))):
                pool.commit(kv.blocks[i], state.block_hashes[i])
                kv.num_committed_blocks = i + 1

    def _extend_hashes(self, state: RequestState, block_size: int) -> None:
        """Append hashes of blocks that the output has filled, where the tokens are known.

        A request that came with hashes but no tokens shares its prompt alone."""
        prompt = state.request.prompt_token_ids
        if prompt is None:
            return
        start = len(state.block_hashes) * block_size
        output = state.output_token_ids[max(0, start - len(prompt)) :]
        known = (*prompt[start:], *output)
        parent = state.block_hashes[-1] if state.block_hashes else b""
        state.block_hashes += hash_blocks(known, block_size, state.request.tenant, parent)


class Table:
    """All mutable state.

    requests: unfinished ones, by id, in order of arrival; running: admitted ones, in order of
    admission; solo: those of them outside decode groups. groups: decode groups by key; key_of: keys
    of requests that an admission policy keeps apart, by id. in_flight: ids of unfinished plans.
    replays: orders to read verified text, by request and drafter, with the KV that each extends.
    sent_ahead: the draft server that has got a request's text before a switch. beside: drafters
    that work in lanes, if local ones do or not; cleared when drafters come or go."""

    def __init__(
        self,
        memory: KVMemory,
        drafters: dict[str, Drafter],
        tenants: dict[str, Tenant],
        groups: dict[Hashable, DecodeGroup],
        accounts: Accounts,
        waiting: WaitingRequests,
    ) -> None:
        self.memory = memory
        self.drafters = drafters
        self.beside: dict[bool, frozenset[str]] = {}
        self.tenants = tenants
        self.groups = groups
        self.accounts = accounts
        self.waiting = waiting
        self.requests: dict[str, RequestState] = {}
        self.running: dict[str, RequestState] = {}
        self.solo: dict[str, RequestState] = {}
        self.key_of: dict[str, Hashable] = {}
        self.in_flight: set[int] = set()
        self.replays: dict[tuple[str, str], tuple[DraftOrder, SequenceKV | None]] = {}
        self.sent_ahead: dict[str, str] = {}
        self.due = DueDrafts(-1, {})
        self.updates = ExecutorUpdates()
        self.counters = Counters()

    def tenant(self, name: str) -> Tenant:
        """Return a tenant; an unknown one gets weight 1."""
        tenant = self.tenants.get(name)
        if tenant is None:
            tenant = self.tenants[name] = Tenant(name)
        return tenant

    def reconfigure(self, tenants: Iterable[Tenant]) -> None:
        """Replace the settings of these tenants."""
        self.tenants.update((tenant.name, tenant) for tenant in tenants)
        self.accounts.tenants_changed()

    def drafter_of(self, state: RequestState) -> Drafter | None:
        """Return the request's drafter while it is up and answers."""
        drafter = self.drafters.get(state.drafter) if state.drafter else None
        return drafter if drafter is not None and drafter.status is DrafterStatus.UP else None

    def new_group(self, key: Hashable, state: RequestState) -> DecodeGroup:
        """Add an empty decode group for requests like this one."""
        block_size = self.memory.pools[TARGET].block_size
        group = self.groups[key] = DecodeGroup(
            key,
            block_size,
            is_counted=state.is_counted,
            keeps_accounts=self.accounts.are_kept,
        )
        return group

    # --- requests -------------------------------------------------------------------------------

    def next_epoch(self) -> int:
        """Return a new epoch: late results never match, even where a request id is used again."""
        self.counters.epochs += 1
        return self.counters.epochs

    def arrive(self, state: RequestState) -> None:
        """Let a new request wait."""
        self.counters.requests += 1
        self.requests[state.request.id] = state
        self.tenant(state.request.tenant)
        self.waiting.append(state)
        self.updates.arrived[state.request.id] = state.request

    def admit(self, state: RequestState) -> None:
        """Move a waiting request to the running ones."""
        self.waiting.admit(state)
        state.status = Status.RUNNING
        self.running[state.request.id] = self.solo[state.request.id] = state

    def preempt(self, state: RequestState) -> None:
        """Release a running request's memory and let it wait before all others."""
        self.leave_group(state)
        self.accounts.preempted(state)
        self.memory.release(state)
        state.epoch = self.next_epoch()
        # Its drafter may be full when it comes back.
        state.draft = OPEN
        state.status = Status.PREEMPTED
        del self.running[state.request.id]
        del self.solo[state.request.id]
        self.waiting.appendleft(state)
        state.num_preemptions += 1
        self.counters.preemptions += 1

    def leave_group(self, state: RequestState) -> None:
        """Take a running request out of its decode group."""
        if state.decode_group is not None:
            state.decode_group.leave(state)
            self.solo[state.request.id] = state

    def dissolve(self, group: DecodeGroup) -> None:
        """Take all members out of a group that is in no plan; all alone are in order again."""
        for state in list(group.members.values()):
            self.leave_group(state)
        self.solo = {i: s for i, s in self.running.items() if i in self.solo}

    def release_request(self, state: RequestState) -> None:
        """Remove a request that has ended."""
        request_id = state.request.id
        if state.status is Status.RUNNING:
            del self.running[request_id]
            del self.solo[request_id]
            self.accounts.moved(state, running=-1)
        else:
            self.waiting.remove(state)
        state.status = Status.FINISHED
        self.accounts.release_request(request_id)
        self.key_of.pop(request_id, None)
        self.sent_ahead.pop(request_id, None)
        self.memory.release(state)
        if self.updates.arrived.pop(request_id, None) is None:
            self.updates.forgotten.append(request_id)
        del self.requests[request_id]
