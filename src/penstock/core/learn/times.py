"""Step times of the target and of drafters."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.core.learn.curve import StepTimeCurve
from penstock.core.learn.links import LinkTimes
from penstock.core.learn.running import RunningMean
from penstock.core.learn.saved import number, numbers
from penstock.core.learn.step_time import StepTime
from penstock.core.state import Drafter
from penstock.core.types import TARGET, DraftTime, StepPlan, StepResult, Verdict
from penstock.fluid.step_profile import DrafterProfile, StepProfile, StepWork

FloatArray = npt.NDArray[np.float64]
Seconds = TypeVar("Seconds", float, npt.NDArray[np.float64])

_START_WEIGHT = 0.1  # weight of a draft in its start
_MIN_CATCH_UP_TOKENS = 16  # tokens a request from which on a catch-up measures reading
_MOST_READING = 0.3  # share of a drafter's time up to which its reading is subtracted
_USUALLY_UNREAD = 2  # tokens a request after a round
_MOST_OVERHEAD_S = 2e-3  # longer gaps are a lack of work
_DRAFT_ENDS = 8  # of the latest drafts made beside the target; a step waits for few of them
_TRUSTED_ROUNDS = 16  # rounds that their prediction counts for
_MOST_PACE = 4.0  # most that a round may count over its prediction
_SURE = 2.0  # standard errors beyond which a difference is no chance
_FADING = 2e-4  # share a round by which bad experience with drafts beside fades
_DRAFT_OVERHEAD_DECAY = 0.999
"""Decay of the drafts' part of the host's time per step without one: half is left after 700."""


class Times:
    """Model of time: the target's step, drafters' steps and reading, draft servers, and the host.

    target: its step. overhead: host's seconds between two consecutive steps; draft_overhead: more
    if drafts are made inside the step. drafting: mean seconds that drafts add to a decoding step.
    Every mean chooses its own memory."""

    def __init__(self, profile: StepProfile, links: LinkTimes) -> None:
        self.target = StepTime(profile)
        self.overhead = 0.0
        self.draft_overhead = 0.0
        self._drafting = RunningMean()
        self._pace = {
            beside: RunningMean(1.0, _TRUSTED_ROUNDS)  # measured over predicted seconds of rounds
            for beside in (False, True)
        }
        self._links = links
        self._by_drafter: defaultdict[str, StepTimeCurve] = defaultdict(StepTimeCurve)
        self._starts: dict[str, float] = {}
        self._catch_up: defaultdict[str, RunningMean] = defaultdict(RunningMean)
        self._doubtful: set[str] = set()
        self._last_end = math.inf
        self._gap = -math.inf
        self._last_gap = 0.0
        self._may_wait = False
        self._draft_ends: deque[float] = deque(maxlen=_DRAFT_ENDS)
        self._waited = 0.0
        self._plain_pause, self._drafting_pause = RunningMean(), RunningMean()

    # --- what policies ask ----------------------------------------------------------------------

    @property
    def profile(self) -> StepProfile:
        """Profile of the target's step by its work; steps exceed it by `shift`."""
        return self.target.profile

    @profile.setter
    def profile(self, profile: StepProfile) -> None:
        self.target.profile = profile

    @property
    def shift(self) -> float:
        return self.target.shift

    @property
    def drafting(self) -> float:
        return self._drafting.value

    def step_seconds(self, work: StepWork) -> float:
        """Return the seconds of a target step, the host's part included."""
        return self.target.seconds(work, self.overhead)

    def added(self, num_rows: int, rows: FloatArray | npt.NDArray[np.int64]) -> FloatArray:
        """Return the seconds by which steps of so many `rows` exceed one of `num_rows`."""
        return self.target.added(num_rows, rows)

    @property
    def slower_beside(self) -> float:
        """Factor by which rounds with drafts beside exceed their prediction more than others do.

        1 where it may be chance."""
        inside, beside = self._pace[False], self._pace[True]
        slower = beside.value / inside.value
        error = math.hypot(inside.standard_error, beside.standard_error)
        return slower if slower > 1 + _SURE * error else 1.0

    def note_round(self, pace: float, *, beside: bool) -> None:
        """Take in the measured over the predicted seconds of a round."""
        known = self._pace
        known[beside].add(min(pace, _MOST_PACE))
        if not beside:
            known[True].move(_FADING * (known[False].value - known[True].value))

    def draft_seconds(self, drafter: str, batch: int, num_tokens: int) -> float:
        """Return the seconds of drafts for a batch, of this machine or a draft server."""
        curve = self._by_drafter.get(drafter)
        if curve is not None and not curve.is_empty:
            return num_tokens * curve(batch) + self.start_of(drafter) * (num_tokens > 0)
        return self._links.seconds(drafter, num_tokens)

    def curve_of(self, drafter: str) -> StepTimeCurve:
        """Return seconds of one drafting step by its batch; empty while not measured."""
        return self._by_drafter[drafter]

    def start_of(self, drafter: str) -> float:
        """Return the seconds of a draft beyond its steps, as for finding the text's own tokens."""
        return max(0.0, self._starts.get(drafter, 0.0))

    def catch_up_of(self, drafter: str) -> float:
        """Return the seconds per token of verified text that it reads; 0 while not measured."""
        known = self._catch_up.get(drafter)
        return 0.0 if known is None else known.value

    def note_catch_up(self, drafter: str, seconds_per_token: float) -> None:
        self._catch_up[drafter].add(seconds_per_token)

    def doubt(self, drafter: str) -> None:
        """Mark a drafter's times as guesses, which shorter times replace."""
        self.curve_of(drafter).doubt()
        self._doubtful.add(drafter)

    def doubt_all(self) -> None:
        """Mark all times as guesses, measured before the first request or on another day."""
        self.target.doubt()
        for drafter in self._by_drafter:
            self.doubt(drafter)

    @property
    def pause(self) -> float:
        """Seconds between the last two target steps; not finite before the second."""
        return self._gap

    def add_together(self, drafter: str, slowdown: float, target_slowdown: float) -> None:
        """Add a measured drafter to the profile, with slowdowns as in `DrafterProfile`."""
        steps = {round(batch): seconds for batch, seconds in self.curve_of(drafter).points()}
        self.target.add_drafter(
            DrafterProfile(
                drafter,
                tuple(steps),
                tuple(steps.values()),
                self.catch_up_of(drafter),
                slowdown,
                target_slowdown,
            )
        )

    # --- between two runs -----------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return all times but those of draft servers and of the host."""
        drafters = self._by_drafter.items()
        return {
            "target": self.target.points(),
            "drafters": {name: curve.points() for name, curve in drafters},
            "catch_up": {name: mean.value for name, mean in self._catch_up.items()},
            "together": {d.name: [d.slowdown, d.target_slowdown] for d in self.profile.drafters},
            "drafting": self.drafting,
        }

    def restore(self, state: Any) -> None:
        """Take over a `state` as guesses, before any step."""
        drafters = ((self.curve_of(name), points) for name, points in state["drafters"].items())
        for curve, points in ((self.target, state["target"]), *drafters):
            for point in points:
                curve.add_measurement(*numbers(point))
        for name, seconds in state["catch_up"].items():
            self.note_catch_up(name, number(seconds))
        for name, slowdowns in state["together"].items():
            self.add_together(name, *numbers(slowdowns))
        self._drafting.add(number(state["drafting"]))
        self.doubt_all()

    # --- learning -------------------------------------------------------------------------------

    def on_result(self, result: StepResult, *, may_wait: bool) -> None:
        """Take in an ended step and the host's part before it, unless it `may_wait` for drafts."""
        if result.lane != TARGET:
            if result.finished_at > result.started_at:  # else orders to a draft server were sent
                self.draft_ended(result.finished_at)
        else:
            self._may_wait = may_wait
            gap = self._gap = result.started_at - self._last_end
            ends = [at for at in self._draft_ends if self._last_end < at <= result.started_at]
            self._waited = max(ends) - self._last_end if ends else 0.0
            self._last_end = result.finished_at
            # A longer gap is a lack of work; a negative one: the step before had not ended.
            if 0 <= gap < _MOST_OVERHEAD_S:
                self._last_gap = gap
            work = result.work
            if work is None:
                return
            self.target.add_step(work, result.work_seconds, 0.0 if may_wait else self._last_gap)
            if self.target.follows_rows:
                self._observe_rows(result)

    def draft_ended(self, now: float) -> None:
        """Note that a draft made beside the target has come: until then a step may have waited."""
        self._draft_ends.append(now)

    def _observe_rows(self, result: StepResult) -> None:
        if result.num_rows:
            seconds = (result.phases.verify + result.phases.sample) / result.repeats
            self.target.add_measurement(result.num_rows, seconds)

    def observe_drafting(self, result: StepResult) -> None:
        """Take in the rows, host's part and drafters of a step, after `on_result`."""
        if result.lane == TARGET:
            if self._gap - self._waited < _MOST_OVERHEAD_S:
                self._observe_overhead(result)
            if not self.target.follows_rows:
                self._observe_rows(result)
            work = result.work
            if work is not None and work.num_decodes:
                added, linear = result.phases.draft, self.target.profile.linear
                if work.num_draft_tokens:
                    rows = work.num_positions
                    added += linear(rows) - linear(rows - work.num_draft_tokens)
                self._drafting.add(added)
        for timed in result.draft_times:
            # A long catch-up is prefill and says nothing about the price of a draft token.
            if timed.num_catch_up_tokens > _MIN_CATCH_UP_TOKENS * timed.batch:
                self._observe_reading(timed)
            elif timed.steps:
                # The first step reads what a round leaves unread, and the rest: where that may take
                # much of the time drafting is not measured.
                beyond = max(0, timed.num_catch_up_tokens - _USUALLY_UNREAD * timed.batch)
                reading = beyond * self.catch_up_of(timed.drafter)
                if reading <= _MOST_READING * timed.seconds:
                    self._observe_steps(timed, timed.seconds - reading)

    def _observe_steps(self, timed: DraftTime, seconds: float) -> None:
        """Take in a draft: one step says what the start takes, and several what each does."""
        name, curve = timed.drafter, self.curve_of(timed.drafter)
        start, step = self._starts.get(name, 0.0), curve(timed.batch)
        if timed.steps == 1 and not curve.is_empty:
            self._starts[name] = start + _START_WEIGHT * (seconds - step - start)
            return
        expected = max(0.0, start) + timed.steps * step
        if start > 0 and seconds < expected:
            # Which of the two takes less is unknown: both change in proportion.
            weight = 1.0 if name in self._doubtful else _START_WEIGHT
            start = self._starts[name] = start * (1 - weight * (1 - seconds / expected))
        curve.add_measurement(timed.batch, max(0.0, seconds - max(0.0, start)) / timed.steps)

    def _observe_reading(self, timed: DraftTime) -> None:
        """Take in a drafter's step that was mostly reading."""
        name, num_tokens = timed.drafter, timed.num_catch_up_tokens
        curve, known = self.curve_of(name), self.catch_up_of(name)
        step = curve(timed.batch)
        expected = timed.steps * step + num_tokens * known
        if name in self._doubtful and timed.seconds < expected:
            # Which of the two takes less is unknown: both change in proportion.
            share = timed.seconds / expected
            self._catch_up[name].restart(share * known, 1)
            if timed.steps:
                curve.add_measurement(timed.batch, share * step)
        else:
            reading = max(0.0, timed.seconds - timed.steps * step)
            self.note_catch_up(name, reading / num_tokens)
        self._doubtful.discard(name)

    def _observe_overhead(self, result: StepResult) -> None:
        work = result.work
        if work is not None and work.num_prefill_tokens and not self._may_wait:
            # A request's beginning, and often another's end, take the host once. If nearly every
            # round drafts there is hardly another step without drafts.
            return
        pause = self._gap - self._waited + result.phases.other
        has_drafts = any([t.steps for t in result.draft_times])
        if has_drafts:
            pause += result.phases.draft - sum([t.seconds for t in result.draft_times])
        if not 0 <= pause < _MOST_OVERHEAD_S:
            return
        plain, drafting = self._plain_pause, self._drafting_pause
        (drafting if has_drafts else plain).add(pause)
        if drafting.num and not has_drafts:
            # What is not measured any more must not prevent drafts for good.
            drafting.move((1 - _DRAFT_OVERHEAD_DECAY) * (plain.value - drafting.value))
        self.overhead = (plain if plain.num else drafting).value
        self.draft_overhead = max(0.0, drafting.value - self.overhead) if drafting.num else 0.0


def step_work(plan: StepPlan, verdicts: Sequence[Verdict] | None = None) -> StepWork:
    """Return the work of a plan's first step, with drafts by `verdicts` or as granted."""
    proposed = {} if verdicts is None else {v.request_id: v.num_drafted for v in verdicts}
    run = plan.decodes
    if run is not None and not plan.items:
        return StepWork(0, 0.0, run.num_requests, run.num_kv_tokens, 0)
    prefill, decodes, kv, drafts, context = 0, 0, 0, 0, 0.0
    for item in plan.items:
        tokens, start = item.num_scheduled_tokens, item.start
        if tokens == 1 and start:
            decodes += 1
            kv += start + 1
            drafts += proposed.get(item.request_id, item.num_draft_tokens)
        else:
            prefill += tokens
            context += tokens * (start + 0.5 * tokens)
    if run is not None:
        decodes += run.num_requests
        kv += run.num_kv_tokens
    return StepWork(prefill, context, decodes, kv, drafts)


def drafter_profiles(
    profile: StepProfile, drafters: Iterable[Drafter]
) -> dict[str, DrafterProfile]:
    """Return profiles by drafter name: instances of one model share its times."""
    known = {d.name: d for d in profile.drafters}
    return {d.name: known[d.model or d.name] for d in drafters if (d.model or d.name) in known}


def round_seconds(
    verify: Seconds, *, inside: float = 0.0, beside: Seconds | float = 0.0, host: float = 0.0
) -> Seconds:
    """Return the seconds of a round: drafts beside, host, drafts inside, verification."""
    return beside + host + inside + verify
