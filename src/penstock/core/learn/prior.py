"""What a request's acceptance by every drafter is expected to be, learned over requests.

The log-odds of acceptance of one request are normal around a mean that depends on the request's
words, and drafters are correlated: an easy text is easy for most of them.

    theta_i = f(words_i) + e_i        e_i ~ N(0, S)        accepted_ij | theta_ij ~ binomial

f is a Gaussian process, one a drafter: prompts are alike as the cosine of their words is (Rasmussen
and Williams, Gaussian Processes for Machine Learning, 2006, ch. 2). It stands on the requests that
ended last. A request in progress has a posterior for ALL drafters, those it has never used
included. When it ends it becomes a measurement of f, and one step of online EM for S.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_MEAN = 0.8
_VARIANCE = 1.5
_CORRELATION = 0.5
"""Before anything is learned: log-odds of a drafter, and between drafters."""
_BIAS_VARIANCE = 1.0
_WORDS_VARIANCE = 3.0
"""Of f: of its mean over all prompts, and between prompts that share no word."""
_MEMORY = 128
"""Requests that f stands on."""
_NUM_BUCKETS = 8192
_HASH = np.uint64(0x9E3779B97F4A7C15)
_NEWTON_STEPS = 3
_LEAST_RATE = 0.01
_EM_WEIGHT = 12.0
"""Requests that the first covariance counts for."""
_MOST_LOGIT = 6.0


class Belief:
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
        return mean_rate(self.mean, self.variance)

    def after(self, accepted: FloatArray, rejected: FloatArray) -> Belief:
        """With so many accepted and rejected tokens of every drafter [J]: Laplace's
        approximation."""
        total = accepted + rejected
        seen = np.flatnonzero(total > 0)
        if not len(seen):
            return self
        cross = self.covariance[:, seen]
        theta = self.mean.copy()
        # From what was seen: from a mean that it contradicts Newton's steps may swing ever wider.
        theta[seen] = np.log((accepted[seen] + 0.5) / (rejected[seen] + 0.5))
        for _ in range(_NEWTON_STEPS):
            rate = _logistic(theta[seen])
            information = np.maximum(total[seen] * rate * (1 - rate), 1e-3)
            working = theta[seen] + (accepted[seen] - total[seen] * rate) / information
            inner = cross[seen]
            inner.flat[:: len(seen) + 1] += 1 / information
            # The covariance is positive definite, and small: an inverse is as good as a solution.
            gain = cross @ (np.linalg.inv(inner) if len(seen) > 1 else 1 / inner)
            off = gain @ (working - self.mean[seen])
            theta = np.clip(self.mean + off, -_MOST_LOGIT, _MOST_LOGIT)
        return Belief(theta, self.covariance - gain @ cross.T)


class AcceptancePrior:
    """Learns over requests. The caller numbers the drafters: columns 0 to J - 1. Words are whole
    numbers, those of a prompt in any order."""

    def __init__(self) -> None:
        self._prompts = _Prompts()
        self._regressions: list[_Regression] = []
        self._covariance = np.zeros((0, 0))
        self._num_learned = 0

    def grow(self, num_drafters: int) -> None:
        """Know so many drafters from now on."""
        old = len(self._regressions)
        if num_drafters <= old:
            return
        covariance = np.full((num_drafters, num_drafters), _VARIANCE * _CORRELATION)
        np.fill_diagonal(covariance, _VARIANCE)
        covariance[:old, :old] = self._covariance
        self._covariance = covariance
        self._regressions += [_Regression() for _ in range(old, num_drafters)]

    def belief(self, words: IntArray) -> tuple[Belief, FloatArray]:
        """Of a request with these words; and [J] the standard deviation of its mean, which more
        requests would lower."""
        likeness = self._prompts.likeness(words)
        found = [r.predict(likeness) for r in self._regressions]
        mean, variance = (np.array(figures) for figures in zip(*found, strict=True))
        doubt = np.sqrt(variance)
        return Belief(mean, self._covariance + _together(doubt)), doubt

    def learn(self, words: IntArray, accepted: FloatArray, rejected: FloatArray) -> None:
        """A request with these words has ended; its tokens by drafter [J]."""
        belief, _ = self.belief(words)
        posterior = belief.after(accepted, rejected)
        slot = self._prompts.add(words)
        likeness = self._prompts.likeness(words)
        left = np.maximum(posterior.variance, 1e-6)
        precision = 1 / left - 1 / belief.variance
        for j, regression in enumerate(self._regressions):
            regression.forget(slot)
            if precision[j] > 1e-3:
                # What the posterior says beyond the prior, as one measurement.
                whole = posterior.mean[j] / left[j] - belief.mean[j] / belief.variance[j]
                noise = self._covariance[j, j] + 1 / precision[j]
                regression.add(slot, likeness, whole / precision[j], noise)
        self._learn_covariance(belief, posterior)

    def _learn_covariance(self, belief: Belief, posterior: Belief) -> None:
        """What a request differs by from others with its words: of its distance from the mean the
        part that is not the mean's own error."""
        rate = max(_LEAST_RATE, 1 / (_EM_WEIGHT + self._num_learned))
        own = self._covariance
        part = own @ np.linalg.inv(belief.covariance)
        off = posterior.mean - belief.mean
        seen = part @ (posterior.covariance + np.outer(off, off)) @ part.T + own - part @ own
        self._covariance = (1 - rate) * own + rate * (seen + seen.T) / 2
        self._num_learned += 1


class _Prompts:
    """Words of the prompts that ended last: one bit a word, hashed."""

    def __init__(self) -> None:
        self._has = np.zeros((_MEMORY, _NUM_BUCKETS), dtype=bool)
        self._num_with = np.zeros(_NUM_BUCKETS, dtype=np.int64)
        self._norms = np.ones(_MEMORY)
        self._next = 0

    def likeness(self, words: IntArray) -> FloatArray:
        """[_MEMORY] cosine with every prompt; words that none of them has do not count."""
        buckets = _buckets(words)
        buckets = buckets[self._num_with[buckets] > 0]
        if not len(buckets):
            return np.zeros(_MEMORY)
        shared = self._has[:, buckets].sum(axis=1)
        cosine: FloatArray = shared / (self._norms * np.sqrt(len(buckets)))
        return cosine

    def add(self, words: IntArray) -> int:
        """Remember a prompt in the place of the oldest; returns the place."""
        slot, buckets = self._next, _buckets(words)
        self._num_with -= self._has[slot]
        self._has[slot] = False
        self._has[slot, buckets] = True
        self._num_with[buckets] += 1
        self._norms[slot] = np.sqrt(max(1, len(buckets)))
        self._next = (slot + 1) % _MEMORY
        return slot


class _Regression:
    """f of one drafter: a Gaussian process on what was measured of some of the prompts.

    measured, noise: [N] log-odds less their first mean, and the variance around f. inverse: of the
    measurements' covariance, [N, N]; weights: [N] what each adds to the mean.
    Products go without BLAS: it would share them out to threads, which then spin on cores that the
    models need.
    """

    def __init__(self) -> None:
        self._slots = np.empty(0, dtype=np.int64)
        self._measured = np.empty(0)
        self._noise = np.empty(0)
        self._inverse = np.empty((0, 0))
        self._weights = np.empty(0)

    def predict(self, likeness: FloatArray) -> tuple[float, float]:
        """Mean for a prompt that is so like the others, and the variance of its error as far as
        more of them would lower it: what they measured falsely, and what is still the first mean's.
        In how far its own words are like nobody's is part of S."""
        kernel = _BIAS_VARIANCE + _WORDS_VARIANCE * likeness[self._slots]
        shares = _times(self._inverse, kernel)
        mean = _MEAN + float((kernel * self._weights).sum())
        unknown = max(0.0, 1 - float(shares.sum()))
        first = (_BIAS_VARIANCE + _WORDS_VARIANCE) * unknown**2
        return mean, first + float((shares**2 * self._noise).sum())

    def add(self, slot: int, likeness: FloatArray, measured: float, noise: float) -> None:
        """A prompt that is so like those before it has been measured, with a variance of noise."""
        kernel = _BIAS_VARIANCE + _WORDS_VARIANCE * likeness[self._slots]
        reach = _times(self._inverse, kernel)
        own = _BIAS_VARIANCE + _WORDS_VARIANCE + noise - float((kernel * reach).sum())
        num = len(self._slots)
        inverse = np.empty((num + 1, num + 1))
        inverse[:num, :num] = self._inverse + np.outer(reach, reach) / own
        inverse[num, :num] = inverse[:num, num] = -reach / own
        inverse[num, num] = 1 / own
        self._inverse = inverse
        self._slots = np.append(self._slots, slot)
        self._measured = np.append(self._measured, measured - _MEAN)
        self._noise = np.append(self._noise, noise)
        self._weights = _times(inverse, self._measured)

    def forget(self, slot: int) -> None:
        """That prompt's measurement, if there is one."""
        rest = self._slots != slot
        if rest.all():
            return
        i = int(np.flatnonzero(~rest)[0])
        across = self._inverse[rest, i]
        own = self._inverse[i, i]
        self._inverse = self._inverse[np.ix_(rest, rest)] - np.outer(across, across) / own
        self._slots, self._noise = self._slots[rest], self._noise[rest]
        self._measured = self._measured[rest]
        self._weights = _times(self._inverse, self._measured)


def mean_rate(mean: FloatArray, variance: FloatArray) -> FloatArray:
    """Expected acceptance probability of normal log-odds."""
    rate: FloatArray = _logistic(mean / np.sqrt(1 + np.pi / 8 * variance))
    return rate


def _together(doubt: FloatArray) -> FloatArray:
    """[J, J] what is not known of the mean, which drafters partly share."""
    covariance = _CORRELATION * np.outer(doubt, doubt)
    np.fill_diagonal(covariance, doubt**2)
    return covariance


def _buckets(words: IntArray) -> IntArray:
    hashed = np.unique(words).astype(np.uint64) * _HASH >> np.uint64(40)
    return np.unique(hashed % np.uint64(_NUM_BUCKETS)).astype(np.int64)


def _times(matrix: FloatArray, vector: FloatArray) -> FloatArray:
    product: FloatArray = np.einsum("ij,j->i", matrix, vector)
    return product


def _logistic(x: FloatArray) -> FloatArray:
    result: FloatArray = 1 / (1 + np.exp(-x))
    return result
