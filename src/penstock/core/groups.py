"""Decoding requests advanced together.

A group counts steps for all members at once, at constant cost where only lengths are known. Of
texts, blocks and tokens are known one by one: an executor keeps rows of the members, in their
order, and is told of changes only. Decisions equal those for single requests: tests compare."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import numpy as np
import numpy.typing as npt

from penstock.core.kv import BlockPool
from penstock.core.state import RequestState
from penstock.core.types import TARGET, DecodeRun, GroupChange, GroupTokens, Output

_NO_CHANGE = GroupChange()
_new_tuple = tuple.__new__
"""Without the frame of a named tuple's own constructor, for hundreds in every step."""
_REST = [repeat(value) for value in Output("", (), 1)[2:]]


@dataclass(slots=True)
class _Decoded:
    """A tenant's uncharged tokens in a group, and its members' context at tick `tick`."""

    tick: int
    num: int = 0
    kv_tokens: int = 0
    num_rows: int = 0
    num_kv_tokens: int = 0

    def advance(self, tick: int) -> None:
        ticks = tick - self.tick
        if not ticks:
            return
        self.num_rows += ticks * self.num
        growth = self.num * ticks * (ticks + 1) // 2
        self.num_kv_tokens += ticks * self.kv_tokens + growth
        self.kv_tokens += ticks * self.num
        self.tick = tick


class DecodeGroup:
    """Requests that decode one token each in every step of the group.

    is_counted: only their lengths are known."""

    def __init__(
        self, key: Hashable, block_size: int, *, is_counted: bool, keeps_accounts: bool = False
    ) -> None:
        self.key = key
        self.is_counted = is_counted
        self._keeps_accounts = keeps_accounts
        self.ticks = 0
        self.num_kv_tokens = 0
        """Positions whose KV the target holds for the members."""
        self.members: dict[str, RequestState] = {}
        self.plan_id: int | None = None
        # Known and output tokens of each member, extrapolated to tick 0.
        self._origins: dict[str, tuple[int, int]] = {}
        self._block_size = block_size
        # Members by the tick phase at which they begin a block.
        self._phases: list[dict[str, RequestState]] = [{} for _ in range(block_size)]
        self._leaving: list[tuple[int, int, RequestState]] = []
        self._by_tenant: dict[str, _Decoded] = {}
        # What the executor was not told of members with texts.
        self._left: list[str] = []
        self._joined: dict[str, None] = {}
        self._new_blocks: dict[str, int] = {}
        # Their ids and texts; None after a change.
        self._rows: tuple[tuple[str, ...], list[list[int]]] | None = None
        self._planned: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.members)

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output tokens of all members."""
        return self.num_kv_tokens + len(self.members)

    def join(self, state: RequestState) -> None:
        """Add a decoding request that is in no plan."""
        request_id, computed = state.request.id, state.num_computed_tokens
        self.num_kv_tokens += computed
        self._phase(computed)[request_id] = state
        num_output, until = state.num_output_tokens, state.until
        left = state.request.max_tokens - num_output
        if until is not None and num_output < until:
            left = min(left, until - num_output)
        self._origins[request_id] = (computed + 1 - self.ticks, num_output - self.ticks)
        state.leaves_at = self.ticks + left
        state.enter(self)
        self.members[request_id] = state
        if self._keeps_accounts:
            self._count(state.request.tenant, 1, computed)
        heapq.heappush(self._leaving, (state.leaves_at, state.order, state))
        if not self.is_counted:
            self._joined[request_id] = None
            self._rows = None

    def _phase(self, num_computed_tokens: int) -> dict[str, RequestState]:
        """Return the members that begin a block together with one of so many computed tokens."""
        return self._phases[(num_computed_tokens - self.ticks) % self._block_size]

    def leave(self, state: RequestState) -> None:
        """Return a member's counters and blocks, one more if a token is in flight."""
        request_id = state.request.id
        del self.members[request_id]
        computed = self._origins.pop(request_id)[0] + self.ticks - 1
        if self._keeps_accounts:
            self._count(state.request.tenant, -1, -computed)
        self.num_kv_tokens -= computed
        del self._phase(computed)[request_id]
        held = computed
        if self.plan_id is not None:
            held += 1
            state.plans[self.plan_id] = (TARGET,)
        state.exit(computed, -(-held // self._block_size))
        if not self.is_counted:
            if request_id in self._joined:
                del self._joined[request_id]
            else:
                self._left.append(request_id)
            self._rows = None

    def _count(self, tenant: str, num: int, kv_tokens: int) -> None:
        """Add members of a tenant, and tokens of their context."""
        decoded = self._by_tenant.get(tenant)
        if decoded is None:
            decoded = self._by_tenant[tenant] = _Decoded(self.ticks)
        decoded.advance(self.ticks)
        decoded.num += num
        decoded.kv_tokens += kv_tokens

    def take_decoded(self) -> list[tuple[str, int, int]]:
        """Return by tenant the tokens decoded since the last call, and their contexts' sum."""
        taken = []
        for tenant, decoded in list(self._by_tenant.items()):
            decoded.advance(self.ticks)
            if decoded.num_rows:
                taken.append((tenant, decoded.num_rows, decoded.num_kv_tokens))
                decoded.num_rows = decoded.num_kv_tokens = 0
            if not decoded.num:
                del self._by_tenant[tenant]
        return taken

    def kv_tokens_by_tenant(self) -> dict[str, int]:
        """Return the context of each tenant's members."""
        for decoded in self._by_tenant.values():
            decoded.advance(self.ticks)
        return {tenant: d.kv_tokens for tenant, d in self._by_tenant.items()}

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return known and output tokens, [members, 2]."""
        origins = chain.from_iterable(self._origins.values())
        return np.fromiter(origins, np.int64).reshape(-1, 2) + self.ticks

    def first_token_times(self) -> npt.NDArray[np.float64]:
        """Return each member's time of its first token, [members], in the order of `lengths`."""
        return np.fromiter((s.first_token_at for s in self.members.values()), np.float64)

    def num_new_blocks(self, ticks: int = 1) -> int:
        """Return the blocks that the next `ticks` tokens of every member need."""
        if ticks == 1:
            return len(self._phase(0))
        whole, rest = divmod(ticks, self._block_size)
        num = whole * len(self.members)
        if not rest:
            return num
        for i in range(rest):
            num += len(self._phase(-i))
        return num

    def grow(self, pool: BlockPool) -> None:
        """Take the blocks that the next token of every member needs."""
        if self.is_counted:
            pool.count(self.num_new_blocks())
            return
        for request_id, state in self._phase(0).items():
            (self._new_blocks[request_id],) = state.kv[TARGET].grow(pool, 1)

    @property
    def ticks_left(self) -> int:
        leaving = self._leaving
        while leaving:
            leaves_at, _, state = leaving[0]
            if state.decode_group is self and state.leaves_at == leaves_at:
                return leaves_at - self.ticks
            heapq.heappop(leaving)
        return 0

    def advance(self, ticks: int) -> list[RequestState]:
        """Give members at most `ticks_left` tokens; return those that leave, by arrival."""
        self.ticks += ticks
        self.num_kv_tokens += ticks * len(self.members)
        left: list[RequestState] = []
        leaving = self._leaving
        while leaving and leaving[0][0] <= self.ticks:
            leaves_at, _, state = heapq.heappop(leaving)
            if state.decode_group is self and state.leaves_at == leaves_at:
                self.leave(state)
                left.append(state)
        return left

    # --- texts ----------------------------------------------------------------------------------

    def take_change(self) -> GroupChange | None:
        """Return what an executor must know of the members; None where only lengths are known."""
        if self.is_counted:
            return None
        self._planned, _ = self._rows or self._drawn()
        if not (self._left or self._joined or self._new_blocks):
            return _NO_CHANGE
        change = GroupChange(self._left, tuple(self._joined), self._new_blocks)
        self._left, self._joined, self._new_blocks = [], {}, {}
        return change

    def _drawn(self) -> tuple[tuple[str, ...], list[list[int]]]:
        texts = [state.output_token_ids for state in self.members.values()]
        self._rows = (tuple(self.members), texts)
        return self._rows

    def append(self, tokens: GroupTokens) -> list[Output]:
        """Append the planned step's tokens to the members' texts, before `advance`."""
        token_ids = tokens.token_ids
        if self._rows is None:
            # Some have left meanwhile; none has joined.
            by_id = dict(zip(self._planned, token_ids, strict=True))
            token_ids = [by_id[i] for i in self.members]
        ids, texts = self._rows or self._drawn()
        any(map(list.append, texts, token_ids))
        rows = zip(ids, zip(token_ids), *_REST, strict=False)
        return list(map(_new_tuple, repeat(Output), rows))

    def filled(self) -> Iterator[RequestState]:
        """Yield the members that fill a block with the planned step, their KV counted up to it."""
        for state in self._phase(-1).values():
            state.kv[TARGET].num_computed_tokens = state.num_known_tokens
            yield state


def decode_run(
    groups: Sequence[DecodeGroup],
    pool: BlockPool,
    plan_id: int,
    repeatable: bool,
    until: float | None,
) -> DecodeRun:
    """Return the groups' part of a plan, and how often it may repeat, if `repeatable`."""
    num_requests, num_kv_tokens = 0, 0
    for group in groups:
        group.plan_id = plan_id
        num_requests += len(group.members)
        num_kv_tokens += group.num_kv_tokens
    repeats = 1
    if repeatable:
        # The first tick has its blocks already.
        most = 1 + pool.num_free_blocks * pool.block_size // num_requests
        repeats = max(1, min(most, *[group.ticks_left for group in groups]))
        # Each needs at most one block a step.
        if not pool.can_allocate((repeats - 1) * num_requests):
            while repeats > 1 and not pool.can_allocate(num_later_blocks(groups, repeats)):
                repeats -= 1
    keys = tuple([group.key for group in groups])
    change = groups[0].take_change()
    return DecodeRun(keys, num_requests, num_kv_tokens + num_requests, repeats, until, change)


def repeated_run(run: DecodeRun, group: DecodeGroup, pool: BlockPool, plan_id: int) -> DecodeRun:
    """Return the next step of a run of one group, which has at least one left."""
    group.grow(pool)
    group.plan_id = plan_id
    return run._replace(
        num_kv_tokens=run.num_kv_tokens + run.num_requests,
        max_repeats=run.max_repeats - 1,
        change=group.take_change(),
    )


def num_later_blocks(groups: Sequence[DecodeGroup], ticks: int) -> int:
    """Return the blocks that `ticks` steps need beyond those of the first."""
    num = 0
    for group in groups:
        num += group.num_new_blocks(ticks) - group.num_new_blocks()
    return num
