"""What is learned while it runs: acceptance of drafts, and the times of steps.

Only positions up to and including the first rejection say anything about a drafter (design 4.3):
later drafts stand on a prefix that the target did not choose.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

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


_NOTHING = Beta()
_DRAFTER_DISCOUNT = 0.995
_PRIOR_MEAN = 0.7
_PRIOR_STRENGTH = 2.0


class AcceptanceEstimator:
    """Acceptance probability of a draft token by request and drafter.

    A request starts from what the drafter has shown on all requests, worth `prior_strength` tokens.
    """

    def __init__(self, discount: float = 0.97, prior_strength: float = 4.0) -> None:
        self._discount = discount
        self._prior_strength = prior_strength
        self._by_request: defaultdict[tuple[str, str], Beta] = defaultdict(Beta)
        self._by_drafter: defaultdict[str, Beta] = defaultdict(Beta)

    def observe(self, verdict: Verdict) -> None:
        """Take in the evidence of one verification."""
        if verdict.drafter is None or not verdict.num_decided:
            return
        accepted = verdict.evidence
        rejected = verdict.num_decided - accepted
        everybody = self._by_drafter[verdict.drafter]
        everybody.fade(_DRAFTER_DISCOUNT)
        everybody.observe(accepted, rejected)
        own = self._by_request[verdict.request_id, verdict.drafter]
        own.fade(self._discount)
        own.observe(accepted, rejected)

    def fade(self, request_id: str, drafter: str) -> None:
        """Age a request's estimate by a round in which it did not use the drafter: what was put
        aside is tried again in the end."""
        own = self._by_request.get((request_id, drafter))
        if own is not None:
            own.fade(self._discount)

    def fade_drafter(self, drafter: str) -> None:
        """Age what all requests have shown by a round in which none of them used the drafter."""
        everybody = self._by_drafter.get(drafter)
        if everybody is not None:
            everybody.fade(_DRAFTER_DISCOUNT)

    def mean(self, request_id: str, drafter: str) -> float:
        """Estimated acceptance probability in (0, 1)."""
        everybody = self._by_drafter.get(drafter, _NOTHING).mean(_PRIOR_MEAN, _PRIOR_STRENGTH)
        own = self._by_request.get((request_id, drafter), _NOTHING)
        return own.mean(everybody, self._prior_strength)

    def forget(self, request_id: str) -> None:
        for key in [k for k in self._by_request if k[0] == request_id]:
            del self._by_request[key]


class StepTimes:
    """Measured times: the target's step against its rows, a drafting step against its batch."""

    def __init__(self) -> None:
        self.target = StepTimeCurve()
        self.by_drafter: dict[str, StepTimeCurve] = {}

    def observe(self, result: StepResult) -> None:
        if result.lane == TARGET and result.num_rows:
            seconds = (result.phases.verify + result.phases.sample) / result.repeats
            self.target.observe(result.num_rows, seconds)
        for timed in result.draft_times:
            # A long catch-up is prefill; it says nothing about the price of one more draft token.
            if timed.steps and timed.num_catch_up_tokens <= 2 * timed.batch:
                self.curve_of(timed.drafter).observe(timed.batch, timed.seconds / timed.steps)

    def curve_of(self, drafter: str) -> StepTimeCurve:
        """Seconds of one drafting step against its batch; empty while not measured."""
        return self.by_drafter.setdefault(drafter, StepTimeCurve())


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
