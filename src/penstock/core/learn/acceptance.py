"""Acceptance probability of draft tokens, by request and drafter.

Only positions up to and including the first rejection count: later ones stand on a prefix that the
target did not choose."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.core.learn.matches import MatchRates
from penstock.core.learn.saved import number, numbers
from penstock.core.types import Verdict

FloatArray = NDArray[np.float64]


@dataclass(slots=True)
class Beta:
    """Beta posterior of an acceptance probability; counts fade towards the prior each round."""

    accepted: float = 0.0
    rejected: float = 0.0

    def add_round(self, num_accepted: float, num_rejected: float, discount: float) -> None:
        """Add a round's counts to those before it, which fade."""
        self.accepted = discount * self.accepted + num_accepted
        self.rejected = discount * self.rejected + num_rejected

    def fade(self, discount: float) -> None:
        self.accepted *= discount
        self.rejected *= discount

    def mean(self, prior_mean: float, prior_strength: float) -> float:
        total = self.accepted + self.rejected + prior_strength
        return (self.accepted + prior_mean * prior_strength) / total


_DRAFTER_DISCOUNT = 0.995  # memory a draft of a drafter's mean; chosen by hand, like the next ones
_PRIOR_MEAN = 0.7  # acceptance before any evidence
_PRIOR_STRENGTH = 2.0  # tokens that this counts for
_TRIAL_SHARE = 0.015  # of the time, for trials of unused drafters


class SurvivalShape:
    """Change of one drafter's acceptance along a draft.

    At each position, the odds of acceptance over what the overall rate would give. First tokens
    follow a mistake and are the hardest."""

    def __init__(self) -> None:
        self._decided = [0.0] * MOST_POSITIONS
        self._accepted = [0.0] * MOST_POSITIONS
        self._expected = [0.0] * MOST_POSITIONS
        self.factors = [1.0] * MOST_POSITIONS
        self._num_since = 0

    def add_round(self, num_accepted: int, num_decided: int, rate: float) -> None:
        """Take in a draft whose first positions were decided; `rate` was expected of each."""
        for position in range(min(num_decided, MOST_POSITIONS)):
            self._decided[position] += 1
            self._expected[position] += rate
            self._accepted[position] += position < num_accepted
        self._num_since += 1
        if self._num_since == _SHAPE_EVERY:
            self._draw()

    def state(self) -> list[tuple[float, ...]]:
        return [*zip(self._decided, self._accepted, self._expected, strict=True)]

    def restore(self, state: Any) -> None:
        for i, (decided, *parts) in zip(range(MOST_POSITIONS), state, strict=True):
            self._decided[i] = number(decided)
            self._accepted[i], self._expected[i] = (number(part, decided) for part in parts)
        self._draw()

    def _draw(self) -> None:
        self._num_since = 0
        for position in range(MOST_POSITIONS):
            total = self._decided[position] + 2 * _SHAPE_PRIOR
            accepted = self._accepted[position] + _SHAPE_PRIOR
            expected = self._expected[position] + _SHAPE_PRIOR
            odds = accepted / (total - accepted) * (total - expected) / expected
            self.factors[position] = odds
            self._decided[position] *= _SHAPE_KEEP
            self._accepted[position] *= _SHAPE_KEEP
            self._expected[position] *= _SHAPE_KEEP


def survival_of(rates: FloatArray, factors: FloatArray) -> FloatArray:
    """Return the survival G(1), …, G(K) of drafts at overall acceptance rates [...], [..., K].

    factors: of a shape, [..., K]."""
    odds = (rates / (1 - rates))[..., None] * factors
    return np.asarray((odds / (1 + odds)).cumprod(axis=-1))


MOST_POSITIONS = 16  # longest draft that survival is estimated for
_SHAPE_EVERY = 32  # drafts between two updates of the survival table
_SHAPE_KEEP = 0.99  # memory of a position's odds a draft
_SHAPE_PRIOR = 10.0  # expected tokens that the flat shape counts for
_FLAT = SurvivalShape()
_UNSEEN = Beta()
_NOTHING: Mapping[str, Any] = {}


class _Rates:
    """Posteriors by request and drafter, starting from the drafter's overall one."""

    def __init__(self, discount: float, strength: float, prior_mean: float) -> None:
        self._discount = discount
        self._strength = strength
        self._prior_mean = prior_mean
        self._by_request: defaultdict[str, dict[str, Beta]] = defaultdict(lambda: defaultdict(Beta))
        self._by_drafter: defaultdict[str, Beta] = defaultdict(Beta)

    def add_evidence(
        self, request_id: str, drafter: str, num_right: float, num_wrong: float
    ) -> None:
        self._by_drafter[drafter].add_round(num_right, num_wrong, _DRAFTER_DISCOUNT)
        self._by_request[request_id][drafter].add_round(num_right, num_wrong, self._discount)

    def fade(self, request_id: str, drafter: str, num_rounds: float, trial: float) -> None:
        own = self._by_request.get(request_id, _NOTHING).get(drafter)
        if own is not None:
            own.fade(_faded(self._discount, num_rounds, trial))

    def fade_drafter(self, drafter: str, num_rounds: float, trial: float) -> None:
        overall = self._by_drafter.get(drafter)
        if overall is not None:
            overall.fade(_faded(_DRAFTER_DISCOUNT, num_rounds, trial))

    def state(self) -> dict[str, list[float]]:
        """Return the drafters' counts, without those of single requests."""
        known = self._by_drafter.items()
        return {n: [max(0.0, beta.accepted), max(0.0, beta.rejected)] for n, beta in known}

    def restore(self, state: Any) -> None:
        self._by_drafter |= {name: Beta(*numbers(counts)) for name, counts in state.items()}

    def knows(self, drafter: str) -> bool:
        return drafter in self._by_drafter

    def mean(
        self, request_id: str, drafter: str, expected: tuple[float, float] | None = None
    ) -> float:
        """Return the mean; `expected` (mean, strength) replaces the drafter's overall one."""
        own = self._by_request.get(request_id, _NOTHING).get(drafter, _UNSEEN)
        if expected is not None:
            return own.mean(*expected)
        overall = self._by_drafter.get(drafter, _UNSEEN).mean(self._prior_mean, _PRIOR_STRENGTH)
        return own.mean(overall, self._strength)

    def release_request(self, request_id: str) -> None:
        self._by_request.pop(request_id, None)


def _faded(discount: float, num_rounds: float, trial: float) -> float:
    """Return the discount of some rounds, weaker if a trial takes long."""
    pace = 1.0 if not trial else min(1.0, _TRIAL_SHARE / ((1 - discount) * trial))
    return float(discount ** (num_rounds * pace))


class AcceptanceEstimator:
    """Acceptance of a draft token, and probability of a draft, by request and drafter."""

    def __init__(self, discount: float = 0.97, prior_strength: float = 4.0) -> None:
        self._tokens = _Rates(discount, prior_strength, _PRIOR_MEAN)
        self._drafts = _Rates(discount, prior_strength, 1.0)
        self._expected: defaultdict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
        self._shapes: defaultdict[str, SurvivalShape] = defaultdict(SurvivalShape)
        self.matches = MatchRates()
        """Acceptance of looked-up tokens."""

    def state(self) -> dict[str, Any]:
        """Return what is known of each drafter over all requests, as plain values."""
        shapes = {name: shape.state() for name, shape in self._shapes.items()}
        return {
            "tokens": self._tokens.state(),
            "drafts": self._drafts.state(),
            "shapes": shapes,
            "matches": self.matches.state(),
        }

    def restore(self, state: Any) -> None:
        """Take over a `state`, before any request."""
        self._tokens.restore(state["tokens"])
        self._drafts.restore(state["drafts"])
        for name, shape in state["shapes"].items():
            self._shapes[name].restore(shape)
        self.matches.restore(state["matches"])

    def on_verdict(self, verdict: Verdict) -> None:
        if verdict.drafter is None or verdict.num_proposed == verdict.num_looked_up:
            return
        request_id, drafter = verdict.request_id, verdict.drafter
        if decided := verdict.num_decided:
            rate, accepted = self.mean(request_id, drafter), verdict.evidence
            num_right = verdict.num_accepted - verdict.num_looked_up
            self._shapes[drafter].add_round(num_right, decided, rate)
            self._tokens.add_evidence(request_id, drafter, accepted, decided - accepted)
        if self._drafts.knows(drafter):
            self._drafts.add_evidence(request_id, drafter, 1, 0)

    def observe_empty(self, request_id: str, drafter: str) -> None:
        """Note that an ordered draft was empty."""
        self._drafts.add_evidence(request_id, drafter, 0, 1)

    def fade(
        self, request_id: str, drafter: str, num_rounds: float = 1, trial: float = 0.0
    ) -> None:
        """Age a request's estimate by rounds without the drafter, slower for long trials."""
        for rates in (self._tokens, self._drafts):
            rates.fade(request_id, drafter, num_rounds, trial)

    def fade_drafter(self, drafter: str, num_rounds: float = 1, trial: float = 0.0) -> None:
        """Age a drafter's overall estimate by rounds in which no request used it."""
        for rates in (self._tokens, self._drafts):
            rates.fade_drafter(drafter, num_rounds, trial)

    def expect(self, request_id: str, drafter: str, mean: float, strength: float) -> None:
        """Replace a request's prior by a mean worth `strength` tokens."""
        self._expected[request_id][drafter] = mean, strength

    def mean(self, request_id: str, drafter: str) -> float:
        """Return the estimated acceptance over all positions of a draft, in (0, 1)."""
        expected = self._expected.get(request_id, _NOTHING).get(drafter)
        return self._tokens.mean(request_id, drafter, expected)

    def expected_tokens(self, request_id: str, drafter: str, num_draft_tokens: int) -> float:
        """Return the expected tokens of a verification of such a draft: accepted + 1."""
        rate = self.mean(request_id, drafter)
        return (1 - rate ** (num_draft_tokens + 1)) / (1 - rate)

    def found(self, request_id: str, drafter: str) -> float:
        """Return the estimated probability that an ordered draft is not empty; 1 until one is."""
        return self._drafts.mean(request_id, drafter) if self._drafts.knows(drafter) else 1.0

    def survival(self, request_id: str, drafter: str, num_positions: int) -> list[float]:
        """Return the estimated G(1), …, G(num_positions) of a draft; at most `MOST_POSITIONS`."""
        factors = np.array(self.shape_of(drafter).factors[:num_positions])
        found = survival_of(np.array(self.mean(request_id, drafter)), factors)
        return found.tolist()  # type: ignore[no-any-return]

    def shape_of(self, drafter: str) -> SurvivalShape:
        return self._shapes.get(drafter, _FLAT)

    def release_request(self, request_id: str) -> None:
        self._tokens.release_request(request_id)
        self._drafts.release_request(request_id)
        self.matches.release_request(request_id)
        self._expected.pop(request_id, None)
