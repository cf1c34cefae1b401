"""What is learned while it runs: acceptance of drafts, and the times of steps.

Only positions up to and including the first rejection say anything about a drafter:
later drafts stand on a prefix that the target did not choose.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.core.lengths import OutputLengths
from penstock.core.types import TARGET, Request, StepResult, Verdict
from penstock.fluid.step_profile import UNKNOWN, StepProfile, StepWork
from penstock.fluid.step_times import StepTimeCurve


@dataclass(slots=True)
class Beta:
    """A discounted Beta posterior of one acceptance probability, beside its prior's mean.

    Successes and failures fade by `discount` each round, so that the estimate follows drift and
    falls back on the prior, optimism included, when nothing is seen.
    """

    accepted: float = 0.0
    rejected: float = 0.0

    def observe(self, num_accepted: float, num_rejected: float) -> None:
        self.accepted += num_accepted
        self.rejected += num_rejected

    def fade(self, discount: float) -> None:
        self.accepted *= discount
        self.rejected *= discount

    def mean(self, prior_mean: float, prior_strength: float) -> float:
        total = self.accepted + self.rejected + prior_strength
        return (self.accepted + prior_mean * prior_strength) / total


_DRAFTER_DISCOUNT = 0.995
_PRIOR_MEAN = 0.7
_PRIOR_STRENGTH = 2.0


class SurvivalShape:
    """How one drafter's acceptance changes along a draft: at each position, the odds of acceptance
    over what its rate on the whole would give. What has been right so far mostly goes on being
    right, look-up above all; a first token follows a mistake, and is the hardest."""

    def __init__(self) -> None:
        self._decided = [0.0] * MOST_POSITIONS
        self._accepted = [0.0] * MOST_POSITIONS
        self._expected = [0.0] * MOST_POSITIONS
        self._factors = [1.0] * MOST_POSITIONS
        self._num_since = 0

    def observe(self, num_accepted: int, num_decided: int, rate: float) -> None:
        """A draft of which the first positions were decided; `rate` was expected of each."""
        for position in range(min(num_decided, MOST_POSITIONS)):
            self._decided[position] += 1
            self._expected[position] += rate
            self._accepted[position] += position < num_accepted
        self._num_since += 1
        if self._num_since == _SHAPE_EVERY:
            self._draw()

    def _draw(self) -> None:
        self._num_since = 0
        for position in range(MOST_POSITIONS):
            total = self._decided[position] + 2 * _SHAPE_PRIOR
            accepted = self._accepted[position] + _SHAPE_PRIOR
            expected = self._expected[position] + _SHAPE_PRIOR
            odds = accepted / (total - accepted) * (total - expected) / expected
            self._factors[position] = odds
            self._decided[position] *= _SHAPE_KEEP
            self._accepted[position] *= _SHAPE_KEEP
            self._expected[position] *= _SHAPE_KEEP

    def survival(self, rate: float, num_positions: int) -> list[float]:
        """G(1), …, G(num_positions): the probability that so many draft tokens are accepted, for a
        request whose tokens are accepted at this rate on the whole."""
        odds = rate / (1 - rate)
        survival, product = [], 1.0
        for factor in self._factors[:num_positions]:
            shifted = odds * factor
            product *= shifted / (1 + shifted)
            survival.append(product)
        return survival


MOST_POSITIONS = 16
"""Longest draft that survival is estimated for."""
_SHAPE_EVERY = 32
_SHAPE_KEEP = 0.99
_SHAPE_PRIOR = 10.0
_FLAT = SurvivalShape()
_UNSEEN = Beta()
_NOTHING: Mapping[str, Any] = {}


class AcceptanceEstimator:
    """Acceptance probability of a draft token by request and drafter.

    A request starts from what the drafter has shown on all requests, worth `prior_strength` tokens,
    unless more is known of it (`expect`).
    """

    def __init__(self, discount: float = 0.97, prior_strength: float = 4.0) -> None:
        self._discount = discount
        self._prior_strength = prior_strength
        self._by_request: defaultdict[str, dict[str, Beta]] = defaultdict(lambda: defaultdict(Beta))
        self._by_drafter: defaultdict[str, Beta] = defaultdict(Beta)
        self._expected: defaultdict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
        self._shapes: defaultdict[str, SurvivalShape] = defaultdict(SurvivalShape)

    def observe(self, verdict: Verdict) -> None:
        """Take in the evidence of one verification."""
        if verdict.drafter is None or not verdict.num_decided:
            return
        rate = self.mean(verdict.request_id, verdict.drafter)
        self._shapes[verdict.drafter].observe(verdict.num_accepted, verdict.num_decided, rate)
        accepted = verdict.evidence
        rejected = verdict.num_decided - accepted
        everybody = self._by_drafter[verdict.drafter]
        everybody.fade(_DRAFTER_DISCOUNT)
        everybody.observe(accepted, rejected)
        own = self._by_request[verdict.request_id][verdict.drafter]
        own.fade(self._discount)
        own.observe(accepted, rejected)

    def fade(self, request_id: str, drafter: str, num_rounds: int = 1) -> None:
        """Age a request's estimate by rounds in which it did not use the drafter: what was put
        aside is tried again in the end."""
        own = self._by_request.get(request_id, _NOTHING).get(drafter)
        if own is not None:
            own.fade(self._discount**num_rounds)

    def fade_drafter(self, drafter: str, num_rounds: int = 1) -> None:
        """Age what all requests have shown by rounds in which none of them used the drafter."""
        everybody = self._by_drafter.get(drafter)
        if everybody is not None:
            everybody.fade(_DRAFTER_DISCOUNT**num_rounds)

    def expect(self, request_id: str, drafter: str, mean: float, strength: float) -> None:
        """What is known of a request and a drafter from elsewhere: a mean worth `strength` tokens,
        in the place of what the drafter has shown on all requests."""
        self._expected[request_id][drafter] = mean, strength

    def mean(self, request_id: str, drafter: str) -> float:
        """Estimated acceptance probability, over all positions of a draft alike, in (0, 1)."""
        own = self._by_request.get(request_id, _NOTHING).get(drafter, _UNSEEN)
        expected = self._expected.get(request_id, _NOTHING).get(drafter)
        if expected is not None:
            return own.mean(*expected)
        everybody = self._by_drafter.get(drafter, _UNSEEN).mean(_PRIOR_MEAN, _PRIOR_STRENGTH)
        return own.mean(everybody, self._prior_strength)

    def survival(self, request_id: str, drafter: str, num_positions: int) -> list[float]:
        """Estimated G(1), …, G(num_positions): that so many draft tokens are accepted; at most
        `MOST_POSITIONS`."""
        return self.shape_of(drafter).survival(self.mean(request_id, drafter), num_positions)

    def shape_of(self, drafter: str) -> SurvivalShape:
        """How its acceptance goes along a draft."""
        return self._shapes.get(drafter, _FLAT)

    def forget(self, request_id: str) -> None:
        self._by_request.pop(request_id, None)
        self._expected.pop(request_id, None)


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


class Traffic:
    """Prompts that arrive: how long they are, and how many of their tokens come in a second. Both
    fade exponentially, by requests and by seconds."""

    def __init__(self, memory: float = 500.0, seconds: float = 30.0) -> None:
        self._keep = 1 - 1 / memory
        self._seconds = seconds
        self._weight = 0.0
        self._prompt_tokens = 0.0
        self._recent_tokens = 0.0
        self._since = self._last = 0.0

    def arrived(self, request: Request, now: float) -> None:
        """A request has come."""
        if not self._weight:
            self._since = self._last = now
        self._weight = self._keep * self._weight + 1
        self._prompt_tokens = self._keep * self._prompt_tokens + request.prompt_len
        self._recent_tokens *= math.exp((self._last - now) / self._seconds)
        self._recent_tokens += request.prompt_len
        self._last = now

    @property
    def mean_prompt_len(self) -> float:
        """Tokens; 1 before the first request."""
        return self._prompt_tokens / self._weight if self._weight else 1.0

    def prompt_tokens_per_s(self, now: float) -> float:
        """Rate of the recent past; 0 before anything is known."""
        known = 1 - math.exp((self._since - now) / self._seconds)
        if known <= 0:
            return 0.0
        recent = self._recent_tokens * math.exp((self._last - now) / self._seconds)
        return recent / (self._seconds * known)


@dataclass(slots=True)
class _Line:
    """A line through (tokens, seconds), by discounted least squares; it begins as one through the
    origin, so that an unknown slope is not taken for zero."""

    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_squared: float = 0.0
    product: float = 0.0
    error: float = 0.0

    def observe(self, tokens: float, seconds: float, keep: float) -> None:
        if self.weight:
            error = abs(seconds - self.at(tokens))
            self.error += (1 - keep) * (error - self.error)
        self.weight = keep * self.weight + 1
        self.tokens = keep * self.tokens + tokens
        self.seconds = keep * self.seconds + seconds
        self.tokens_squared = keep * self.tokens_squared + tokens * tokens
        self.product = keep * self.product + tokens * seconds

    @property
    def slope(self) -> float:
        weight = self.weight + _ORIGIN_WEIGHT
        spread = self.tokens_squared * weight - self.tokens**2
        if spread <= 0:
            return 0.0
        return max(0.0, (self.product * weight - self.tokens * self.seconds) / spread)

    @property
    def intercept(self) -> float:
        """Seconds at no tokens; not negative."""
        return max(0.0, (self.seconds - self.slope * self.tokens) / self.weight)

    def at(self, tokens: float) -> float:
        return self.intercept + self.slope * tokens


_ORIGIN_WEIGHT = 0.5
_LINK_KEEP = 0.95
_FIRST_PATIENCE_S = 2.0
_LEAST_PATIENCE_S = 0.05


class LinkTimes:
    """How long draft servers take from an order to its draft, measured here: a round trip, and so
    much for each draft token. What they say of themselves is not asked."""

    def __init__(self) -> None:
        self._lines: defaultdict[str, _Line] = defaultdict(_Line)

    def observe(self, drafter: str, num_tokens: int, seconds: float) -> None:
        """A draft has come, `seconds` after it was ordered."""
        self._lines[drafter].observe(num_tokens, seconds, _LINK_KEEP)

    def knows(self, drafter: str) -> bool:
        """Whether anything was measured."""
        return drafter in self._lines

    def round_trip(self, drafter: str) -> float:
        """Seconds of an order without tokens; the mean of the others where nothing was measured."""
        return self._of(drafter, lambda line: line.intercept)

    def per_token(self, drafter: str) -> float:
        """Seconds of each further draft token; likewise."""
        return self._of(drafter, lambda line: line.slope)

    def seconds(self, drafter: str, num_tokens: int) -> float:
        """Expected seconds until a draft of so many tokens is here."""
        return self.round_trip(drafter) + self.per_token(drafter) * num_tokens

    def spread(self, drafter: str) -> float:
        """Mean error of `seconds`; 0 where nothing was measured."""
        line = self._lines.get(drafter)
        return 0.0 if line is None else line.error

    def patience(self, drafter: str, num_tokens: int) -> float:
        """Seconds after which a draft is given up: well beyond what is usual."""
        line = self._lines.get(drafter)
        if line is None:
            return _FIRST_PATIENCE_S
        return _LEAST_PATIENCE_S + 2 * line.at(num_tokens) + 4 * line.error

    def forget(self, drafter: str) -> None:
        """The server has gone."""
        self._lines.pop(drafter, None)

    def _of(self, drafter: str, value: Callable[[_Line], float]) -> float:
        if drafter in self._lines:
            return value(self._lines[drafter])
        known = [value(line) for line in self._lines.values()]
        return sum(known) / len(known) if known else 0.0


class Estimators:
    """Everything that policies may consult. `profile`: what is known of the target's step times
    beforehand."""

    def __init__(self, profile: StepProfile | None = None) -> None:
        self.acceptance = AcceptanceEstimator()
        self.step_times = StepTimes()
        self.step_model = StepModel(profile or UNKNOWN)
        self.links = LinkTimes()
        self.traffic = Traffic()
        self.lengths = OutputLengths()
