"""When drafters draft and the target verifies: in rounds, in micro-batches, or whatever is ready.

A pipeline looks at the requests that draft, at the drafts that are held and at those that are on
their way. It says for whom a lane drafts next, whether the target should wait, and whose drafts it
verifies together. It decides nothing else: who joins the step is admission's business.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.core.division import Division
from penstock.core.estimators import Estimators
from penstock.core.pipeline_planner import (
    MOST_MICRO_BATCHES,
    Round,
    Setting,
    best_setting,
    cycle_seconds,
    round_of,
)
from penstock.core.state import Drafter, RequestState
from penstock.core.types import StepResult
from penstock.fluid.step_profile import StepWork

_MOST_CHOSEN = 64
"""Micro-batches that somebody may ask for; `auto` tries fewer."""
_OVERDUE = 0.25
"""Of the time that a draft has taken, once it is later than expected: how much is still to come."""


@dataclass(frozen=True, slots=True)
class Drafts:
    """The moment at which the target could start. `ready`: decoding requests that it could verify,
    with or without a draft; `pending`: requests whose drafts are on their way."""

    now: float
    ready: Sequence[RequestState]
    pending: Sequence[RequestState]
    estimators: Estimators


class Pipeline(ABC):
    """Decides whom a lane drafts for, whether the target waits for drafts, and for which."""

    @property
    def drafts_beside(self) -> bool:
        """Whether the drafters of this machine that have lanes use them; else they draft inside the
        target's step. It may change when a step has ended."""
        return True

    def divide(self, states: Sequence[RequestState]) -> None:  # noqa: B027
        """Take in who drafts in a lane now: decoding requests with their drafters."""

    def next_drafts(self, lane: str, due: Sequence[RequestState]) -> Sequence[RequestState]:
        """For whom a lane drafts in its next step, of those whose drafts are due."""
        return due

    @abstractmethod
    def hold_until(self, drafts: Drafts) -> float | None:
        """Until when to wait, unless a draft comes or is given up before; None: verify now."""

    def joins(self, state: RequestState) -> bool:
        """Whether a request may be verified in the step that `hold_until` let start."""
        return True

    def stepped(  # noqa: B027
        self,
        states: Iterable[RequestState],
        drafters: Mapping[str, Drafter],
        estimators: Estimators,
        result: StepResult,
    ) -> None:
        """A target step has ended; `states` are the running requests."""


class Barrier(Pipeline):
    """Rounds: nothing is verified while a draft is on its way (GoodSpeed, section III-A)."""

    def hold_until(self, drafts: Drafts) -> float | None:
        return math.inf if drafts.pending else None


class _Inline(Barrier):
    """No pipeline: drafters of this machine draft inside the target's step; for those elsewhere
    there are rounds."""

    @property
    def drafts_beside(self) -> bool:
        return False


class MicroBatches(Pipeline):
    """Requests are divided into groups; while the target verifies one, the drafters draft for the
    next (Spin, section V-B). A group is verified when all its drafts are there.

    The batch on each drafter is split evenly, as requests come, go and change drafters: those
    between two rounds move to where there are fewest.
    """

    def __init__(self, num: int, share: float | None = None) -> None:
        """share: of the first of two, if they are not to be even. Raises: ValueError for less than
        two."""
        if num < 2:
            raise ValueError(f"{num} micro-batches are no pipeline; at least 2 are")
        self.num = num
        self._shares = Setting(num, share).shares
        self._group: dict[str, int] = {}
        self._next_in_lane: dict[str, int] = {}
        self._next_verified = 0
        self._verified: int | None = None

    def group_of(self, state: RequestState) -> int | None:
        """The micro-batch of a request that drafts in a lane."""
        return self._group.get(state.request.id)

    def divide(self, states: Sequence[RequestState]) -> None:
        division = Division(self._shares)
        newcomers = []
        for state in states:
            group = self._group.get(state.request.id)
            if group is None:
                newcomers.append(state)
            else:
                division.put(state, group)
        for state in newcomers:
            division.put(state, division.emptiest(state.drafter or ""))
        division.balance()
        self._group = division.groups()

    def next_drafts(self, lane: str, due: Sequence[RequestState]) -> Sequence[RequestState]:
        """Those of one group, in turn."""
        first = self._next_in_lane.get(lane, 0)
        groups = [self._group.get(s.request.id, 0) for s in due]
        if not groups:
            return due
        chosen = min(groups, key=lambda g: (g - first) % self.num)
        self._next_in_lane[lane] = (chosen + 1) % self.num
        return [s for s, group in zip(due, groups, strict=True) if group == chosen]

    def hold_until(self, drafts: Drafts) -> float | None:
        """Wait for the next whole group. With no draft on its way nothing more will come soon, and
        the largest part of a group will do."""
        ready = Counter(self._group.get(s.request.id) for s in drafts.ready)
        sizes = Counter(self._group.values())
        whole = [g for g, size in sizes.items() if ready[g] == size]
        self._verified = min(whole, key=self._turn, default=None)
        if self._verified is None:
            if drafts.pending:
                return math.inf
            parts = [g for g in sizes if ready[g]]
            self._verified = min(parts, key=lambda g: (-ready[g], self._turn(g)), default=None)
        if self._verified is not None:
            self._next_verified = (self._verified + 1) % self.num
        return None

    def joins(self, state: RequestState) -> bool:
        """Its own group, and whoever is in none."""
        return self._group.get(state.request.id, self._verified) == self._verified

    def _turn(self, group: int) -> int:
        return (group - self._next_verified) % self.num


class Asynchronous(Pipeline):
    """Verify what is ready, or wait for some of the drafts that are coming.

    Waiting delays those that are ready; going without the others makes each of them wait for the
    whole step that it has missed. Of all moments at which another draft is expected, and now, the
    one is taken that makes the sum of all delays smallest, each weighted with the tokens that its
    request can expect. Where a step costs little that is mostly now; where it costs much more than
    drafting, it is when the last draft has come: the barrier.
    """

    def hold_until(self, drafts: Drafts) -> float | None:
        if not drafts.ready or not drafts.pending:
            return None
        coming = sorted(self._coming(drafts, state) for state in drafts.pending)
        after, tokens, rows = np.array(coming).T
        first = [self._held(drafts.estimators, state) for state in drafts.ready]
        waits = np.concatenate(([0.0], after))
        joined = np.cumsum(np.concatenate(([sum(t for t, _ in first)], tokens)))
        positions = np.cumsum(np.concatenate(([sum(n for _, n in first)], rows)))
        delays = np.empty(len(waits))
        for i, wait in enumerate(waits):
            end = wait + _step_seconds(drafts.estimators, len(first) + i, positions[i])
            delays[i] = joined[i] * end
            if i < len(after):
                missed = positions[-1] - positions[i]
                next_step = _step_seconds(drafts.estimators, len(after) - i, missed)
                delays[i] += tokens[i:] @ (np.maximum(end, after[i:]) + next_step)
        best = int(np.argmin(delays))
        return drafts.now + float(waits[best]) if best else None

    def _coming(self, drafts: Drafts, state: RequestState) -> tuple[float, float, int]:
        """Seconds until a draft is here, the tokens it promises, and its positions."""
        order = state.draft_order
        assert order is not None
        elapsed = drafts.now - state.ordered_at
        left = drafts.estimators.links.seconds(order.drafter, order.max_draft_tokens) - elapsed
        if left <= 0:
            # The longer it is overdue, the longer it will still take.
            left = _OVERDUE * elapsed
        num = order.max_draft_tokens
        return left, expected_tokens(drafts.estimators, state, order.drafter, num), num + 1

    def _held(self, estimators: Estimators, state: RequestState) -> tuple[float, int]:
        """The tokens that a request promises, and its positions."""
        if state.held is None:
            return 1.0, 1
        num = state.held.num_draft_tokens
        return expected_tokens(estimators, state, state.held.drafter, num), num + 1


def expected_tokens(
    estimators: Estimators, state: RequestState, drafter: str, num_draft_tokens: int
) -> float:
    """Accepted + 1, by what is known of the request and the drafter."""
    rate = estimators.acceptance.mean(state.request.id, drafter)
    return (1 - rate ** (num_draft_tokens + 1)) / (1 - rate)


def _step_seconds(estimators: Estimators, num_requests: int, num_positions: float) -> float:
    drafted = int(num_positions) - num_requests
    return estimators.step_model.seconds(
        StepWork(num_decodes=num_requests, num_draft_tokens=drafted)
    )


_GAIN = 0.005
"""Micro-batches must promise so much more before they are begun, or ended."""
_CHANGED = 0.1
"""The batch has changed much when so large a share of it has come, gone or changed drafters."""
_LENGTH_KEEP = 0.9
_PACE_KEEP = 0.95
_MOST_PACE = 4.0
_TOLERATED = 1.1
_FADING = 2e-4
_HOST_WEIGHT = 0.1
_MOST_HOST_S = 2e-3
"""A longer break between two steps is no plan being written."""
_EVERY_STEPS = 64


class Auto(Pipeline):
    """The setting with the best throughput by step times, no pipeline among them.

    It is chosen again when the batch on the drafters or their draft lengths have changed much, and
    now and then because measured times move. Before anything is known there is no pipeline.
    """

    def __init__(self, most: int = MOST_MICRO_BATCHES) -> None:
        self.setting = Setting()
        self._most = most
        self._inner: Pipeline = _Inline()
        self._lengths: dict[str, float] = {}
        self._decided: dict[str, float] = {}
        self._num_steps = 0
        self._host: float | None = None
        self._last_end = math.inf
        self._predicted = 0.0
        self._taken = {False: 0.0, True: 0.0}
        self._promised = {False: 0.0, True: 0.0}

    @property
    def drafts_beside(self) -> bool:
        return self._inner.drafts_beside

    def divide(self, states: Sequence[RequestState]) -> None:
        self._inner.divide(states)

    def next_drafts(self, lane: str, due: Sequence[RequestState]) -> Sequence[RequestState]:
        return self._inner.next_drafts(lane, due)

    def hold_until(self, drafts: Drafts) -> float | None:
        return self._inner.hold_until(drafts)

    def joins(self, state: RequestState) -> bool:
        return self._inner.joins(state)

    def stepped(
        self,
        states: Iterable[RequestState],
        drafters: Mapping[str, Drafter],
        estimators: Estimators,
        result: StepResult,
    ) -> None:
        self._num_steps += 1
        running = list(states)
        self._learn_pace(result)
        self._learn_host(result, is_idle=not running)
        for verdict in result.verdicts:
            if verdict.drafter is not None:
                length = self._lengths.setdefault(verdict.drafter, verdict.num_proposed)
                length += (1 - _LENGTH_KEEP) * (verdict.num_proposed - length)
                self._lengths[verdict.drafter] = length
        drafting = [s for s in running if s.is_decoding and s.drafter in self._lengths]
        loads = Counter(s.drafter for s in drafting if s.drafter is not None)
        positions = {name: n * (1 + self._lengths[name]) for name, n in loads.items()}
        if positions and self._has_changed(positions):
            self._decided, self._num_steps = positions, 0
            work = round_of(drafting, drafters, estimators, self._lengths, self._host or 0.0)
            self._set(self._choose(work))

    def _learn_pace(self, result: StepResult) -> None:
        """How many times as long as predicted a request's share of a step takes, apart without a
        pipeline and with one. Where one was never tried it is taken to be the same; a bad
        experience fades."""
        since, num = result.finished_at - self._last_end, len(result.verdicts)
        beside = self.setting.num > 0
        has_prefill = not all(v.num_proposed for v in result.verdicts)
        if since <= 0 or not num or not self._predicted or has_prefill:
            return
        promised = num * self._predicted
        self._taken[beside] *= _PACE_KEEP
        self._promised[beside] *= _PACE_KEEP
        self._taken[beside] += min(since, _MOST_PACE * promised)
        self._promised[beside] += promised
        if not beside:
            usual = self._promised[True] * self._taken[False] / self._promised[False]
            self._taken[True] += _FADING * (usual - self._taken[True])

    @property
    def _worse(self) -> float:
        """How much worse a pipeline keeps its promise; what was not tried is taken to keep it."""
        pace = {
            beside: self._taken[beside] / promised if promised else 1.0
            for beside, promised in self._promised.items()
        }
        return pace[True] / pace[False] if self._promised[True] else 1.0

    def _learn_host(self, result: StepResult, *, is_idle: bool) -> None:
        """Without a pipeline the next step follows as soon as the engine has written its plan."""
        gap = result.started_at - self._last_end
        if self.setting.num == 0 and gap >= 0:
            gap = min(gap, _MOST_HOST_S)
            before = gap if self._host is None else self._host
            self._host = before + _HOST_WEIGHT * (gap - before)
        self._last_end = math.inf if is_idle else result.finished_at

    def _has_changed(self, positions: Mapping[str, float]) -> bool:
        """positions: of each drafter's batch in a verification."""
        before = self._decided
        moved = sum(abs(positions.get(n, 0) - before.get(n, 0)) for n in {*positions, *before})
        return moved > _CHANGED * sum(before.values()) or self._num_steps >= _EVERY_STEPS

    def _choose(self, work: Round) -> Setting:
        """The present setting, unless another is better by more than noise."""
        most = max(1, min(self._most, work.batch))

        worse = self._worse

        def seconds(setting: Setting) -> float:
            alone = cycle_seconds(work, setting)
            return alone * worse if setting.num and worse > _TOLERATED else alone

        best = best_setting(seconds, most, _GAIN)
        if self.setting.num <= most and seconds(best) > (1 - _GAIN) * seconds(self.setting):
            best = self.setting
        self._predicted = cycle_seconds(work, best) / work.batch
        return best

    def _set(self, setting: Setting) -> None:
        if setting == self.setting:
            return
        self.setting = setting
        if setting.num > 1:
            self._inner = MicroBatches(setting.num, setting.share)
        else:
            self._inner = Barrier() if setting.num else _Inline()


def make_pipeline(name: str) -> Pipeline:
    """`off`, a number of micro-batches, `auto` or `async`. Raises: ValueError for another name."""
    if re.fullmatch("[0-9]{1,3}", name) and 2 <= int(name) <= _MOST_CHOSEN:
        return MicroBatches(int(name))
    kinds: dict[str, type[Pipeline]] = {"off": Barrier, "auto": Auto, "async": Asynchronous}
    if name not in kinds:
        raise ValueError(
            f"unknown pipeline {name!r}; choose from off, auto, async, or a number of "
            f"micro-batches from 2 to {_MOST_CHOSEN}"
        )
    return kinds[name]()
