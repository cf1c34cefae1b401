"""How long steps take: of the target, and of drafters."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.core.state import Drafter
from penstock.core.types import TARGET, StepResult
from penstock.fluid.step_profile import DrafterProfile, StepProfile, StepWork
from penstock.fluid.step_times import StepTimeCurve

_CATCH_UP_WEIGHT = 0.1
_MUCH = 16
"""Tokens a request from which on a catch-up is a measurement of reading."""
_MOST_OVERHEAD_S = 2e-3
_OVERHEAD_WEIGHT = 0.02
_ENOUGH_PLAIN = 50
"""Steps without a draft after which it is known what they take of the host."""
_DRAFT_OVERHEAD_KEEP = 0.999
"""Of the drafts' share of the host's time, for each step without one: half is gone after 700."""


class StepTimes:
    """Measured times: the target's step against its rows, a drafting step against its batch, and
    what a drafter takes to read a token that others have written."""

    def __init__(self) -> None:
        self.target = StepTimeCurve()
        self.by_drafter: dict[str, StepTimeCurve] = {}
        self._catch_up: dict[str, float] = {}
        self._last_end: float | None = None
        self.overhead = 0.0
        """Seconds between two steps of the target that follow each other at once."""
        self.draft_overhead = 0.0
        """Further seconds of the host where drafts are made inside the step."""
        self._num_plain = 0

    def observe(self, result: StepResult) -> None:
        if result.lane == TARGET:
            self._between(result)
        if result.lane == TARGET and result.num_rows:
            seconds = (result.phases.verify + result.phases.sample) / result.repeats
            self.target.observe(result.num_rows, seconds)
        for timed in result.draft_times:
            # A long catch-up is prefill; it says nothing about the price of one more draft token.
            if timed.num_catch_up_tokens > _MUCH * timed.batch:
                drafting = timed.steps * self.curve_of(timed.drafter)(timed.batch)
                reading = max(0.0, timed.seconds - drafting)
                self.note_catch_up(timed.drafter, reading / timed.num_catch_up_tokens)
            elif timed.steps and timed.num_catch_up_tokens <= 2 * timed.batch:
                self.curve_of(timed.drafter).observe(timed.batch, timed.seconds / timed.steps)

    def _between(self, result: StepResult) -> None:
        if self._last_end is not None:
            pause = result.started_at - self._last_end + result.phases.other
            has_drafts = any(t.steps for t in result.draft_times)
            if has_drafts:
                pause += result.phases.draft - sum(t.seconds for t in result.draft_times)
            # A longer pause is a lack of work.
            if 0 <= pause < _MOST_OVERHEAD_S:
                self._note_pause(pause, has_drafts)
        self._last_end = result.finished_at

    def _note_pause(self, pause: float, has_drafts: bool) -> None:
        if has_drafts and self._num_plain >= _ENOUGH_PLAIN:
            beyond = max(0.0, pause - self.overhead)
            self.draft_overhead += _OVERHEAD_WEIGHT * (beyond - self.draft_overhead)
            return
        self.overhead += _OVERHEAD_WEIGHT * (pause - self.overhead)
        self._num_plain += not has_drafts
        # What is not measured any more must not keep drafts away for good.
        self.draft_overhead *= _DRAFT_OVERHEAD_KEEP

    def curve_of(self, drafter: str) -> StepTimeCurve:
        """Seconds of one drafting step against its batch; empty while not measured."""
        return self.by_drafter.setdefault(drafter, StepTimeCurve())

    def catch_up_of(self, drafter: str) -> float:
        """Seconds for each token of verified text that it reads; 0 while not measured."""
        return self._catch_up.get(drafter, 0.0)

    def note_catch_up(self, drafter: str, seconds_per_token: float) -> None:
        """Take in a measurement."""
        known = self._catch_up.setdefault(drafter, seconds_per_token)
        self._catch_up[drafter] = known + _CATCH_UP_WEIGHT * (seconds_per_token - known)


class StepModel:
    """Seconds of a target step by what is in it: a profile, shifted by what was measured since.

    Steps like the one before teach nothing new, so that it makes no difference whether a run of
    equal steps is reported one by one or at once.
    """

    def __init__(self, profile: StepProfile, weight: float = 0.05) -> None:
        self.profile = profile
        self._weight = weight
        self._last: tuple[int, int, int] = (0, 0, 0)
        self.shift = 0.0

    def observe(self, work: StepWork, seconds: float) -> None:
        """Take in a measured step."""
        composition = (work.num_prefill_tokens, work.num_decodes, work.num_draft_tokens)
        if composition == self._last:
            return
        self._last = composition
        self.shift += self._weight * (seconds - self.profile.seconds(work) - self.shift)

    def seconds(self, work: StepWork) -> float:
        """Predicted seconds."""
        return max(1e-6, self.profile.seconds(work) + self.shift)


def drafter_profiles(
    profile: StepProfile, drafters: Iterable[Drafter]
) -> dict[str, DrafterProfile]:
    """Of those drafters that the profile knows, by their own names: instances of one model share
    its times."""
    known = {d.name: d for d in profile.drafters}
    return {d.name: known[d.model or d.name] for d in drafters if (d.model or d.name) in known}
