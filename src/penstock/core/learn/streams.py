"""Acceptance of the next draft token, from one stream of drafts, such as a tenant's.

Rounds without a draft count. Positions behind the first rejection stand on a prefix that the target
did not choose: only `Smoothed` can use them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.core.types import Verdict

_MAX_ACCEPTANCE = 0.99  # keeps expected lengths finite


class Evidence(NamedTuple):
    """Evidence of one verification."""

    num_proposed: int
    num_decided: int  # the first ones, decided on the target's prefix
    successes: float  # of these: accepted ones, or Σ min(target, draft)
    successes_all: float = 0.0  # among all proposed, on any prefix

    @classmethod
    def from_verdict(cls, verdict: Verdict) -> Evidence:
        return cls(
            verdict.num_proposed,
            verdict.num_decided,
            verdict.evidence,
            successes_all=verdict.evidence_all,
        )


class StreamModel(ABC):
    """Interface of the estimators."""

    @abstractmethod
    def add_evidence(self, evidence: Evidence) -> None:
        """Take in a round; one without a draft has `num_proposed` 0."""

    @abstractmethod
    def rate(self) -> float:
        """Return the probability in [0, 1) that a token behind accepted ones is accepted."""


class Smoothed(StreamModel):
    """Exponential smoothing (GoodSpeed eq. 3).

    α̂ ← (1 − η) α̂ + η · mean of min(1, target / draft) over the S positions of the draft; with
    `decided_only` over those up to the first rejection. on_empty: acceptance of a round without a
    draft, where eq. 3 divides by S = 0; None keeps α̂. `step` is η, which its owner may change."""

    def __init__(
        self, rate: float, step: float, on_empty: float | None = None, decided_only: bool = False
    ) -> None:
        self.step = step
        self._rate = rate
        self._on_empty = on_empty
        self._decided_only = decided_only

    def add_evidence(self, evidence: Evidence) -> None:
        observed = self._on_empty
        if self._decided_only and evidence.num_decided:
            observed = evidence.successes / evidence.num_decided
        elif evidence.num_proposed:
            observed = evidence.successes_all / evidence.num_proposed
        if observed is not None:
            self._rate += self.step * (observed - self._rate)

    def rate(self) -> float:
        return min(self._rate, _MAX_ACCEPTANCE)


class Population:
    """Acceptance over all streams, the expectation for a new one; first 0.5, worth one token."""

    def __init__(self) -> None:
        self._successes, self._decided = 0.5, 1.0

    def add_evidence(self, evidence: Evidence) -> None:
        self._successes = _POPULATION_DECAY * self._successes + evidence.successes
        self._decided = _POPULATION_DECAY * self._decided + evidence.num_decided

    def mean(self) -> float:
        return self._successes / self._decided


_POPULATION_DECAY = 0.999  # memory a token of all streams; chosen by hand


class Steady(StreamModel):
    """Beta posterior over all tokens; its prior is the population's mean, worth six tokens."""

    def __init__(self, prior: Population) -> None:
        self._prior = prior
        self._accepted = self._rejected = 0.0

    def add_evidence(self, evidence: Evidence) -> None:
        self._accepted += evidence.successes
        self._rejected += evidence.num_decided - evidence.successes

    def rate(self) -> float:
        accepted = self._accepted + _PRIOR_TOKENS * self._prior.mean()
        rate = accepted / (self._accepted + self._rejected + _PRIOR_TOKENS)
        return min(rate, _MAX_ACCEPTANCE)


_PRIOR_TOKENS = 6.0  # chosen by hand


class Switching(StreamModel):
    """Acceptance that jumps at times: the exact Bayesian filter for rates on a grid.

    The probability of a jump in a round is unknown (as in Fearnhead and Liu's change points).
    Targets of jumps are learned too, as streams return to earlier levels; at first all are equally
    likely."""

    def __init__(self) -> None:
        self._posterior = _JUMP_PRIOR[:, None] * np.full(len(_LEVELS), 1 / len(_LEVELS))
        self._visited = np.full(len(_LEVELS), _UNKNOWN_ROUNDS / len(_LEVELS))
        self._rate = 0.5

    def add_evidence(self, evidence: Evidence) -> None:
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
_JUMPS = np.array([0.0, 0.003, 0.01, 0.03, 0.1])[:, None]  # jump probabilities a round
_STAY = 1 - _JUMPS
_JUMP_PRIOR = np.full(len(_JUMPS), 1 / len(_JUMPS))
_UNKNOWN_ROUNDS = 20.0  # rounds that the uniform distribution of levels counts for; chosen by hand
_VISITED_DECAY = 0.998  # memory of visited levels a round; chosen by hand

_SPREAD = 0.002  # share of the weight, every round; chosen by hand
_OPTIMISM = 0.5  # standard deviations between estimators, added to their mean; chosen by hand


class Bank(StreamModel):
    """Several estimators, weighted by predictions (fixed share; Herbster and Warmuth, 1998)."""

    def __init__(self, experts: Sequence[StreamModel]) -> None:
        self._experts = tuple(experts)
        self._weights = [1 / len(experts)] * len(experts)

    def add_evidence(self, evidence: Evidence) -> None:
        if evidence.num_decided:
            self._judge(evidence.successes, evidence.num_decided - evidence.successes)
        for expert in self._experts:
            expert.add_evidence(evidence)

    def _judge(self, accepted: float, rejected: float) -> None:
        scores = [
            accepted * math.log(max(r, 1e-9)) + rejected * math.log(1 - r)
            for r in (e.rate() for e in self._experts)
        ]
        best = max(scores)
        weights = [w * math.exp(s - best) for w, s in zip(self._weights, scores, strict=True)]
        total = sum(weights)
        even = _SPREAD / len(weights)
        self._weights = [(1 - _SPREAD) * w / total + even for w in weights]

    def rate(self) -> float:
        rates = [e.rate() for e in self._experts]
        mean = sum(w * r for w, r in zip(self._weights, rates, strict=True))
        spread = sum(w * (r - mean) ** 2 for w, r in zip(self._weights, rates, strict=True))
        return min(mean + _OPTIMISM * math.sqrt(spread), _MAX_ACCEPTANCE)


def switching_or_steady(prior: Population) -> StreamModel:
    """Return a bank of a steady and a jumping estimator."""
    return Bank([Steady(prior), Switching()])
