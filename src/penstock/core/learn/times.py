"""Step times of the target and of drafters."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.core.learn.curve import StepTimeCurve
from penstock.core.learn.links import LinkTimes
from penstock.core.learn.profile import LearnedProfile
from penstock.core.learn.saved import number, numbers
from penstock.core.state import Drafter
from penstock.core.types import TARGET, DraftTime, StepPlan, StepResult, Verdict
from penstock.fluid.step_profile import (
    UNKNOWN,
    DrafterProfile,
    StepProfile,
    StepWork,
)

FloatArray = npt.NDArray[np.float64]
Seconds = TypeVar("Seconds", float, npt.NDArray[np.float64])

_CATCH_UP_WEIGHT = 0.1  # weight of a measured catch-up; weights are chosen by hand
_MIN_CATCH_UP_TOKENS = 16  # tokens a request from which on a catch-up measures reading
_STEPS_WEIGHT = 0.02  # weight of a step in errors of predictions
_MOST_READING = 0.3  # share of a drafter's time up to which its reading is subtracted
_USUALLY_UNREAD = 2  # tokens a request after a round
_MOST_OVERHEAD_S = 2e-3  # longer gaps are a lack of work
_DRAFT_ENDS = 8  # of the latest drafts made beside the target; a step waits for few of them
_OVERHEAD_WEIGHT = 0.02  # least weight of a pause
_SHIFT_WEIGHT = 0.05  # weight of a step in the profile's shift, and in the seconds of drafting
_PACE_WEIGHT = 0.05  # of a round in how far rounds exceed their prediction
_MOST_PACE = 4.0  # most that a round may count over its prediction
_FADING = 2e-4  # share a round by which bad experience with drafts beside fades
_LONGEST_REDRAW = 64
"""Longest interval of steps between two fits of a learned profile: 1, 2, 4, ... at first."""
_FOLLOWED = 64  # steps between two fits of a profile of rows
_DRAFT_OVERHEAD_DECAY = 0.999
"""Decay of the drafts' part of the host's time per step without one: half is left after 700."""


@dataclass(slots=True)
class _Mean:
    """Mean of all measurements while they are few, then of the latest ones."""

    seconds: float = 0.0
    num: int = 0

    def add_seconds(self, seconds: float) -> None:
        self.num += 1
        self.seconds += max(_OVERHEAD_WEIGHT, 1 / self.num) * (seconds - self.seconds)


class Times:
    """Model of time: the target's step, drafters' steps and reading, draft servers, and the host.

    profile: of the target's step by its work, with a measured `shift`; learns_profile: it is fitted
    to steps. target: the step's seconds by its rows, as measured. overhead: host's seconds between
    two consecutive steps; draft_overhead: more if drafts are made inside the step. drafting: mean
    seconds that drafts add to a decoding step."""

    def __init__(self, profile: StepProfile, links: LinkTimes) -> None:
        self.profile = profile
        self.learns_profile = False
        self._follows_rows = False
        self.shift = 0.0
        self.target = StepTimeCurve()
        self._curve_error = self._profile_error = 0.0  # mean relative ones, of steps predicted
        self.overhead = 0.0
        self.draft_overhead = 0.0
        self.drafting = 0.0
        self._pace = {False: 1.0, True: 1.0}
        """Measured over predicted seconds of rounds, with drafts inside and beside."""
        self._links = links
        self._by_drafter: defaultdict[str, StepTimeCurve] = defaultdict(StepTimeCurve)
        self._catch_up: dict[str, float] = {}
        self._doubtful: set[str] = set()
        self._last_end = math.inf
        self._gap = -math.inf
        self._last_gap = 0.0
        self._may_wait = False
        self._draft_ends: deque[float] = deque(maxlen=_DRAFT_ENDS)
        self._waited = 0.0
        self._last_work: tuple[int, int, int] = (0, 0, 0)
        self._learned = LearnedProfile()
        self._num_steps, self._redraw_at = 0, 1
        self._plain_pause = _Mean()
        self._drafting_pause = _Mean()

    # --- what policies ask ----------------------------------------------------------------------

    def step_seconds(self, work: StepWork) -> float:
        """Return the seconds of a target step, the host's part included."""
        if self._is_by_rows:
            return max(1e-6, self.target(work.num_positions) + self.overhead)
        return max(1e-6, self.profile.seconds(work) + self.shift)

    def added(self, num_rows: int, rows: FloatArray | npt.NDArray[np.int64]) -> FloatArray:
        """Return the seconds by which steps of so many `rows` exceed one of `num_rows`.

        By a profile that tells rows from attention, if it predicts steps no worse than the curve by
        rows does, which mixes long prompts with many requests, but cannot be wrong for long."""
        if self._is_by_rows:
            return self.target.at(rows) - self.target(num_rows)
        added = self.profile.linear_at(rows) - self.profile.linear(num_rows)
        # What is learned is noisy, or hoped for: less could be more than all of a short step.
        return np.maximum(added, 0.0) if self.learns_profile else added

    @property
    def _is_by_rows(self) -> bool:
        """Whether the curve by rows predicts steps better than the profile."""
        is_own = self.profile is UNKNOWN or (self._follows_rows and not self.learns_profile)
        return is_own or self._curve_error < self._profile_error

    @property
    def slower_beside(self) -> float:
        """Factor by which rounds with drafts beside exceed their prediction more than others."""
        return self._pace[True] / self._pace[False]

    def note_round(self, pace: float, *, beside: bool) -> None:
        """Take in the measured over the predicted seconds of a round."""
        known = self._pace
        known[beside] += _PACE_WEIGHT * (min(pace, _MOST_PACE) - known[beside])
        if not beside:
            known[True] += _FADING * (known[False] - known[True])

    def draft_seconds(self, drafter: str, batch: int, num_tokens: int) -> float:
        """Return the seconds of drafts for a batch, of this machine or a draft server."""
        curve = self._by_drafter.get(drafter)
        if curve is not None and not curve.is_empty:
            return num_tokens * curve(batch)
        return self._links.seconds(drafter, num_tokens)

    def curve_of(self, drafter: str) -> StepTimeCurve:
        """Return seconds of one drafting step by its batch; empty while not measured."""
        return self._by_drafter[drafter]

    def catch_up_of(self, drafter: str) -> float:
        """Return the seconds per token of verified text that it reads; 0 while not measured."""
        return self._catch_up.get(drafter, 0.0)

    def note_catch_up(self, drafter: str, seconds_per_token: float) -> None:
        known = self._catch_up.setdefault(drafter, seconds_per_token)
        self._catch_up[drafter] = known + _CATCH_UP_WEIGHT * (seconds_per_token - known)

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

    def use_measured_profile(self, kv_tokens: int) -> None:
        """Use a profile of the target's measured steps by rows, and refit it later."""
        self._follows_rows = True
        drafters = self.profile.drafters
        self.profile = StepProfile("measured", kv_tokens, (0,), (0.0,), drafters=drafters)
        self._draw_rows()

    def add_together(self, drafter: str, slowdown: float, target_slowdown: float) -> None:
        """Add a measured drafter to the profile, with slowdowns as in `DrafterProfile`."""
        steps = {round(batch): seconds for batch, seconds in self.curve_of(drafter).points()}
        added = DrafterProfile(
            drafter,
            tuple(steps),
            tuple(steps.values()),
            self.catch_up_of(drafter),
            slowdown,
            target_slowdown,
        )
        self.profile = replace(self.profile, drafters=(*self.profile.drafters, added))

    def _draw_rows(self) -> None:
        by_rows = {round(rows): seconds for rows, seconds in self.target.points()}
        self.profile = replace(
            self.profile, token_counts=tuple(by_rows), token_seconds=tuple(by_rows.values())
        )

    # --- between two runs -----------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return all times but those of draft servers and of the host."""
        drafters = self._by_drafter.items()
        return {
            "target": self.target.points(),
            "drafters": {name: curve.points() for name, curve in drafters},
            "catch_up": {**self._catch_up},
            "together": {d.name: [d.slowdown, d.target_slowdown] for d in self.profile.drafters},
            "drafting": self.drafting,
        }

    def restore(self, state: Any) -> None:
        """Take over a `state` as guesses, before any step."""
        drafters = ((self.curve_of(name), points) for name, points in state["drafters"].items())
        for curve, points in ((self.target, state["target"]), *drafters):
            for point in points:
                curve.add_measurement(*numbers(point))
        self._catch_up |= {name: number(seconds) for name, seconds in state["catch_up"].items()}
        for name, slowdowns in state["together"].items():
            self.add_together(name, *numbers(slowdowns))
        self.drafting = number(state["drafting"])
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
            seconds = result.work_seconds + (0.0 if may_wait else self._last_gap)
            self._compare(work, result.work_seconds)
            if self.learns_profile:
                self._learn_profile(work, seconds)
            elif self._follows_rows:
                self._follow_rows(result, work)
            # Equal steps teach nothing new: a run may be reported one by one or at once.
            composition = (work.num_prefill_tokens, work.num_decodes, work.num_draft_tokens)
            if composition != self._last_work:
                self._last_work = composition
                self.shift += _SHIFT_WEIGHT * (seconds - self.profile.seconds(work) - self.shift)

    def _compare(self, work: StepWork, seconds: float) -> None:
        """Note how well the curve and the profile, unshifted, predicted a step."""
        if seconds > 0:
            curve = abs(self.target(work.num_positions) / seconds - 1)
            profile = abs(self.profile.seconds(work) / seconds - 1)
            self._curve_error += _STEPS_WEIGHT * (curve - self._curve_error)
            self._profile_error += _STEPS_WEIGHT * (profile - self._profile_error)

    def draft_ended(self, now: float) -> None:
        """Note that a draft made beside the target has come: until then a step may have waited."""
        self._draft_ends.append(now)

    def _learn_profile(self, work: StepWork, seconds: float) -> None:
        self._learned.add_step(work, seconds)
        self._num_steps += 1
        if self._num_steps >= self._redraw_at:
            self._redraw_at += min(self._redraw_at, _LONGEST_REDRAW)
            self.profile = self._learned.drawn(self.profile)
            self.shift = 0.0

    def _follow_rows(self, result: StepResult, work: StepWork) -> None:
        self._observe_rows(result)
        self._num_steps += 1
        if self._num_steps % _FOLLOWED == 0:
            before = self.profile.seconds(work)
            self._draw_rows()
            self.shift += before - self.profile.seconds(work)

    def _observe_rows(self, result: StepResult) -> None:
        if result.num_rows:
            seconds = (result.phases.verify + result.phases.sample) / result.repeats
            self.target.add_measurement(result.num_rows, seconds)

    def observe_drafting(self, result: StepResult) -> None:
        """Take in the rows, host's part and drafters of a step, after `on_result`."""
        if result.lane == TARGET:
            if self._gap - self._waited < _MOST_OVERHEAD_S:
                self._observe_overhead(result)
            if not self._follows_rows:
                self._observe_rows(result)
            work = result.work
            if work is not None and work.num_decodes:
                beyond = self.profile.seconds(work)
                beyond -= self.profile.seconds(work._replace(num_draft_tokens=0))
                self.drafting += _SHIFT_WEIGHT * (result.phases.draft + beyond - self.drafting)
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
                    drafting = (timed.seconds - reading) / timed.steps
                    self.curve_of(timed.drafter).add_measurement(timed.batch, drafting)

    def _observe_reading(self, timed: DraftTime) -> None:
        """Take in a drafter's step that was mostly reading."""
        name, num_tokens = timed.drafter, timed.num_catch_up_tokens
        curve, known = self.curve_of(name), self.catch_up_of(name)
        step = curve(timed.batch)
        expected = timed.steps * step + num_tokens * known
        if name in self._doubtful and timed.seconds < expected:
            # Which of the two takes less is unknown: both change in proportion.
            share = timed.seconds / expected
            self._catch_up[name] = share * known
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
        has_drafts = any(t.steps for t in result.draft_times)
        if has_drafts:
            pause += result.phases.draft - sum(t.seconds for t in result.draft_times)
        if not 0 <= pause < _MOST_OVERHEAD_S:
            return
        plain, drafting = self._plain_pause, self._drafting_pause
        (drafting if has_drafts else plain).add_seconds(pause)
        if not has_drafts:
            # What is not measured any more must not prevent drafts for good.
            drafting.seconds -= (1 - _DRAFT_OVERHEAD_DECAY) * (drafting.seconds - plain.seconds)
        self.overhead = (plain if plain.num else drafting).seconds
        self.draft_overhead = max(0.0, drafting.seconds - self.overhead) if drafting.num else 0.0


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
