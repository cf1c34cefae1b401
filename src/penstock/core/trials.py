"""Trials: draft rounds with an unused drafter, so that its times stay known (ADR 18).

A policy that weighs time does not use a drafter that does not pay by its known times, which may be
wrong. So a request drafts a few tokens with it now and then. Trials take a small share of the
target's time, and a larger one in doubt: at the start, and when the pace of the target's steps has
changed since."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.learn.times import Times
from penstock.core.policies.base import DraftCandidate, View
from penstock.core.state import Drafter, Grant, RequestState
from penstock.core.types import TARGET, StepResult

_SHARE = 0.005  # largest share of the target's time for trials (ADR 18)
_DOUBTFUL_SHARE = 0.02  # the same while there is doubt
_MOST_DOUBTFUL = 3  # trials after which there is no doubt
_FIRST_STEPS = 16  # target steps without a drafter before its first trial
_OTHER_PACE = 1.25  # factor of the target's step time that raises doubt
_NUM_ROUNDS = 2  # measured rounds of a trial; the first one mostly reads
_MOST_STEPS = 8  # target steps after which a trial ends in any case
_NUM_TOKENS = 4  # draft tokens of each round


@dataclass(slots=True)
class _Watch:
    """State of one drafter."""

    since: float  # last measurement, in seconds of the target
    pace: float  # seconds of a target step then
    cost: float  # of its last trial: seconds beyond its tokens' worth
    num_trials: int = 0  # in a row, without use


@dataclass(slots=True)
class _Trial:
    """A request that drafts with a drafter for some rounds, instead of the `chosen` one."""

    state: RequestState
    drafter: str
    chosen: str | None
    num_measured: int = 0
    num_steps: int = 0
    cost: float = 0.0

    @property
    def is_over(self) -> bool:
        return self.num_measured >= _NUM_ROUNDS or self.num_steps >= _MOST_STEPS


class Trials:
    """Decides when a drafter is tried, and with which request; one trial at a time."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._target_s, self._num_sharing = 0.0, 1
        self._watches: dict[str, _Watch] = {}
        self._trial: _Trial | None = None

    def covers(self, state: RequestState, drafter: str) -> bool:
        """Return whether a trial has this request draft with this drafter at any cost."""
        trial = self._trial
        return (
            trial is not None
            and trial.state is state
            and trial.drafter == drafter
            and not trial.is_over
        )

    # --- selection ------------------------------------------------------------------------------

    def before_choice(self, state: RequestState) -> None:
        """Restore the chosen drafter of a request whose next round begins."""
        trial = self._trial
        if trial is not None and trial.state is state:
            state.drafter = trial.chosen
            if trial.is_over:
                self._trial = None

    def after_choice(self, states: Sequence[RequestState], view: View) -> None:
        """Let a trial's request use its drafter, or begin a trial of an unused drafter."""
        if self._trial is None:
            used = {s.drafter for s in states}
            for name, drafter in view.drafters.items():
                may_try = name not in used and drafter.is_up and self._may_be_due(name)
                if not may_try or view.loads.get(name):
                    continue
                readers = [s for s in states if s.is_decoding and drafter.can_read(s)]
                able = [s for s in readers if s.num_remaining_tokens > _NUM_TOKENS]
                if self._begin_if_due(drafter, able):
                    break
        trial = self._trial
        if trial is not None and any([state is trial.state for state in states]):
            trial.chosen = trial.state.drafter
            if trial.drafter in view.drafters and view.drafters[trial.drafter].is_up:
                trial.state.drafter = trial.drafter

    # --- allocation -----------------------------------------------------------------------------

    def grant(
        self, candidates: Sequence[DraftCandidate], grants: list[Grant], view: View
    ) -> list[Grant]:
        """Add the draft of a trial to the policy's grants."""
        if self._trial is None:
            self._begin_unused(candidates, grants, view)
        if self._trial is None:
            return grants
        for i, candidate in enumerate(candidates):
            if candidate.drafter is not None and self.covers(candidate.state, candidate.drafter):
                own = grants[i].num_tokens
                left = view.room.budget - sum(g.num_tokens for g in grants)
                length = min(_NUM_TOKENS, candidate.limit, own + max(0, left))
                if length > grants[i].num_draft_tokens:
                    grants[i] = Grant(length)
        return grants

    def _begin_unused(
        self, candidates: Sequence[DraftCandidate], grants: Sequence[Grant], view: View
    ) -> None:
        """Begin the trial of a drafter that all requests could use, and none does."""
        used = {c.drafter for c, g in zip(candidates, grants, strict=True) if g.num_draft_tokens}
        for name in dict.fromkeys([c.drafter for c in candidates]):
            if name is None or name in used or not self._may_be_due(name):
                continue
            able = [c.state for c in candidates if c.drafter == name and c.limit >= _NUM_TOKENS]
            if self._begin_if_due(view.drafters[name], able):
                return

    # --- when -----------------------------------------------------------------------------------

    def _begin_if_due(self, drafter: Drafter, able: Sequence[RequestState]) -> bool:
        """Begin a trial with the request of which the drafter has least to read, if one is due."""
        name = drafter.name
        state = min(able, key=lambda s: s.num_unread(name), default=None)
        if state is None:
            return False
        if drafter.is_remote:
            # One request alone waits for it.
            waiting = _NUM_ROUNDS * self._times.draft_seconds(name, 1, _NUM_TOKENS)
            cost = waiting / self._num_sharing
        else:
            # A drafter's times may be wrong; it reads in less time than the target, of which more
            # is known.
            unread = state.num_unread(name)
            cost = min(unread * self._times.catch_up_of(name), self._times.target(unread))
        if not self._is_due(name, cost):
            return False
        self._begin(state, name)
        return True

    def _may_be_due(self, drafter: str) -> bool:
        """Return False where not even a trial without reading is due."""
        watch, pace = self._watches.get(drafter), self._times.target(1)
        is_same = watch is not None and 1 / _OTHER_PACE <= pace / watch.pace <= _OTHER_PACE
        return watch is None or not is_same or self._is_in_budget(watch, watch.cost)

    def _is_due(self, drafter: str, cost: float) -> bool:
        """Return whether the budget allows a trial of so many seconds at least."""
        pace = self._times.target(1)
        if not pace:
            return False
        watch = self._watches.get(drafter)
        if watch is None:
            first = _DOUBTFUL_SHARE * _FIRST_STEPS * pace
            watch = self._watches[drafter] = _Watch(self._target_s, pace, first)
        if not 1 / _OTHER_PACE <= pace / watch.pace <= _OTHER_PACE:
            watch.pace, watch.num_trials = pace, 0
        return self._is_in_budget(watch, max(watch.cost, cost))

    def _is_in_budget(self, watch: _Watch, cost: float) -> bool:
        share = _DOUBTFUL_SHARE if watch.num_trials < _MOST_DOUBTFUL else _SHARE
        return self._target_s - watch.since >= cost * len(self._watches) / share

    def _begin(self, state: RequestState, drafter: str) -> None:
        self._trial = _Trial(state, drafter, state.drafter)
        self._times.doubt(drafter)

    # --- what became of it ----------------------------------------------------------------------

    def on_result(self, result: StepResult) -> None:
        """Take in an ended step, after its times."""
        trial = self._trial
        if result.lane == TARGET and result.verdicts:
            seconds = result.finished_at - result.started_at
            self._target_s += seconds
            num = len(result.verdicts)
            if trial is None or trial.is_over:
                self._num_sharing = num
            elif any(v.request_id == trial.state.request.id for v in result.verdicts):
                num_tokens = num + sum(v.num_accepted for v in result.verdicts)
                trial.cost += seconds - self._times.target(num) * num_tokens / num
                trial.num_steps += 1
                if trial.is_over:
                    self._note(trial)
            else:
                trial.cost += seconds / (num + 1)  # it waits for its draft
        for timed in result.draft_times:
            if timed.steps:
                self.measured(timed.drafter)

    def measured(self, drafter: str) -> None:
        """Note that a drafter has drafted, in a trial or not."""
        watch, pace = self._watches.get(drafter), self._times.target(1)
        trial = self._trial
        if trial is not None and trial.drafter == drafter and not trial.is_over:
            trial.num_measured += 1
            if trial.is_over:
                self._note(trial)
        elif watch is not None:
            watch.since, watch.pace, watch.num_trials = self._target_s, pace, _MOST_DOUBTFUL

    def _note(self, trial: _Trial) -> None:
        watch = self._watches[trial.drafter]
        watch.since, watch.pace = self._target_s, self._times.target(1)
        watch.cost = max(trial.cost, watch.pace)
        watch.num_trials += 1

    def release_request(self, state: RequestState) -> None:
        trial = self._trial
        if trial is not None and trial.state is state:
            if not trial.is_over:
                self._note(trial)
            self._trial = None
