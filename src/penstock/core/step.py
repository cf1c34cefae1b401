"""The target's step while it is composed, as admission policies read and change it.

They read `can_...` and counters, and change by `schedule...`, `admit` and `preempt`. Decoding
requests are handled together, so that the cost does not depend on their number."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.groups import DecodeGroup
from penstock.core.learn import Estimators
from penstock.core.state import RequestState
from penstock.core.table import Table
from penstock.core.types import TARGET, StateCopy, Status


@dataclass(slots=True)
class ScheduledTokens:
    """Known tokens of one request in this step.

    samples: the last known token is among them, so that the next one is sampled."""

    state: RequestState
    start: int
    num_tokens: int
    samples: bool
    new_blocks: list[int]


class StepRules(NamedTuple):
    """Inputs of a step from the scheduler.

    max_num_seqs: requests that the executor has room for. may_run: True if a running request may
    join the step. reserve: draft positions to keep free for one that does. victim: the request to
    preempt where memory is short; None if there is none."""

    max_num_seqs: float
    may_run: Callable[[RequestState], bool]
    reserve: Callable[[RequestState], int]
    victim: Callable[[Step], RequestState | None]


class Step:
    """One target step being composed.

    running: all admitted requests, oldest first. scheduled: known tokens of requests in this step,
    by id; decoding: decode groups in it. num_tokens: known tokens scheduled so far. wake_at:
    compose again at this time even if nothing happens before. stalled: reason why no request can
    run again unless one is cancelled or arrives."""

    __slots__ = (
        "_ready",
        "_rules",
        "_table",
        "copies",
        "decoding",
        "learn",
        "now",
        "num_preempted",
        "num_tokens",
        "pool",
        "running",
        "scheduled",
        "stalled",
        "waiting",
        "wake_at",
    )

    def __init__(self, table: Table, learn: Estimators, rules: StepRules, now: float) -> None:
        self._rules = rules
        self._table = table
        self.pool = table.memory.pools[TARGET]
        self.learn = learn
        self.running = table.running
        self.waiting = table.waiting
        self.now = now
        self.scheduled: dict[str, ScheduledTokens] = {}
        self.decoding: list[DecodeGroup] = []
        self.copies: list[StateCopy] = []
        self.num_tokens = self.num_preempted = 0
        self.wake_at: float | None = None
        self.stalled: str | None = None
        self._ready: tuple[list[RequestState], list[RequestState]] | None = None

    # --- who is there ---------------------------------------------------------------------------

    @property
    def scheduled_states(self) -> list[RequestState]:
        return [s.state for s in self.scheduled.values()]

    @property
    def num_places(self) -> float:
        """Requests that could be admitted if memory were free: each running one takes a place."""
        return self._rules.max_num_seqs - len(self.running)

    @property
    def num_reserved(self) -> int:
        """Draft positions that the scheduled requests would use."""
        return sum([self._rules.reserve(s.state) for s in self.scheduled.values()])

    @property
    def num_known_tokens(self) -> int:
        """Prompt and output tokens of all running requests."""
        total = sum([s.num_known_tokens for s in self._table.solo.values()])
        return total + sum([g.num_known_tokens for g in self._table.groups.values()])

    @property
    def num_decoding_tokens(self) -> int:
        """Prompt and output tokens of the decoding requests."""
        total = sum([s.num_known_tokens for s in self._table.solo.values() if s.is_decoding])
        return total + sum([g.num_known_tokens for g in self._table.groups.values()])

    def kv_tokens_by_tenant(self) -> Iterator[tuple[str, int]]:
        """Yield tenants of running requests with KV tokens; a tenant may come more than once."""
        for state in self._table.solo.values():
            yield state.request.tenant, state.num_computed_tokens
        for group in self._table.groups.values():
            yield from group.kv_tokens_by_tenant().items()

    def output_times(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Return first token times and output lengths of all requests with output, unordered."""
        solo = [s for s in self._table.solo.values() if s.num_output_tokens]
        times = [np.array([s.first_token_at for s in solo])]
        tokens = [np.array([s.num_output_tokens for s in solo], dtype=np.int64)]
        for group in self._table.groups.values():
            times.append(group.first_token_times())
            tokens.append(group.lengths()[:, 1])
        return np.concatenate(times), np.concatenate(tokens)

    def running_lengths(self) -> npt.NDArray[np.int64]:
        """Return known and output tokens of every running request, [running, 2], in no order."""
        solo = [(s.num_known_tokens, s.num_output_tokens) for s in self._table.solo.values()]
        parts = [np.array(solo, dtype=np.int64).reshape(-1, 2)]
        parts += [g.lengths() for g in self._table.groups.values()]
        return np.concatenate(parts)

    # --- decoding -------------------------------------------------------------------------------

    def assign(self, state: RequestState, key: Hashable, until: int | None = None) -> None:
        """Let a request decode in the group of this key only, up to `until` output tokens."""
        self._table.key_of[state.request.id] = key
        state.until = until

    def key_of(self, state: RequestState) -> Hashable:
        """Return the key of the group to which a request was assigned, if any."""
        return self._table.key_of.get(state.request.id)

    def ungrouped(self) -> list[RequestState]:
        """Return running requests outside decode groups, oldest first."""
        return list(self._table.solo.values())

    def num_decodes(self, key: Hashable = None) -> int:
        """Return the number of requests of a group that could decode now."""
        group = self._table.groups.get(key)
        return (len(group) if group else 0) + len(self._solo_decodes(key))

    def _solo_decodes(self, key: Hashable) -> list[RequestState]:
        """Return those of them outside the group, oldest first."""
        key_of, (decoding, _) = self._table.key_of, self._split()
        if key is None and not key_of:
            return decoding
        return [s for s in decoding if key_of.get(s.request.id) == key]

    def _split(self) -> tuple[list[RequestState], list[RequestState]]:
        """Return requests outside groups that may run, oldest first: decoding, and the others.

        They are looked at again after a change of the requests that run."""
        if self._ready is None:
            may_run = self._rules.may_run
            ready = [s for s in self._table.solo.values() if may_run(s)]
            decoding = [s for s in ready if s.is_decoding]
            others = [] if len(decoding) == len(ready) else [s for s in ready if not s.is_decoding]
            self._ready = decoding, others
        return self._ready

    def can_schedule_decodes(self, key: Hashable = None) -> bool:
        """Return True if memory holds the next token of each of them."""
        group = self._table.groups.get(key)
        wanted = group.num_new_blocks() if group else 0
        wanted += sum([self._missing_blocks(s, 1) for s in self._solo_decodes(key)])
        return self.pool.can_allocate(wanted)

    def schedule_decodes(self, budget: int, key: Hashable = None) -> int:
        """Schedule the next token of the group's decoding requests, oldest first.

        Where memory is short the newest running requests are preempted. Returns the tokens
        scheduled, `budget` at most."""
        before = self.num_tokens
        group = self._table.groups.get(key)
        solo = self._solo_decodes(key) if self._table.solo else []
        joins = self._can_group(key, solo, budget)
        if not joins and group is not None and group.plan_id is None and group.members:
            self._table.dissolve(group)
            self._ready = None
            solo = self._solo_decodes(key)
        alone = []
        for state in solo:
            if joins and state.may_group:
                if group is None:
                    group = self._table.new_group(key, state)
                group.join(state)
                del self._table.solo[state.request.id]
            else:
                alone.append(state)
        if group is not None and group.plan_id is not None:
            group = None
        if len(alone) < len(solo):
            self._ready = None
        has_room = self._make_room_together(alone[:budget], group)
        for state in alone:
            may_join = state.status is Status.RUNNING and before + budget > self.num_tokens
            if may_join and (has_room or self.make_room(state, 1)):
                self.schedule(state, 1)
        if group is not None and group.members:
            self._schedule_group(group, budget)
        return self.num_tokens - before

    def _can_group(self, key: Hashable, solo: Sequence[RequestState], budget: int) -> bool:
        """Return False for texts that may draft, are kept apart, or do not all fit in a step.

        Nobody joins a group that is in a plan."""
        group = self._table.groups.get(key)
        if group is None:
            is_counted = not any([s.may_group and not s.is_counted for s in solo])
        else:
            is_counted = group.is_counted
        if is_counted:
            return True
        if key is not None or self._table.drafters:
            return False
        if group is None:
            return len(solo) <= budget
        return len(group) + len(solo) <= budget and group.plan_id is None

    def _make_room_together(self, alone: list[RequestState], group: DecodeGroup | None) -> bool:
        """Make room for the next token of each, so that arriving first is no protection.

        Returns True if there is room for all that are left."""
        if self.pool.num_free_blocks >= len(alone) + (len(group) if group is not None else 0):
            return True
        while True:
            wanted = sum(self._missing_blocks(s, 1) for s in alone if s.status is Status.RUNNING)
            wanted += 0 if group is None else group.num_new_blocks()
            if self.pool.can_allocate(wanted):
                return True
            victim = self._rules.victim(self)
            if victim is None:
                return False
            self.preempt(victim)

    def _schedule_group(self, group: DecodeGroup, budget: int) -> None:
        num = len(group.members)
        if num > budget:
            raise ValueError(f"{num} decoding requests exceed a budget of {budget} tokens")
        if self.pool.can_allocate(group.num_new_blocks()):
            group.grow(self.pool)
            self.decoding.append(group)
            self.num_tokens += num

    # --- prefill --------------------------------------------------------------------------------

    def prefills(self) -> list[RequestState]:
        """Return running requests with more than their next token to compute, oldest first."""
        return self._split()[1]

    def schedule_prefills(self, budget: int) -> int:
        """Continue partly computed prompts, in chunks as large as the budget allows.

        Returns the tokens scheduled."""
        before = self.num_tokens
        for state in self.prefills() if self._table.solo else ():
            tokens = min(state.num_due_tokens, budget - (self.num_tokens - before))
            if tokens and state.status is Status.RUNNING and self.make_room(state, tokens):
                self.schedule(state, tokens)
        return self.num_tokens - before

    def num_missing_tokens(self, state: RequestState) -> int:
        """Return the tokens that a waiting request would have to compute before its next one."""
        if not state.block_hashes:
            return state.num_known_tokens
        return state.num_known_tokens - len(self.cached_blocks(state)) * self.pool.block_size

    def cached_blocks(self, state: RequestState) -> list[int]:
        """Return the blocks of the prefix cache that a waiting request would start from.

        The last known token is always computed anew, since its logits or state are needed, and so
        is a prompt of which those of all tokens are."""
        if not state.block_hashes or state.request.needs_whole_prompt:
            return []
        usable = (state.num_known_tokens - 1) // self.pool.block_size
        return self.pool.match(state.block_hashes[:usable])

    def can_admit(self, state: RequestState, num_tokens: int, num_kept_free: int = 0) -> bool:
        """Return True if a waiting request can start with so many tokens beyond the cached prefix.

        The executor must have room, and memory must leave `num_kept_free` blocks."""
        if len(self.running) >= self._rules.max_num_seqs:
            return False
        return self.pool.can_allocate(self._wanted_blocks(state, num_tokens) + num_kept_free)

    def _wanted_blocks(self, state: RequestState, num_tokens: int) -> int:
        """Return the free blocks taken by `num_tokens` tokens beyond the cached prefix."""
        if not state.block_hashes:
            return self.pool.blocks_for(num_tokens)
        cached = self.cached_blocks(state)
        length = len(cached) * self.pool.block_size + num_tokens
        return self.pool.blocks_for(length) - len(cached) + self.pool.num_idle(cached)

    def shortage(
        self, state: RequestState, max_num_seqs: float = math.inf, num_kept_free: int = 0
    ) -> tuple[int, int]:
        """Return missing blocks and surplus running requests of an admission; 0 or less is none."""
        wanted = self._wanted_blocks(state, self.num_missing_tokens(state))
        wanted += num_kept_free if self.running else 0
        too_many = len(self.running) + 1 - min(max_num_seqs, self._rules.max_num_seqs)
        return wanted - self.pool.num_free_blocks, 0 if too_many < 0 else int(too_many)

    def admit(self, state: RequestState, num_tokens: int) -> None:
        """Move a waiting request to the running ones and schedule its first tokens."""
        kv = state.kv_of(TARGET)
        cached = self.cached_blocks(state)
        if cached:
            kv.start_from(self.pool, cached)
            if self.pool.num_snapshots is not None:
                place = self.pool.snapshot(state.block_hashes[len(cached) - 1])
                copy = StateCopy(state.request.id, place, kv.num_computed_tokens, is_saved=False)
                self.copies.append(copy)
        kv.num_cached_tokens = kv.num_computed_tokens
        if not state.num_output_tokens:
            state.admitted_at = self.now
        self._table.admit(state)
        self._ready = None
        self.schedule(state, num_tokens)
        if cached:
            self.scheduled[state.request.id].new_blocks = list(kv.blocks)

    def admit_in_order(
        self,
        budget: int,
        max_num_seqs: int,
        num_kept_free: int = 0,
        *,
        whole: bool = True,
    ) -> None:
        """Admit waiting requests in order while the budget, `max_num_seqs` and memory allow.

        The last one may get a part of its tokens. whole: memory must hold all that a request has to
        compute, not only its first chunk. Spare blocks are not withheld from a request that is
        alone."""
        queue = self.waiting.queue()
        while budget > 0 and len(self.running) < max_num_seqs:
            state = queue.first
            if state is None:
                return
            missing = self.num_missing_tokens(state)
            tokens = min(missing, budget)
            spare = num_kept_free if self.running else 0
            if not self.can_admit(state, missing if whole else tokens, spare):
                return
            self.admit(state, tokens)
            budget -= tokens

    # --- memory ---------------------------------------------------------------------------------

    def num_free_when_grown(self, final_len: Callable[[RequestState], int]) -> int:
        """Return the blocks left if every running request held `final_len` tokens at once."""
        blocks_for = self.pool.blocks_for
        return self.pool.num_blocks - sum(blocks_for(final_len(s)) for s in self.running.values())

    def can_schedule(self, state: RequestState, num_tokens: int) -> bool:
        """Return True if memory holds `num_tokens` more positions of a running request."""
        return self.pool.can_allocate(self._missing_blocks(state, num_tokens))

    def schedule(self, state: RequestState, num_tokens: int) -> None:
        """Compute `num_tokens` more known tokens of a running request. Ask `can_schedule` first."""
        kv = state.kv_of(TARGET)
        if self._table.accounts.are_kept and not state.is_decoding:
            self._table.accounts.charge_prompt(state, kv.num_computed_tokens, num_tokens)
        start = kv.num_computed_tokens
        missing = self.pool.blocks_for(start + num_tokens) - kv.num_blocks
        new_blocks = kv.grow(self.pool, missing) if missing > 0 else []
        self.num_tokens += num_tokens
        samples = start + num_tokens == state.num_known_tokens and state.request.pooling is None
        self.scheduled[state.request.id] = ScheduledTokens(
            state, start, num_tokens, samples, new_blocks
        )

    def make_room(self, state: RequestState, num_tokens: int) -> bool:
        """Preempt the newest running requests until a running one can be scheduled.

        Returns False if it was preempted itself, or none can be."""
        while not self.can_schedule(state, num_tokens):
            victim = self._rules.victim(self)
            if victim is None:
                return False
            self.preempt(victim)
            if victim is state:
                return False
        return True

    def can_preempt(self, state: RequestState) -> bool:
        """Return False for a request inside an unfinished target step, which keeps its blocks."""
        group = state.decode_group
        if group is not None:
            return group.plan_id is None and group not in self.decoding
        return not state.in_flight and state.request.id not in self.scheduled

    def pause(self, state: RequestState) -> None:
        """Let a running request keep its memory, but not run."""
        self._table.leave_group(state)
        self._table.accounts.paused.add(state.request.id)
        self._ready = None

    def resume(self, state: RequestState) -> None:
        """Let a paused request run again."""
        self._table.accounts.paused.discard(state.request.id)
        self._ready = None

    def displace(self, state: RequestState) -> None:
        """Preempt a running request for a waiting one, before anything is scheduled."""
        self._table.preempt(state)
        self._ready = None

    def preempt(self, state: RequestState) -> None:
        """Free a running request's memory; it is recomputed later, first in the queue."""
        self._table.preempt(state)
        self._ready = None
        self.num_preempted += 1

    def _missing_blocks(self, state: RequestState, num_tokens: int) -> int:
        kv = state.kv_of(TARGET)
        return max(0, self.pool.blocks_for(kv.num_computed_tokens + num_tokens) - kv.num_blocks)


def newest(step: Step) -> RequestState | None:
    """Return the newest running request that can be preempted."""
    return next((s for s in reversed(step.running.values()) if step.can_preempt(s)), None)
