"""How long outputs get, and how fast: a survival curve learned from requests that ended and those
that run, and the tokens of a step."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_MAX_LEN = 1 << 14
_PRIOR_MEAN = 200.0
_PRIOR_WEIGHT = 2.0
_STEPS_WEIGHT = 0.002
"""Of a request's latest step in the mean of all: some hundred are remembered."""


class OutputLengths:
    """Discounted Kaplan-Meier estimate of P(output longer than n tokens): requests that still run
    count for the lengths that they have reached, and older ends fade. At first lengths are
    geometric."""

    def __init__(self, memory: float = 2000.0) -> None:
        self._growth = 1 + 1 / memory
        self._weight = 1.0
        self._ends = np.zeros(_MAX_LEN + 1)
        self._weights = self._weight * _PRIOR_WEIGHT
        self._tokens = self._weights * _PRIOR_MEAN
        self._num_since = 0
        self._next_draw = 1
        self._survival = np.exp(-np.arange(_MAX_LEN + 1) / _PRIOR_MEAN)
        self.mean = _PRIOR_MEAN
        """Expected output tokens, as the curve was last drawn."""
        self.mean_residual = _PRIOR_MEAN
        """Expected tokens that a request found decoding at any time has yet to make."""
        self.per_step = 1.0
        """Tokens that a decoding request makes in a step, in the mean: more than 1 with drafts."""
        self._num_steps = 0

    def ended(self, num_output_tokens: int) -> None:
        """A request has made its last token."""
        self._weight *= self._growth
        self._ends[min(num_output_tokens, _MAX_LEN)] += self._weight
        self._weights += self._weight
        self._tokens += self._weight * num_output_tokens
        self._num_since += 1
        if self._weight > 1e9:
            self._ends /= self._weight
            self._weights /= self._weight
            self._tokens /= self._weight
            self._weight = 1.0

    def stepped(self, num_tokens: int) -> None:
        """A decoding request has made so many tokens in a step."""
        self._num_steps += 1
        weight = max(_STEPS_WEIGHT, 1 / (_PRIOR_WEIGHT + self._num_steps))
        self.per_step += weight * (num_tokens - self.per_step)

    @property
    def mean_ended(self) -> float:
        """Discounted mean of the outputs that have ended, for whom that is enough."""
        return self._tokens / self._weights

    def survival_of_ended(self) -> FloatArray:
        """P(output > n) for n = 0, 1, … up to the longest, of those that have ended alone; empty
        before the first."""
        ends = np.trim_zeros(self._ends, "b")
        longer = np.cumsum(ends[::-1])[::-1]
        return longer[1:] / longer[0] if longer.size else longer

    def survival(self, running: npt.NDArray[np.int64]) -> FloatArray:
        """P(output > n) for n = 0, 1, …; `running` are the output tokens of running requests. Drawn
        anew after some ends, more rarely as more is known."""
        if self._num_since >= self._next_draw:
            self._num_since = 0
            self._next_draw = min(64, 2 * self._next_draw)
            self._draw(running)
        return self._survival

    def remaining(self, num_output_tokens: int, most: int) -> float:
        """Expected tokens that a request with so many, and at most so many to come, has yet to
        make; at least 1."""
        survival = self.survival(np.empty(0, dtype=np.int64))
        made = min(num_output_tokens, _MAX_LEN)
        left = survival[made : made + max(1, most)].sum() / max(survival[made], 1e-9)
        return max(1.0, float(left))

    def _draw(self, running: npt.NDArray[np.int64]) -> None:
        reached = np.bincount(np.minimum(running, _MAX_LEN), minlength=_MAX_LEN + 1) * self._weight
        # At risk of ending with n tokens: requests that ended there or later, or still run beyond.
        at_risk = np.cumsum((self._ends + reached)[::-1])[::-1]
        prior = _PRIOR_WEIGHT * self._weight * np.exp(-np.arange(_MAX_LEN + 1) / _PRIOR_MEAN)
        hazard = (self._ends + prior / _PRIOR_MEAN) / (at_risk + prior + 1e-300)
        self._survival = np.cumprod(1 - np.clip(hazard, 0.0, 1.0))
        self.mean = float(self._survival.sum())
        # Not a dot product: one so long is shared out to threads, which then spin on cores that the
        # models need.
        weighted = (self._survival * np.arange(_MAX_LEN + 1)).sum()
        self.mean_residual = float(weighted) / self.mean + 0.5
