"""How likely the next draft token is accepted, learned from verdicts: one interface, several
estimators.

Positions up to and including the first rejection say what a drafter is worth: later drafts stand on
a prefix that the target did not choose. Only `Smoothed` can go by all of them. An estimator belongs
to one stream of drafts, such as a tenant's with one drafter, and is told of every round, also of
those without a draft.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from penstock.core.types import Verdict

_MAX_ACCEPTANCE = 0.99


class Evidence(NamedTuple):
    """What one verification showed: of `num_proposed` draft tokens the first `num_decided` were
    decided, with `successes` among them (accepted ones, or Σ min(target, draft)).
    `successes_all`: among all proposed, whatever prefix they stand on."""

    num_proposed: int
    num_decided: int
    successes: float
    successes_all: float = 0.0

    @classmethod
    def of(cls, verdict: Verdict) -> Evidence:
        return cls(
            verdict.num_proposed,
            verdict.num_decided,
            verdict.evidence,
            successes_all=verdict.evidence_all,
        )


class StreamModel(ABC):
    """What all estimators can do."""

    @abstractmethod
    def observe(self, evidence: Evidence) -> None:
        """Take in a round; one without a draft has `num_proposed` 0."""

    @abstractmethod
    def rate(self) -> float:
        """Probability in [0, 1) that the next draft token is accepted if those before it were."""


class Smoothed(StreamModel):
    """Exponential smoothing (GoodSpeed eq. 3): α̂ ← (1 − η) α̂ + η · mean of min(1, target / draft)
    over the S positions of the draft; with `decided_only` over those up to the first rejection.

    least: α̂ never falls below it: at 0 nothing would ever be drafted again. on_empty: the
    acceptance that a round without a draft counts as, where eq. 3 divides by S = 0; None leaves α̂
    as it is. `step` is η, which its owner may change.
    """

    def __init__(
        self,
        rate: float,
        step: float,
        on_empty: float | None = None,
        *,
        least: float = 0.0,
        decided_only: bool = False,
    ) -> None:
        self.step = step
        self._rate = rate
        self._least = least
        self._on_empty = on_empty
        self._decided_only = decided_only

    def observe(self, evidence: Evidence) -> None:
        observed = self._on_empty
        if self._decided_only and evidence.num_decided:
            observed = evidence.successes / evidence.num_decided
        elif evidence.num_proposed:
            observed = evidence.successes_all / evidence.num_proposed
        if observed is not None:
            self._rate = max(self._least, self._rate + self.step * (observed - self._rate))

    def rate(self) -> float:
        return min(self._rate, _MAX_ACCEPTANCE)


class Population:
    """Acceptance over all streams: what a new one is expected to be like. `prior_mean` counts as
    one token."""

    def __init__(self, prior_mean: float) -> None:
        self._successes = prior_mean
        self._decided = 1.0

    def observe(self, evidence: Evidence) -> None:
        self._successes = _POPULATION_DECAY * self._successes + evidence.successes
        self._decided = _POPULATION_DECAY * self._decided + evidence.num_decided

    def mean(self) -> float:
        return self._successes / self._decided


_POPULATION_DECAY = 0.999


class DiscountedBeta(StreamModel):
    """Beta posterior that counts tokens, fades by `discount` a round, and so falls back on the
    prior (the population's mean, worth `strength` tokens) where nothing is drafted any more.

    optimism: posterior standard deviations added to the mean, so that what is little known is
    tried.
    """

    def __init__(
        self, prior: Population, discount: float, strength: float = 6.0, optimism: float = 0.0
    ) -> None:
        self._prior = prior
        self._discount = discount
        self._strength = strength
        self._optimism = optimism
        self._accepted = self._rejected = 0.0

    def observe(self, evidence: Evidence) -> None:
        self._accepted = self._discount * self._accepted + evidence.successes
        rejected = evidence.num_decided - evidence.successes
        self._rejected = self._discount * self._rejected + rejected

    def mean(self) -> float:
        """Of the posterior."""
        accepted = self._accepted + self._strength * self._prior.mean()
        return accepted / (self._accepted + self._rejected + self._strength)

    def rate(self) -> float:
        mean = self.mean()
        count = self._accepted + self._rejected + self._strength
        deviation = math.sqrt(mean * (1 - mean) / (count + 1))
        return min(mean + self._optimism * deviation, _MAX_ACCEPTANCE)


class Switching(StreamModel):
    """Acceptance that stays as it is and now and then jumps: the exact Bayesian filter for rates on
    a grid and an unknown probability of a jump in a round (as Fearnhead and Liu's change points).

    Where a jump leads is learned too: a stream often returns to levels that it had before, as its
    user does to a task. At first every level is equally likely, which counts as `_UNKNOWN_ROUNDS`.
    """

    def __init__(self) -> None:
        self._posterior = _JUMP_PRIOR[:, None] * np.full(len(_LEVELS), 1 / len(_LEVELS))
        self._visited = np.full(len(_LEVELS), _UNKNOWN_ROUNDS / len(_LEVELS))
        self._rate = 0.5

    def observe(self, evidence: Evidence) -> None:
        posterior = self._posterior
        if evidence.num_decided:
            rejected = evidence.num_decided - evidence.successes
            scores = evidence.successes * _LOG_LEVELS + rejected * _LOG_MISSES
            posterior = posterior * np.exp(scores - scores.max())
            posterior /= posterior.sum()
        weights = posterior.sum(axis=1, keepdims=True)
        goal = self._visited / self._visited.sum()
        self._posterior = _STAY * posterior + _JUMPS * weights * goal
        self._rate = float(self._posterior.sum(axis=0) @ _LEVELS)
        if evidence.num_decided:
            self._visited *= _VISITED_DECAY
            self._visited += posterior.sum(axis=0)

    def rate(self) -> float:
        return self._rate


_LEVELS = (np.arange(25) + 0.5) / 25
_LOG_LEVELS = np.log(_LEVELS)
_LOG_MISSES = np.log(1 - _LEVELS)
_JUMPS = np.array([0.0, 0.003, 0.01, 0.03, 0.1])[:, None]
_STAY = 1 - _JUMPS
_JUMP_PRIOR = np.full(len(_JUMPS), 1 / len(_JUMPS))
_UNKNOWN_ROUNDS = 20.0
_VISITED_DECAY = 0.998


class Bank(StreamModel):
    """Several estimators, weighted by how well each predicted the outcomes so far: no single
    discount is right for both a steady stream and one that jumps.

    share: of the weight that is spread evenly every round, so that another estimator can take
    over (fixed share; Herbster and Warmuth, 1998). optimism: standard deviations, of the estimators
    around their mean, added to it.
    """

    def __init__(
        self, experts: Sequence[StreamModel], share: float = 0.002, optimism: float = 0.5
    ) -> None:
        self._experts = tuple(experts)
        self._weights = [1 / len(experts)] * len(experts)
        self._share = share
        self._optimism = optimism

    def observe(self, evidence: Evidence) -> None:
        if evidence.num_decided:
            self._judge(evidence.successes, evidence.num_decided - evidence.successes)
        for expert in self._experts:
            expert.observe(evidence)

    def _judge(self, accepted: float, rejected: float) -> None:
        scores = [
            accepted * math.log(max(r, 1e-9)) + rejected * math.log(1 - r)
            for r in (e.rate() for e in self._experts)
        ]
        best = max(scores)
        weights = [w * math.exp(s - best) for w, s in zip(self._weights, scores, strict=True)]
        total = sum(weights)
        even = self._share / len(weights)
        self._weights = [(1 - self._share) * w / total + even for w in weights]

    def rate(self) -> float:
        rates = [e.rate() for e in self._experts]
        mean = sum(w * r for w, r in zip(self._weights, rates, strict=True))
        spread = sum(w * (r - mean) ** 2 for w, r in zip(self._weights, rates, strict=True))
        return min(mean + self._optimism * math.sqrt(spread), _MAX_ACCEPTANCE)


_DISCOUNTS = (1.0, 0.99, 0.97, 0.9)

ESTIMATORS: Mapping[str, Callable[[Population], StreamModel]] = {
    "beta": lambda prior: DiscountedBeta(prior, 0.98, optimism=1.0),
    "discounts": lambda prior: Bank([DiscountedBeta(prior, d) for d in _DISCOUNTS]),
    "switching": lambda prior: Bank([DiscountedBeta(prior, 1.0), Switching()]),
}
"""What a policy may choose from. beta: one discount, with optimism. discounts: a bank from no
discount to a memory of ten rounds. switching: all rounds alike, or jumps between levels, whichever
has predicted better."""
