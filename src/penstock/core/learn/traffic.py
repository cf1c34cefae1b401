"""Traffic: arrivals and lengths of prompts, lengths and pace of outputs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.core.learn.saved import number, numbers
from penstock.core.types import Request


class Traffic:
    """Mean prompt length, and prompt tokens a second, both exponentially faded."""

    def __init__(self, memory: float = 500.0, seconds: float = 30.0) -> None:
        self._keep = 1 - 1 / memory
        self._seconds = seconds
        self._weight = 0.0
        self._prompt_tokens = 0.0
        self._recent_tokens = 0.0
        self._since = self._last = 0.0

    def arrived(self, request: Request, now: float) -> None:
        if not self._weight:
            self._since = self._last = now
        self._weight = self._keep * self._weight + 1
        self._prompt_tokens = self._keep * self._prompt_tokens + request.prompt_len
        self._recent_tokens *= math.exp((self._last - now) / self._seconds)
        self._recent_tokens += request.prompt_len
        self._last = now

    @property
    def mean_prompt_len(self) -> float:
        """Tokens; 1 before the first request."""
        return self._prompt_tokens / self._weight if self._weight else 1.0

    def prompt_tokens_per_s(self, now: float) -> float:
        """Return the rate of the recent past; 0 while unknown."""
        known = 1 - math.exp((self._since - now) / self._seconds)
        if known <= 0:
            return 0.0
        return self.least_prompt_tokens_per_s(now) / known

    def least_prompt_tokens_per_s(self, now: float) -> float:
        """Return the least rate, as if nothing had come before the first request was seen."""
        recent = self._recent_tokens * math.exp((self._last - now) / self._seconds)
        return recent / self._seconds


FloatArray = npt.NDArray[np.float64]

_MAX_LEN = 1 << 14  # output tokens that are distinguished
_PRIOR_MEAN = 200.0  # output tokens before any end; chosen by hand
_PRIOR_WEIGHT = 2.0  # ends that this counts for; chosen by hand
_STEPS_WEIGHT = 0.002  # weight of a request's step in the mean of all: some hundred are remembered


class OutputLengths:
    """Discounted Kaplan-Meier estimate of P(output longer than n tokens).

    Running requests count for their lengths so far: ended ones alone underestimate long outputs."""

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
        """Expected output tokens, by the last estimate."""
        self.mean_residual = _PRIOR_MEAN
        """Expected remaining tokens of a request found decoding at any time."""
        self.per_step = 1.0
        """Mean tokens of a decoding request a step: more than 1 with drafts."""
        self._num_steps = 0

    def state(self) -> dict[str, Any]:
        """Return the weights of ended outputs by length, relative to the last one's."""
        lengths = np.flatnonzero(self._ends)
        return {
            "lengths": lengths.tolist(),
            "weights": (self._ends[lengths] / self._weight).tolist(),
            "totals": [self._weights / self._weight, self._tokens / self._weight],
            "per_step": self.per_step,
        }

    def restore(self, state: Any) -> None:
        """Take over a `state`, before any request."""
        lengths = [int(number(n, _MAX_LEN)) for n in state["lengths"]]
        if lengths:
            self._ends[lengths] = numbers(state["weights"])
            self._weights, self._tokens = numbers(state["totals"])
            self.per_step = max(1.0, number(state["per_step"]))
            self._draw(np.empty(0, dtype=np.int64))

    def ended(self, num_output_tokens: int) -> None:
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
        """Note the tokens that a decoding request has made in a step."""
        self._num_steps += 1
        weight = max(_STEPS_WEIGHT, 1 / (_PRIOR_WEIGHT + self._num_steps))
        self.per_step += weight * (num_tokens - self.per_step)

    @property
    def mean_ended(self) -> float:
        """Discounted mean of the outputs that have ended."""
        return self._tokens / self._weights

    def survival_of_ended(self) -> FloatArray:
        """Return P(output > n) for n = 0, 1, … of ended outputs alone; empty before the first."""
        ends = np.trim_zeros(self._ends, "b")
        longer = np.cumsum(ends[::-1])[::-1]
        return longer[1:] / longer[0] if longer.size else longer

    def survival(self, running: npt.NDArray[np.int64]) -> FloatArray:
        """Return P(output > n) for n = 0, 1, …, estimated anew after some ends.

        running: output tokens of running requests."""
        if self._num_since >= self._next_draw:
            self._num_since = 0
            self._next_draw = min(64, 2 * self._next_draw)
            self._draw(running)
        return self._survival

    def remaining(self, num_output_tokens: int, most: int) -> float:
        """Return the expected remaining tokens of a request, from 1 to `most`."""
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
        # Not a dot product: its threads would take the models' cores.
        weighted = (self._survival * np.arange(_MAX_LEN + 1)).sum()
        self.mean_residual = float(weighted) / self.mean + 0.5
