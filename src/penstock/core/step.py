"""The step in the making: what an admission policy may look at, and what it may do.

A policy asks (`can_...`, counters) and acts (`schedule`, `admit`, `preempt`); memory and epochs
stay consistent whatever it does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.core.blocks import BlockPool
from penstock.core.state import RequestState
from penstock.core.types import TARGET, Status


@dataclass(slots=True)
class ScheduledTokens:
    """Known tokens of one request in this step."""

    state: RequestState
    start: int
    num_tokens: int
    new_blocks: list[int]

    @property
    def samples(self) -> bool:
        return self.start + self.num_tokens == self.state.num_known_tokens


@dataclass(slots=True)
class Step:
    """One target step being composed."""

    now: float
    pool: BlockPool
    running: list[RequestState]
    waiting: deque[RequestState]
    may_run: Callable[[RequestState], bool]
    draft_reserve: Callable[[RequestState], int]
    release: Callable[[RequestState], None]
    scheduled: dict[str, ScheduledTokens] = field(default_factory=dict)
    num_preempted: int = 0
    wake_at: float | None = None

    @property
    def num_tokens(self) -> int:
        """Known tokens scheduled so far; drafts are not among them."""
        return sum(s.num_tokens for s in self.scheduled.values())

    def can_schedule(self, state: RequestState, num_tokens: int) -> bool:
        """Whether memory holds `num_tokens` more positions of a running request."""
        return self.pool.can_allocate(self._missing_blocks(state, num_tokens))

    def schedule(self, state: RequestState, num_tokens: int) -> None:
        """Compute `num_tokens` more known tokens of a running request. Ask `can_schedule` first."""
        kv = state.kv_of(TARGET)
        missing = self._missing_blocks(state, num_tokens)
        new_blocks = self.pool.allocate(missing) if missing else []
        kv.blocks += new_blocks
        self.scheduled[state.request.id] = ScheduledTokens(
            state, kv.num_computed_tokens, num_tokens, new_blocks
        )

    def cached_blocks(self, state: RequestState) -> list[int]:
        """Blocks of the prefix cache that a waiting request would start from. The last known token
        is always computed anew, since its logits are wanted."""
        usable = (state.num_known_tokens - 1) // self.pool.block_size
        return self.pool.match(state.block_hashes[:usable])

    def can_admit(self, state: RequestState, num_tokens: int, num_kept_free: int = 0) -> bool:
        """Whether memory holds the first `num_tokens` tokens beyond the cached prefix of a waiting
        request, with `num_kept_free` blocks to spare."""
        cached = self.cached_blocks(state)
        length = len(cached) * self.pool.block_size + num_tokens
        wanted = self.pool.blocks_for(length) - len(cached) + self.pool.num_idle(cached)
        return self.pool.can_allocate(wanted + num_kept_free)

    def admit(self, state: RequestState, num_tokens: int) -> None:
        """Move a waiting request to the running ones and schedule its first tokens."""
        cached = self.cached_blocks(state)
        self.pool.share(cached)
        kv = state.kv_of(TARGET)
        kv.blocks = list(cached)
        kv.num_committed_blocks = len(cached)
        kv.num_computed_tokens = len(cached) * self.pool.block_size
        state.num_cached_tokens = kv.num_computed_tokens
        self.waiting.remove(state)
        state.status = Status.RUNNING
        self.running.append(state)
        self.schedule(state, num_tokens)
        self.scheduled[state.request.id].new_blocks = list(kv.blocks)

    def can_preempt(self, state: RequestState) -> bool:
        """A request inside an unfinished target step keeps its blocks, so it is no victim."""
        return not state.in_flight and state.request.id not in self.scheduled

    def preempt(self, state: RequestState) -> None:
        """Give up a running request's memory; it is recomputed later, first in the queue."""
        self.release(state)
        state.status = Status.PREEMPTED
        self.running.remove(state)
        self.waiting.appendleft(state)
        self.num_preempted += 1

    def _missing_blocks(self, state: RequestState, num_tokens: int) -> int:
        kv = state.kv_of(TARGET)
        return max(0, self.pool.blocks_for(kv.num_computed_tokens + num_tokens) - len(kv.blocks))
