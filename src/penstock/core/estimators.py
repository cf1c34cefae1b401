"""What is learned while it runs: acceptance of drafts, and the times of steps.

Only positions up to and including the first rejection say anything about a drafter (design 4.3):
later drafts stand on a prefix that the target did not choose.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from penstock.core.types import TARGET, Request, StepResult, Verdict
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


class Traffic:
    """Lengths of the requests that have ended, recent ones counting most."""

    def __init__(self, memory: float = 1000.0) -> None:
        self._keep = 1 - 1 / memory
        self.weight = 0.0
        self._prompt = 0.0
        self._output = 0.0
        self._kv_steps = 0.0

    def arrived(self, request: Request, now: float) -> None:
        """A request has come."""

    def left(self, request: Request, num_output_tokens: int) -> None:
        """A request has ended, or was cancelled, after so many tokens."""


class Estimators:
    """Everything that policies may consult."""

    def __init__(self) -> None:
        self.acceptance = AcceptanceEstimator()
        self.step_times = StepTimes()
        self.traffic = Traffic()
