"""Prior of a request's acceptance by every drafter, learned over requests.

    theta_i = f(words_i) + e_i        e_i ~ N(0, S)        accepted_ij | theta_ij ~ binomial

theta are log-odds, correlated between drafters by S. f is a Gaussian process per drafter, whose
kernel is the cosine of the prompts' words (Rasmussen and Williams, 2006, ch. 2), on the requests
that ended last. A request in progress has a posterior for ALL drafters. At its end it becomes a
measurement of f, and one step of online EM for S."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_MEAN = 0.8  # log-odds of a drafter before any request; chosen by hand, like these
_VARIANCE = 1.5  # of these log-odds between requests
_CORRELATION = 0.5
"""Log-odds of a drafter, and correlation between drafters, before any request. Chosen by hand."""
_BIAS_VARIANCE = 1.0
_WORDS_VARIANCE = 3.0
"""Variance of f's mean over all prompts, and between prompts without common words."""
_MEMORY = 128  # requests that f is fitted to; bounds the host's time
_NUM_BUCKETS = 8192  # of hashed words
_HASH = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio
_NEWTON_STEPS = 3  # converges from the prior in three
_LEAST_RATE = 0.01  # keeps precisions finite
_LEAST_PRECISION = 1e-3  # least that counts as a measurement
_EM_WEIGHT = 12.0  # requests that the first covariance counts for
_MOST_LOGIT = 6.0
# bound of Newton's steps


class Belief:
    """Normal log-odds of one request's acceptance: mean [J], covariance [J, J]."""

    __slots__ = ("covariance", "mean")

    def __init__(self, mean: FloatArray, covariance: FloatArray) -> None:
        self.mean = mean
        self.covariance = covariance

    @property
    def variance(self) -> FloatArray:
        return self.covariance.diagonal()

    def rates(self) -> FloatArray:
        """Return the expected acceptance probability [J]."""
        return mean_rate(self.mean, self.variance)

    def after(self, accepted: FloatArray, rejected: FloatArray) -> Belief:
        """Return the posterior after accepted and rejected tokens [J] (Laplace)."""
        total = accepted + rejected
        seen = total.nonzero()[0]
        if not len(seen):
            return self
        cross = self.covariance[:, seen]
        among = cross[seen]
        before, hits, total = self.mean[seen], accepted[seen], total[seen]
        # Start at the evidence: from a contradicting mean Newton's steps may diverge.
        theta = np.log((hits + 0.5) / (total - hits + 0.5))
        for _ in range(_NEWTON_STEPS):
            rate = _logistic(theta)
            information = np.maximum(total * rate * (1 - rate), 1e-3)
            inner = among.copy()
            inner.flat[:: len(seen) + 1] += 1 / information
            # The covariance is positive definite and small: an inverse is as good as a solution.
            inverse = np.linalg.inv(inner) if len(seen) > 1 else 1 / inner
            weights = inverse @ (theta + (hits - total * rate) / information - before)
            theta = (before + among @ weights).clip(-_MOST_LOGIT, _MOST_LOGIT)
        mean = (self.mean + cross @ weights).clip(-_MOST_LOGIT, _MOST_LOGIT)
        return Belief(mean, self.covariance - cross @ inverse @ cross.T)


class AcceptancePrior:
    """Learns over requests; drafters are columns 0 to J - 1, and words are integers."""

    def __init__(self) -> None:
        self._prompts = _Prompts()
        self._regressions = _Regressions()
        self._covariance = np.zeros((0, 0))
        self._num_learned = 0

    def grow(self, num_drafters: int) -> None:
        """Extend to `num_drafters` columns."""
        old = len(self._covariance)
        if num_drafters <= old:
            return
        covariance = np.full((num_drafters, num_drafters), _VARIANCE * _CORRELATION)
        np.fill_diagonal(covariance, _VARIANCE)
        covariance[:old, :old] = self._covariance
        self._covariance = covariance
        self._regressions.grow(num_drafters)

    def belief(self, words: IntArray) -> tuple[Belief, FloatArray]:
        """Return the belief of a request with these words, and its mean's deviation [J]."""
        return self._belief(_buckets(words))

    def _belief(self, buckets: IntArray) -> tuple[Belief, FloatArray]:
        mean, variance = self._regressions.predict(self._prompts.likeness(buckets))
        doubt = np.sqrt(variance)
        return Belief(mean, self._covariance + _together(doubt)), doubt

    def learn(self, words: IntArray, accepted: FloatArray, rejected: FloatArray) -> None:
        """Take in an ended request: its words, and its tokens by drafter [J]."""
        buckets = _buckets(words)
        belief, _ = self._belief(buckets)
        posterior = belief.after(accepted, rejected)
        slot = self._prompts.add(buckets)
        left, before = np.maximum(posterior.variance, 1e-6), belief.variance
        # The posterior's evidence beyond the prior, as one measurement.
        precision = 1 / left - 1 / before
        tells = precision > _LEAST_PRECISION
        variance = 1 / np.where(tells, precision, 1.0)
        measured = (posterior.mean / left - belief.mean / before) * variance
        noise = np.where(tells, self._covariance.diagonal() + variance, np.inf)
        self._regressions.replace(slot, self._prompts.likeness(buckets), measured, noise)
        self._learn_covariance(belief, posterior)

    def _learn_covariance(self, belief: Belief, posterior: Belief) -> None:
        """Update S by a request's distance from its mean, without the mean's own error."""
        rate = max(_LEAST_RATE, 1 / (_EM_WEIGHT + self._num_learned))
        own = self._covariance
        part = own @ np.linalg.inv(belief.covariance)
        off = posterior.mean - belief.mean
        seen = part @ (posterior.covariance + np.outer(off, off)) @ part.T + own - part @ own
        self._covariance = (1 - rate) * own + rate * (seen + seen.T) / 2
        self._num_learned += 1


class _Prompts:
    """Words of the prompts that ended last: one bit a word, hashed into buckets."""

    def __init__(self) -> None:
        self._has = np.zeros((_NUM_BUCKETS, _MEMORY), dtype=np.uint8)
        self._num_with = np.zeros(_NUM_BUCKETS, dtype=np.int64)
        self._buckets: list[IntArray] = [np.empty(0, dtype=np.int64)] * _MEMORY
        self._norms = np.ones(_MEMORY)
        self._next = 0

    def likeness(self, buckets: IntArray) -> FloatArray:
        """Return the cosine with every prompt, [_MEMORY]; unknown words do not count."""
        buckets = buckets[self._num_with[buckets] > 0]
        if not len(buckets):
            return np.zeros(_MEMORY)
        shared = self._has[buckets].sum(axis=0, dtype=np.int32)
        cosine: FloatArray = shared / (self._norms * math.sqrt(len(buckets)))
        return cosine

    def add(self, buckets: IntArray) -> int:
        """Remember a prompt in place of the oldest; return its slot."""
        slot = self._next
        old = self._buckets[slot]
        self._num_with[old] -= 1
        self._has[old, slot] = 0
        self._has[buckets, slot] = 1
        self._num_with[buckets] += 1
        self._buckets[slot] = buckets
        self._norms[slot] = math.sqrt(max(1, len(buckets)))
        self._next = (slot + 1) % _MEMORY
        return slot


class _Regressions:
    """f of every drafter.

    inverse: of the measurements' covariance, [J, _MEMORY, _MEMORY], zeros for an unmeasured prompt;
    measured, noise: [J, _MEMORY] log-odds less their first mean, and the variance around f;
    weights: what each adds to the mean. Products avoid BLAS, whose threads would take the models'
    cores."""

    def __init__(self) -> None:
        self._inverse = np.zeros((0, _MEMORY, _MEMORY))
        self._measured = np.zeros((0, _MEMORY))
        self._noise = np.zeros((0, _MEMORY))
        self._weights = np.zeros((0, _MEMORY))
        self._outer = np.empty((_MEMORY, _MEMORY))

    def grow(self, num_drafters: int) -> None:
        new = num_drafters - len(self._inverse)
        self._inverse = np.pad(self._inverse, ((0, new), (0, 0), (0, 0)))
        self._measured, self._noise, self._weights = (
            np.pad(a, ((0, new), (0, 0))) for a in (self._measured, self._noise, self._weights)
        )

    def predict(self, likeness: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Return the mean [J] at this likeness, and the variance that more prompts would lower."""
        kernel = _BIAS_VARIANCE + _WORDS_VARIANCE * likeness
        shares = self._reach(kernel)
        mean = _MEAN + (self._weights * kernel).sum(axis=1)
        unknown = np.maximum(0.0, 1 - shares.sum(axis=1))
        first = (_BIAS_VARIANCE + _WORDS_VARIANCE) * unknown**2
        return mean, first + (shares**2 * self._noise).sum(axis=1)

    def replace(
        self, slot: int, likeness: FloatArray, measured: FloatArray, noise: FloatArray
    ) -> None:
        """Replace the prompt in a slot; infinite noise [J] is no measurement."""
        kernel = _BIAS_VARIANCE + _WORDS_VARIANCE * likeness
        self._forget(slot)
        reach = self._reach(kernel)
        own = _BIAS_VARIANCE + _WORDS_VARIANCE + noise - (reach * kernel).sum(axis=1)
        reach[:, slot] = -1.0
        self._measured[:, slot] = measured - _MEAN
        off = (reach * self._measured).sum(axis=1) / own
        for j in np.flatnonzero(np.isfinite(noise)):
            self._noise[j, slot] = noise[j]
            self._weights[j] += reach[j] * off[j]
            np.multiply(reach[j, :, None], reach[j] / own[j], out=self._outer)
            self._inverse[j] += self._outer

    def _forget(self, slot: int) -> None:
        for inverse, weights in zip(self._inverse, self._weights, strict=True):
            across = inverse[slot].copy()
            own = across[slot]
            if own:
                weights -= across * (weights[slot] / own)
                np.multiply(across[:, None], across / own, out=self._outer)
                inverse -= self._outer
                # Exactly nothing, not nearly.
                inverse[slot] = inverse[:, slot] = weights[slot] = 0.0
        self._noise[:, slot] = 0.0

    def _reach(self, kernel: FloatArray) -> FloatArray:
        product: FloatArray = np.einsum("jab,b->ja", self._inverse, kernel)
        return product


def mean_rate(mean: FloatArray, variance: FloatArray) -> FloatArray:
    """Return the expected acceptance probability of normal log-odds."""
    rate: FloatArray = _logistic(mean / np.sqrt(1 + np.pi / 8 * variance))
    return rate


def _together(doubt: FloatArray) -> FloatArray:
    """Return the uncertainty of the mean, [J, J], which drafters partly share."""
    covariance = _CORRELATION * np.outer(doubt, doubt)
    np.fill_diagonal(covariance, doubt**2)
    return covariance


def _buckets(words: IntArray) -> IntArray:
    hashed = np.unique(words).astype(np.uint64) * _HASH >> np.uint64(40)
    return np.unique(hashed % np.uint64(_NUM_BUCKETS)).astype(np.int64)


def _logistic(x: FloatArray) -> FloatArray:
    result: FloatArray = 1 / (1 + np.exp(-x))
    return result
