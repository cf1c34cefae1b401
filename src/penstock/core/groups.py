"""Decoding requests advanced together.

A group counts steps for all members at once, at constant cost where only lengths are known;
`core.text_groups` has those with texts. Decisions equal those for single requests, which tests
compare."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from penstock.core.kv import BlockPool, SequenceKV
from penstock.core.state import RequestState
from penstock.core.types import TARGET, DecodeRun, GroupChange, Request


class CountedKV(SequenceKV):
    """KV with only its number of blocks known."""

    __slots__ = ("_num_blocks",)

    def __init__(self, num_computed_tokens: int = 0, num_blocks: int = 0) -> None:
        self.num_computed_tokens = num_computed_tokens
        self.blocks = []
        self.num_committed_blocks = 0
        self.num_cached_tokens = 0
        self._num_blocks = num_blocks

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def grow(self, pool: BlockPool, num_blocks: int) -> list[int]:
        pool.count(num_blocks)
        self._num_blocks += num_blocks
        return []

    def give_back(self, pool: BlockPool) -> None:
        pool.count(-self._num_blocks)

    def start_from(self, pool: BlockPool, cached: Sequence[int]) -> None:
        pool.share(cached)
        self._num_blocks = len(cached)
        self.num_computed_tokens = len(cached) * pool.block_size


class GroupedState(RequestState):
    """A request that may join a group, whose counters then replace its own."""

    __slots__ = ("_joined_at", "_num_output", "decode_group", "leaves_at", "until")

    def __init__(self, request: Request, order: int, epoch: int = 0) -> None:
        self.decode_group: DecodeGroup | None = None
        self._joined_at = 0
        self._num_output = 0
        super().__init__(request, order, epoch)
        self.leaves_at = 0
        self.until: int | None = None
        """Output tokens at which it leaves the group."""

    @property
    def num_output_tokens(self) -> int:
        group = self.decode_group
        if group is None:
            return self._num_output
        return self._num_output + group.ticks - self._joined_at

    @num_output_tokens.setter
    def num_output_tokens(self, value: int) -> None:
        self._num_output = value

    @property
    def num_computed_tokens(self) -> int:
        if self.decode_group is not None:
            return self.request.prompt_len + self.num_output_tokens - 1
        kv = self.kv.get(TARGET)
        return kv.num_computed_tokens if kv else 0

    @property
    def is_decoding(self) -> bool:
        if self.decode_group is not None:
            return True
        num_output = self._num_output
        return num_output > 0 and self.num_computed_tokens + 1 == (
            self.request.prompt_len + num_output
        )

    def enter(self, group: DecodeGroup) -> None:
        self.decode_group = group
        self._joined_at = group.ticks

    def exit(self, num_output_tokens: int, num_blocks: int) -> None:
        """Take the counters back from the group. num_blocks: that it holds."""
        self.decode_group = None
        self._num_output = num_output_tokens
        self.kv[TARGET].num_computed_tokens = self.num_known_tokens - 1


class CountedState(GroupedState):
    """A request of which only lengths are known."""

    __slots__ = ("num_announced",)

    def __init__(self, request: Request, order: int, epoch: int = 0) -> None:
        super().__init__(request, order, epoch)
        self.num_announced = 0
        """Output tokens announced so far."""

    def append_counted(self, num_tokens: int) -> int:
        """Add verified tokens by number; return how many of all tokens were not announced."""
        self._num_output += num_tokens
        num_new = self._num_output - self.num_announced
        self.num_announced += num_new
        return num_new

    def kv_of(self, pool: str) -> SequenceKV:
        kv = self.kv.get(pool)
        if kv is None:
            kv = self.kv[pool] = CountedKV()
        return kv

    def exit(self, num_output_tokens: int, num_blocks: int) -> None:
        self.kv[TARGET] = CountedKV(0, num_blocks)
        super().exit(num_output_tokens, num_blocks)


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
    """Requests that decode one token each in every step of the group."""

    def __init__(self, key: Hashable, block_size: int, *, keeps_accounts: bool = False) -> None:
        self.key = key
        self._keeps_accounts = keeps_accounts
        self.ticks = 0
        self.num_kv_tokens = 0
        """Positions whose KV the target holds for the members."""
        self.members: dict[str, GroupedState] = {}
        self.plan_id: int | None = None
        # Known and output tokens of each member, extrapolated to tick 0.
        self._origins: dict[str, tuple[int, int]] = {}
        self._block_size = block_size
        # Members by the tick phase at which they begin a block.
        self._phases: list[dict[str, GroupedState]] = [{} for _ in range(block_size)]
        self._leaving: list[tuple[int, int, GroupedState]] = []
        self._by_tenant: dict[str, _Decoded] = {}

    def __len__(self) -> int:
        return len(self.members)

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output tokens of all members."""
        return self.num_kv_tokens + len(self.members)

    def join(self, state: GroupedState) -> None:
        """Add a decoding request that is in no plan."""
        computed = state.kv[TARGET].num_computed_tokens
        self.num_kv_tokens += computed
        self._phase(computed)[state.request.id] = state
        num_output = state.num_output_tokens
        left = state.request.max_tokens - num_output
        if state.until is not None and num_output < state.until:
            left = min(left, state.until - num_output)
        ticks, request_id = self.ticks, state.request.id
        self._origins[request_id] = (computed + 1 - ticks, num_output - ticks)
        state.leaves_at = ticks + left
        state.enter(self)
        self.members[request_id] = state
        if self._keeps_accounts:
            self._count(state.request.tenant, 1, computed)
        heapq.heappush(self._leaving, (state.leaves_at, state.order, state))

    def _phase(self, num_computed_tokens: int) -> dict[str, GroupedState]:
        """Return the members that begin a block together with one of so many computed tokens."""
        return self._phases[(num_computed_tokens - self.ticks) % self._block_size]

    def leave(self, state: GroupedState) -> None:
        """Return a member's counters and blocks, one more if a token is in flight."""
        request_id = state.request.id
        del self.members[request_id]
        known, num_output = self._origins.pop(request_id)
        computed, num_output = known + self.ticks - 1, num_output + self.ticks
        if self._keeps_accounts:
            self._count(state.request.tenant, -1, -computed)
        self.num_kv_tokens -= computed
        del self._phase(computed)[request_id]
        held = computed
        if self.plan_id is not None:
            held += 1
            state.plans[self.plan_id] = (TARGET,)
        state.exit(num_output, -(-held // self._block_size))

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
        pool.count(self.num_new_blocks())

    def take_change(self) -> GroupChange | None:
        """Return what an executor must know of the members; None where only lengths are known."""
        return None

    @property
    def ticks_left(self) -> int:
        leaving = self._leaving
        while leaving:
            leaves_at, _, state = leaving[0]
            if state.decode_group is self and state.leaves_at == leaves_at:
                return leaves_at - self.ticks
            heapq.heappop(leaving)
        return 0

    def advance(self, ticks: int) -> list[GroupedState]:
        """Give members at most `ticks_left` tokens; return those that leave, by arrival."""
        self.ticks += ticks
        self.num_kv_tokens += ticks * len(self.members)
        left: list[GroupedState] = []
        leaving = self._leaving
        while leaving and leaving[0][0] <= self.ticks:
            leaves_at, _, state = heapq.heappop(leaving)
            if state.decode_group is self and state.leaves_at == leaves_at:
                self.leave(state)
                left.append(state)
        return left


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
