"""How likely draft tokens are accepted, by request and drafter.

Only positions up to and including the first rejection say anything about a drafter:
later drafts stand on a prefix that the target did not choose.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.core.types import Verdict


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
