"""The step in the making: what an admission policy may look at, and what it may do.

A policy asks (`can_...`, counters) and acts (`schedule...`, `admit`, `preempt`); memory and epochs
stay consistent whatever it does. Requests that decode are acted on together: how many there are
then makes no difference to a policy, nor to its cost where a cohort counts for all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from penstock.core.accounts import Accounts
from penstock.core.blocks import BlockPool
from penstock.core.cohort import Cohort, CountedState
from penstock.core.learn import Estimators
from penstock.core.state import RequestState
from penstock.core.types import TARGET, Status
from penstock.core.waiting import WaitingRequests


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
    """One target step being composed.

    running: all admitted requests, oldest first; `solo` are those of them that no cohort counts.
    wake_at: compose again at this time even if nothing happens before.
    repeatable: until an event, an end or `wake_at` comes, the policy would compose the same again.
    stalled: why nothing can ever run again unless a request is cancelled or another arrives.
    """

    pool: BlockPool
    running: dict[str, RequestState]
    solo: dict[str, RequestState]
    cohorts: dict[Hashable, Cohort]
    waiting: WaitingRequests
    estimators: Estimators
    may_run: Callable[[RequestState], bool]
    draft_reserve: Callable[[RequestState], int]
    release: Callable[[RequestState], None]
    leave_cohort: Callable[[RequestState], None]
    accounts: Accounts
    choose_victim: Callable[[Step], RequestState | None]
    now: float = 0.0
    scheduled: dict[str, ScheduledTokens] = field(default_factory=dict)
    decoding: list[Cohort] = field(default_factory=list)
    num_tokens: int = 0
    """Known tokens scheduled so far; drafts are not among them."""
    num_reserved: int = 0
    """Draft positions that the scheduled decoding requests would like to use."""
    num_preempted: int = 0
    num_displaced: int = 0
    """Preempted for a waiting request, before anything was scheduled."""
    wake_at: float | None = None
    repeatable: bool = False
    stalled: str | None = None

    def begin(self, now: float) -> None:
        """Start over with an empty step."""
        self.now = now
        self.scheduled = {}
        self.decoding = []
        self.num_tokens = self.num_reserved = self.num_preempted = self.num_displaced = 0
        self.wake_at = self.stalled = None
        self.repeatable = False

    # --- who is there ---------------------------------------------------------------------------

    @property
    def scheduled_states(self) -> list[RequestState]:
        return [s.state for s in self.scheduled.values()]

    @property
    def num_known_tokens(self) -> int:
        """Of all running requests: prompts and outputs so far."""
        total = sum(s.num_known_tokens for s in self.solo.values())
        return total + sum(c.num_kv_tokens + len(c) for c in self.cohorts.values())

    @property
    def num_decoding_tokens(self) -> int:
        """Of the decoding requests alone: what a step that decodes attends to."""
        total = sum(s.num_known_tokens for s in self.solo.values() if s.is_decoding)
        return total + sum(c.num_kv_tokens + len(c) for c in self.cohorts.values())

    def output_times(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """Of every running request with output, in no order: when its first token came, and its
        output tokens so far."""
        solo = [s for s in self.solo.values() if s.num_output_tokens]
        times = [np.array([s.first_token_at for s in solo])]
        tokens = [np.array([s.num_output_tokens for s in solo], dtype=np.int64)]
        for cohort in self.cohorts.values():
            times.append(cohort.first_token_times())
            tokens.append(cohort.lengths()[:, 1])
        return np.concatenate(times), np.concatenate(tokens)

    def running_lengths(self) -> npt.NDArray[np.int64]:
        """[running, 2]: known and output tokens of every running request, in no order."""
        solo = [(s.num_known_tokens, s.num_output_tokens) for s in self.solo.values()]
        parts = [np.array(solo, dtype=np.int64).reshape(-1, 2)]
        parts += [c.lengths() for c in self.cohorts.values()]
        return np.concatenate(parts)

    # --- decoding -------------------------------------------------------------------------------

    def num_decodes(self, group: Hashable = None) -> int:
        """Requests of a group that could decode now."""
        cohort = self.cohorts.get(group)
        return (len(cohort) if cohort else 0) + len(self.solo_decodes(group))

    def solo_decodes(self, group: Hashable = None) -> list[RequestState]:
        """Those of them that no cohort counts, oldest first."""
        return [
            s for s in self.solo.values() if s.is_decoding and s.group == group and self.may_run(s)
        ]

    def can_schedule_decodes(self, group: Hashable = None) -> bool:
        """Whether memory holds the next token of all of them."""
        cohort = self.cohorts.get(group)
        wanted = cohort.num_new_blocks() if cohort else 0
        wanted += sum(self._missing_blocks(s, 1) for s in self.solo_decodes(group))
        return self.pool.can_allocate(wanted)

    def schedule_decodes(self, budget: int, group: Hashable = None) -> int:
        """Schedule the next token of the group's decoding requests, oldest first, as far as the
        budget goes. Where memory is short the newest running requests are preempted for it.
        Returns the tokens scheduled."""
        before = self.num_tokens
        cohort = self.cohorts.get(group)
        solo = self.solo_decodes(group) if self.solo else []
        if self.pool.num_free_blocks < len(solo):
            self._make_room_together([s for s in solo if not isinstance(s, CountedState)][:budget])
        for state in solo:
            if isinstance(state, CountedState):
                if cohort is None:
                    cohort = self.cohorts[group] = Cohort(
                        group, self.pool.block_size, keeps_accounts=self.accounts.are_kept
                    )
                cohort.join(state)
                del self.solo[state.request.id]
            elif state.status is Status.RUNNING and before + budget > self.num_tokens:
                self._schedule_decode(state)
        if cohort is not None and cohort.members and cohort.plan_id is None:
            self._schedule_cohort(cohort, budget)
        return self.num_tokens - before

    def _make_room_together(self, states: list[RequestState]) -> None:
        """For the next token of each, so that nobody is spared for having come first."""
        while not self.pool.can_allocate(
            sum(self._missing_blocks(s, 1) for s in states if s.status is Status.RUNNING)
        ):
            victim = self.choose_victim(self)
            if victim is None:
                return
            self.preempt(victim)

    def _schedule_decode(self, state: RequestState) -> None:
        if self.make_room(state, 1):
            self.schedule(state, 1)
            self.num_reserved += self.draft_reserve(state)

    def _schedule_cohort(self, cohort: Cohort, budget: int) -> None:
        num = len(cohort.members)
        if num > budget:
            raise ValueError(f"{num} decoding requests exceed a budget of {budget} tokens")
        while not self.pool.can_allocate(wanted := cohort.num_new_blocks()):
            victim = self.choose_victim(self)
            if victim is None:
                return
            self.preempt(victim)
        if cohort.members:
            self.pool.count(wanted)
            self.decoding.append(cohort)
            self.num_tokens += len(cohort.members)

    # --- prefill --------------------------------------------------------------------------------

    def prefills(self) -> list[RequestState]:
        """Running requests with more than their next token to compute, oldest first."""
        return [s for s in self.solo.values() if not s.is_decoding and self.may_run(s)]

    def schedule_prefills(self, budget: int) -> int:
        """Go on with prompts that are partly computed, in chunks as large as the budget allows.
        Returns the tokens scheduled."""
        before = self.num_tokens
        for state in self.prefills() if self.solo else ():
            tokens = min(state.num_due_tokens, budget - (self.num_tokens - before))
            if tokens and state.status is Status.RUNNING and self.make_room(state, tokens):
                self.schedule(state, tokens)
        return self.num_tokens - before

    def num_missing_tokens(self, state: RequestState) -> int:
        """Tokens that a waiting request would have to compute before its next one."""
        if not state.block_hashes:
            return state.num_known_tokens
        return state.num_known_tokens - len(self.cached_blocks(state)) * self.pool.block_size

    def cached_blocks(self, state: RequestState) -> list[int]:
        """Blocks of the prefix cache that a waiting request would start from. The last known token
        is always computed anew, since its logits are wanted."""
        if not state.block_hashes:
            return []
        usable = (state.num_known_tokens - 1) // self.pool.block_size
        return self.pool.match(state.block_hashes[:usable])

    def can_admit(self, state: RequestState, num_tokens: int, num_kept_free: int = 0) -> bool:
        """Whether memory holds the first `num_tokens` tokens beyond the cached prefix of a waiting
        request, with `num_kept_free` blocks to spare."""
        return self.pool.can_allocate(self._wanted_blocks(state, num_tokens) + num_kept_free)

    def _wanted_blocks(self, state: RequestState, num_tokens: int) -> int:
        """Free blocks that a waiting request takes for its first `num_tokens` tokens beyond the
        cached prefix."""
        if not state.block_hashes:
            return self.pool.blocks_for(num_tokens)
        cached = self.cached_blocks(state)
        length = len(cached) * self.pool.block_size + num_tokens
        return self.pool.blocks_for(length) - len(cached) + self.pool.num_idle(cached)

    def shortage(
        self, state: RequestState, max_num_seqs: float = math.inf, num_kept_free: int = 0
    ) -> tuple[int, int]:
        """How many blocks, and running requests, are too few and too many for a waiting request to
        be admitted; none is 0 or less."""
        wanted = self._wanted_blocks(state, self.num_missing_tokens(state))
        wanted += num_kept_free if self.running else 0
        too_many = len(self.running) + 1 - max_num_seqs
        return wanted - self.pool.num_free_blocks, 0 if too_many < 0 else int(too_many)

    def admit(self, state: RequestState, num_tokens: int) -> None:
        """Move a waiting request to the running ones and schedule its first tokens."""
        kv = state.kv_of(TARGET)
        cached = self.cached_blocks(state)
        if cached:
            self.pool.share(cached)
            kv.blocks = list(cached)
            kv.num_committed_blocks = len(cached)
            kv.num_computed_tokens = len(cached) * self.pool.block_size
        state.num_cached_tokens = kv.num_computed_tokens
        self.waiting.admit(state)
        state.status = Status.RUNNING
        self.running[state.request.id] = self.solo[state.request.id] = state
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
        """Admit waiting requests, first in order first, while the budget, `max_num_seqs` and memory
        last; the last one in part. `whole`: memory must hold all that a request has to compute, not
        only its first chunk. The spare blocks are not kept from a request that is alone."""
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
        """Blocks that would be free if every running request held `final_len` tokens at once."""
        blocks_for = self.pool.blocks_for
        return self.pool.num_blocks - sum(blocks_for(final_len(s)) for s in self.running.values())

    def can_schedule(self, state: RequestState, num_tokens: int) -> bool:
        """Whether memory holds `num_tokens` more positions of a running request."""
        return self.pool.can_allocate(self._missing_blocks(state, num_tokens))

    def schedule(self, state: RequestState, num_tokens: int) -> None:
        """Compute `num_tokens` more known tokens of a running request. Ask `can_schedule` first."""
        kv = state.kv_of(TARGET)
        if self.accounts.are_kept and not state.is_decoding:
            self.accounts.charge_prompt(state, kv.num_computed_tokens, num_tokens)
        missing = self.pool.blocks_for(kv.num_computed_tokens + num_tokens) - kv.num_blocks
        new_blocks = kv.grow(self.pool, missing) if missing > 0 else []
        self.num_tokens += num_tokens
        self.scheduled[state.request.id] = ScheduledTokens(
            state, kv.num_computed_tokens, num_tokens, new_blocks
        )

    def make_room(self, state: RequestState, num_tokens: int) -> bool:
        """Preempt the newest running requests until a running one can be scheduled; False if it had
        to go itself, or nobody can."""
        while not self.can_schedule(state, num_tokens):
            victim = self.choose_victim(self)
            if victim is None:
                return False
            self.preempt(victim)
            if victim is state:
                return False
        return True

    def can_preempt(self, state: RequestState) -> bool:
        """A request inside an unfinished target step keeps its blocks, so it is no victim."""
        if isinstance(state, CountedState) and state.cohort is not None:
            return state.cohort.plan_id is None and state.cohort not in self.decoding
        return not state.in_flight and state.request.id not in self.scheduled

    def pause(self, state: RequestState) -> None:
        """Let a running request keep its memory, but not run."""
        self.leave_cohort(state)
        state.is_paused = True

    def displace(self, state: RequestState) -> None:
        """Preempt a running request for one that waits, before anything is scheduled."""
        self.preempt(state)
        self.num_preempted -= 1
        self.num_displaced += 1

    def preempt(self, state: RequestState) -> None:
        """Give up a running request's memory; it is recomputed later, first in the queue."""
        self.release(state)
        state.is_paused = False
        state.status = Status.PREEMPTED
        del self.running[state.request.id]
        del self.solo[state.request.id]
        self.waiting.appendleft(state)
        self.num_preempted += 1

    def _missing_blocks(self, state: RequestState, num_tokens: int) -> int:
        kv = state.kv_of(TARGET)
        return max(0, self.pool.blocks_for(kv.num_computed_tokens + num_tokens) - kv.num_blocks)


def newest(step: Step) -> RequestState | None:
    """The newest running request that can be preempted."""
    return next((s for s in reversed(step.running.values()) if step.can_preempt(s)), None)
