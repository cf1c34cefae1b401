"""Seconds of the target's steps, by their work."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from penstock.core.learn.curve import StepTimeCurve
from penstock.core.learn.profile import LearnedProfile
from penstock.core.learn.running import ERROR_WEIGHT, RunningMean
from penstock.fluid.step_profile import UNKNOWN, DrafterProfile, StepProfile, StepWork

FloatArray = npt.NDArray[np.float64]

_LEAST_S = 1e-6
_LONGEST_REDRAW = 64
"""Longest interval of steps between two fits of a profile: 1, 2, 4, ... at first."""


class StepTime(StepTimeCurve):
    """Model of the target's step: by its rows, as measured, and by its work, by a profile.

    Both predict every step before they learn from it, and the one with the smaller error answers: a
    profile tells rows from attention, and the curve by rows cannot be wrong for long.

    profile: given, learned from steps (`learns_profile`), or drawn from the curve (`use_rows`).
    shift: mean seconds by which steps with the host's part before them exceed it."""

    def __init__(self, profile: StepProfile) -> None:
        super().__init__()
        self.profile = profile
        self.learns_profile = False
        self._draws_rows = False
        self._shift = RunningMean()
        self._by_rows_error = self._by_work_error = 0.0
        self._learned = LearnedProfile()
        self._num_steps, self._redraw_at = 0, 1
        self._last_work: tuple[int, int, int] = (0, 0, 0)

    # --- what policies ask ----------------------------------------------------------------------

    def seconds(self, work: StepWork, host: float) -> float:
        """Return the seconds of a step; `host`: seconds between two steps."""
        if self._is_by_rows:
            return max(_LEAST_S, self(work.num_positions) + host)
        return max(_LEAST_S, self.profile.seconds(work) + self._shift.value)

    def added(self, num_rows: int, rows: FloatArray | npt.NDArray[np.int64]) -> FloatArray:
        """Return the seconds by which steps of so many `rows` exceed one of `num_rows`."""
        if self._is_by_rows:
            return self.at(rows) - self(num_rows)
        added = self.profile.linear_at(rows) - self.profile.linear(num_rows)
        # What is learned is noisy, or hoped for: less could be more than all of a short step.
        return np.maximum(added, 0.0) if self.learns_profile else added

    @property
    def shift(self) -> float:
        return self._shift.value

    @property
    def follows_rows(self) -> bool:
        """True if the profile is drawn from the curve."""
        return self._draws_rows and not self.learns_profile

    @property
    def _is_by_rows(self) -> bool:
        is_own = self.profile is UNKNOWN or self.follows_rows
        return not self.is_empty and (is_own or self._by_rows_error < self._by_work_error)

    # --- learning -------------------------------------------------------------------------------

    def use_rows(self, kv_tokens: int) -> None:
        """Draw the profile from the curve, now and again."""
        self._draws_rows = True
        drafters = self.profile.drafters
        self.profile = StepProfile("measured", kv_tokens, (0,), (0.0,), drafters=drafters)
        self._draw_rows()

    def add_drafter(self, drafter: DrafterProfile) -> None:
        """Add a drafter that was measured with the target to the profile."""
        self.profile = replace(self.profile, drafters=(*self.profile.drafters, drafter))

    def add_step(self, work: StepWork, seconds: float, host: float) -> None:
        """Take in an ended step, and the host's part before it."""
        predicted = self.profile.seconds(work)
        self._num_steps += 1
        if seconds > 0:
            weight = max(ERROR_WEIGHT, 1 / self._num_steps)
            by_rows = abs(self(work.num_positions) / seconds - 1)
            by_work = abs(predicted / seconds - 1)
            self._by_rows_error += weight * (by_rows - self._by_rows_error)
            self._by_work_error += weight * (by_work - self._by_work_error)
        if self.learns_profile:
            self._learned.add_step(work, seconds + host)
        is_due = self._num_steps >= self._redraw_at
        if is_due and (self.learns_profile or self._draws_rows):
            self._redraw_at = self._num_steps + min(self._num_steps, _LONGEST_REDRAW)
            self._redraw(work, predicted)
            predicted = self.profile.seconds(work)
        # Equal steps teach nothing new: a run may be reported one by one or at once.
        composition = (work.num_prefill_tokens, work.num_decodes, work.num_draft_tokens)
        if composition != self._last_work:
            self._last_work = composition
            self._shift.add(seconds + host - predicted)

    def _redraw(self, work: StepWork, before: float) -> None:
        if self.learns_profile:
            self.profile = self._learned.drawn(self.profile)
            self._shift.restart(0.0, self._shift.num)
        else:
            self._draw_rows()
            self._shift.move(before - self.profile.seconds(work))

    def _draw_rows(self) -> None:
        by_rows = {round(rows): seconds for rows, seconds in self.points()}
        self.profile = replace(
            self.profile, token_counts=tuple(by_rows), token_seconds=tuple(by_rows.values())
        )
