"""How long outputs get: a survival curve learned from requests that ended and those that run."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_MOST = 1 << 14
_PRIOR_MEAN = 200.0
_PRIOR_WEIGHT = 2.0


class OutputLengths:
    """Discounted Kaplan-Meier estimate of P(output longer than n tokens).

    Counting only what has ended would take long outputs for rare until the first of them ends;
    requests that still run count for the lengths that they have reached. Older ends fade, so that
    the curve follows a change of traffic. Before anything has ended lengths are geometric.
    """

    def __init__(self, memory: float = 2000.0) -> None:
        self._growth = 1 + 1 / memory
        self._weight = 1.0
        self._ends = np.zeros(_MOST + 1)
        self._num_since = 0
        self._next_draw = 1
        self._survival = np.exp(-np.arange(_MOST + 1) / _PRIOR_MEAN)

    def ended(self, num_output_tokens: int) -> None:
        """A request has made its last token."""
        self._weight *= self._growth
        self._ends[min(num_output_tokens, _MOST)] += self._weight
        self._num_since += 1
        if self._weight > 1e9:
            self._ends /= self._weight
            self._weight = 1.0

    def survival(self, running: Iterable[int] = ()) -> FloatArray:
        """P(output > n) for n = 0, 1, …; `running` are the output tokens of running requests. Drawn
        anew after some ends, more rarely as more is known."""
        if self._num_since >= self._next_draw:
            self._num_since = 0
            self._next_draw = min(64, 2 * self._next_draw)
            self._draw(running)
        return self._survival

    def _draw(self, running: Iterable[int]) -> None:
        reached = np.zeros(_MOST + 1)
        ages = np.minimum(np.fromiter(running, dtype=np.int64), _MOST)
        np.add.at(reached, ages, self._weight)
        # At risk of ending with n tokens: whoever ended there or later, or runs beyond it.
        at_risk = np.cumsum((self._ends + np.concatenate(([0.0], reached[:-1])))[::-1])[::-1]
        prior = _PRIOR_WEIGHT * self._weight * np.exp(-np.arange(_MOST + 1) / _PRIOR_MEAN)
        hazard = (self._ends + prior / _PRIOR_MEAN) / (at_risk + prior + 1e-300)
        self._survival = np.cumprod(1 - np.clip(hazard, 0.0, 1.0))
