"""What a request's acceptance by every drafter is expected to be, learned over requests.

The log-odds of acceptance of one request are normal around a mean that depends linearly on the
request's features, and drafters are correlated: an easy text is easy for most of them.

    theta_i ~ N(W x_i, S)        accepted_ij | theta_ij  binomial with odds exp(theta_ij)

A request in progress has a posterior for ALL drafters, those it has never used included. When it
ends it updates W (recursive least squares, one regression a drafter) and S (one step of online EM).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_MEAN = 0.8
_VARIANCE = 1.5
_CORRELATION = 0.5
"""Before anything is learned: log-odds of a drafter, and between drafters."""
_BIAS_VARIANCE = 1.0
_FEATURE_VARIANCE = 2.0
_NEWTON_STEPS = 3
_LEAST_RATE = 0.01
_EM_WEIGHT = 12.0
"""Requests that the first covariance counts for."""
_MOST_LOGIT = 6.0


class Posterior:
    """Log-odds of one request's acceptance, normal: mean [J], covariance [J, J]."""

    __slots__ = ("covariance", "mean")

    def __init__(self, mean: FloatArray, covariance: FloatArray) -> None:
        self.mean = mean
        self.covariance = covariance

    @property
    def variance(self) -> FloatArray:
        """[J]"""
        return np.diagonal(self.covariance)

    def rates(self) -> FloatArray:
        """[J] expected acceptance probability."""
        rates: FloatArray = _logistic(self.mean / np.sqrt(1 + np.pi / 8 * self.variance))
        return rates


class AcceptancePrior:
    """Learns over requests. The caller numbers the drafters: columns 0 to J - 1."""

    def __init__(self, num_features: int) -> None:
        self._num_features = num_features
        self._weights = np.zeros((0, num_features))
        self._spread = np.zeros((0, num_features, num_features))
        self._covariance = np.zeros((0, 0))
        self._num_learned = 0

    def grow(self, num_drafters: int) -> None:
        """Know so many drafters from now on."""
        old = len(self._weights)
        if num_drafters <= old:
            return
        weights = np.zeros((num_drafters, self._num_features))
        weights[:, 0] = _MEAN
        spread = np.full(self._num_features, _FEATURE_VARIANCE)
        spread[0] = _BIAS_VARIANCE
        spreads = np.repeat(np.diag(spread)[None], num_drafters, axis=0)
        covariance = np.full((num_drafters, num_drafters), _VARIANCE * _CORRELATION)
        np.fill_diagonal(covariance, _VARIANCE)
        weights[:old], spreads[:old] = self._weights, self._spread
        covariance[:old, :old] = self._covariance
        self._weights, self._spread, self._covariance = weights, spreads, covariance

    def mean(self, features: FloatArray) -> FloatArray:
        """[J] expected log-odds of a request with these features [F]."""
        means: FloatArray = self._weights @ features
        return means

    def doubt(self, features: FloatArray) -> FloatArray:
        """[J] standard deviation of that mean, which more requests would lower."""
        variance: FloatArray = (self._spread @ features) @ features
        return np.sqrt(np.maximum(variance, 0.0))

    def posterior(self, mean: FloatArray, accepted: FloatArray, rejected: FloatArray) -> Posterior:
        """What is known of a request with prior mean [J] after so many accepted and rejected tokens
        of every drafter [J]: Laplace's approximation."""
        total = accepted + rejected
        seen = np.flatnonzero(total > 0)
        if not len(seen):
            return Posterior(mean, self._covariance)
        cross = self._covariance[:, seen]
        theta = mean
        for _ in range(_NEWTON_STEPS):
            rate = _logistic(theta[seen])
            information = np.maximum(total[seen] * rate * (1 - rate), 1e-3)
            working = theta[seen] + (accepted[seen] - total[seen] * rate) / information
            inner = cross[seen]
            inner.flat[:: len(seen) + 1] += 1 / information
            # The covariance is positive definite, and small: an inverse is as good as a solution.
            gain = cross @ (np.linalg.inv(inner) if len(seen) > 1 else 1 / inner)
            theta = np.clip(mean + gain @ (working - mean[seen]), -_MOST_LOGIT, _MOST_LOGIT)
        return Posterior(theta, self._covariance - gain @ cross.T)

    def learn(self, features: FloatArray, accepted: FloatArray, rejected: FloatArray) -> None:
        """A request with these features [F] has ended; its tokens by drafter [J]."""
        mean = self.mean(features)
        posterior = self.posterior(mean, accepted, rejected)
        own = np.diagonal(self._covariance)
        left = np.maximum(np.diagonal(posterior.covariance), 1e-6)
        precision = 1 / left - 1 / own
        for j in np.flatnonzero(precision > 1e-3):
            # What the posterior says beyond the prior, as one measurement of the mean.
            measured = (posterior.mean[j] / left[j] - mean[j] / own[j]) / precision[j]
            noise = own[j] + 1 / precision[j]
            reach = self._spread[j] @ features
            gain = reach / (features @ reach + noise)
            self._weights[j] += gain * (measured - mean[j])
            self._spread[j] -= np.outer(gain, reach)
        rate = max(_LEAST_RATE, 1 / (_EM_WEIGHT + self._num_learned))
        off = posterior.mean - mean
        self._covariance = (1 - rate) * self._covariance + rate * (
            posterior.covariance + np.outer(off, off)
        )
        self._num_learned += 1


def _logistic(x: FloatArray) -> FloatArray:
    result: FloatArray = 1 / (1 + np.exp(-x))
    return result
