"""Value of a token of each request: tenants' utility, and what latency targets make of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.core.latency import remaining
from penstock.core.policies.allocation.parts.gradient import tenant_weight, tokens_by_tenant
from penstock.core.policies.base import DraftCandidate, View
from penstock.core.state import Outcome
from penstock.core.types import NO_TARGET

FloatArray = NDArray[np.float64]

_IDLE_STEPS = 10  # steps until an idle tenant starts anew
_KEEP = 1 - 1 / 1000  # memory of goodput: an average over a thousand steps
_START_STEPS = 4.0  # steps that a new tenant's start counts for; chosen by hand
_STEP_WEIGHT = 0.03  # weight of a step in the mean; chosen by hand
_UNSTEADY = 0.3
"""Relative deviation of the mean step over a request's rest from the present one. Chosen by
hand."""
_LEAST_SECONDS = 1e-6  # keeps rates finite


class TokenValues:
    """Values by request: U' = weight · X^(−a) of its tenant, more where tokens help to be in time.

    X is the tenant's average rate (GoodSpeed eq. 5). A request that needs r tokens a second for R
    more tokens is in time with probability Φ((x / r − 1) / σ) at a rate of x, σ² = 1/R + ρ²: tokens
    are a Poisson stream, and step times vary by ρ. Being in time is worth `in_time` · r · U'. A
    token's share of that is the slope from the rate without drafts to that with the longest one."""

    def __init__(self, fairness: float, in_time: float) -> None:
        self._fairness, self._in_time = fairness, in_time
        self._averages = _Goodput()
        self._step: float | None = None  # mean seconds between steps, prompts included
        self._begun: float | None = None
        self._ended_at = 0.0

    def on_step(self, outcomes: Sequence[Outcome], now: float) -> None:
        """Take in all verdicts of a target step that ended `now`."""
        self._averages.add_tokens(tokens_by_tenant(outcomes))
        if self._begun is not None:
            seconds = max(now - max(self._begun, self._ended_at), _LEAST_SECONDS)
            known = seconds if self._step is None else self._step
            self._step = known + _STEP_WEIGHT * (seconds - known)
            self._begun = None
        self._ended_at = now

    def of_tokens(
        self,
        candidates: Sequence[DraftCandidate],
        view: View,
        longest: Callable[[], FloatArray],
        plain: float,
    ) -> FloatArray:
        """Return v [requests], with mean 1.

        longest: returns [requests] tokens that the longest draft is expected to add to a step;
        plain: seconds of a step without drafts."""
        self._begun = view.now
        names = dict.fromkeys(c.state.request.tenant for c in candidates)
        weights = {name: tenant_weight(view.tenants, name) for name in names}
        slopes = self._averages.slopes(weights, self._fairness)
        has_targets = any(c.state.request.latency is not NO_TARGET for c in candidates)
        if len(slopes) == 1 and not has_targets:
            return np.ones(len(candidates))
        values = np.array([slopes[c.state.request.tenant] for c in candidates])
        if has_targets:
            values *= 1 + self._in_time * self._urgency(candidates, view, longest(), plain)
        return np.asarray(values / values.mean())

    def _urgency(
        self, candidates: Sequence[DraftCandidate], view: View, longest: FloatArray, plain: float
    ) -> FloatArray:
        """Return [requests] the rise of r Φ over the rise of the rate, from no draft to a long one.

        0 without a target, or where it is missed."""
        # Importing SciPy takes 0.25 s, and every server looks up the options of policies.
        from scipy.special import ndtr

        lengths = view.learn.lengths
        lengths.survival(np.array([c.state.num_output_tokens for c in candidates]))
        left = [remaining(c.state, view.now, lengths.mean_residual) for c in candidates]
        needed = np.array([0.0 if one is None else one.rate for one in left])
        tokens = np.array([1.0 if one is None else max(1.0, one.tokens) for one in left])
        step = self._step or max(plain, _LEAST_SECONDS)
        rates = np.stack([np.ones(len(left)), 1 + np.maximum(longest, 1e-3)]) / step
        deviation = np.sqrt(1 / tokens + _UNSTEADY**2)
        surplus = (rates / np.maximum(needed, _LEAST_SECONDS) - 1) / deviation
        in_time = needed * ndtr(surplus)
        return np.where(needed > 0, (in_time[1] - in_time[0]) / (rates[1] - rates[0]), 0.0)


class _Goodput:
    """Average goodput X of each tenant (GoodSpeed eq. 4), in tokens a step.

    It is the mean of up to a thousand steps: a constant β (eq. 4) never converges, and a falling
    one stops adapting. A tenant that is new, or idle for some steps, starts at the average of those
    present."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}
        self._steps: dict[str, float] = {}
        self._absent: dict[str, int] = {}
        self._weights: Mapping[str, float] = {}

    def slopes(self, weights: Mapping[str, float], fairness: float) -> dict[str, float]:
        """Return U' = weight · X^(−fairness) of the competing tenants."""
        known = [n for n in weights if n in self._tokens]
        start = sum(self._mean(n) / weights[n] for n in known) / len(known) if known else 1.0
        for name, weight in weights.items():
            if name not in self._tokens:
                self._steps[name] = _START_STEPS
                self._tokens[name] = start * weight * _START_STEPS
        self._weights = weights
        return {n: w / self._mean(n) ** fairness for n, w in weights.items()}

    def add_tokens(self, tokens: Mapping[str, float]) -> None:
        """Take in a step's tokens by tenant."""
        for name in self._weights:
            self._tokens[name] = _KEEP * self._tokens[name] + tokens.get(name, 0)
            self._steps[name] = _KEEP * self._steps[name] + 1
            self._absent.pop(name, None)
        for name in [n for n in self._tokens if n not in self._weights]:
            self._absent[name] = self._absent.get(name, 0) + 1
            if self._absent[name] >= _IDLE_STEPS:
                del self._tokens[name], self._steps[name], self._absent[name]

    def _mean(self, name: str) -> float:
        return max(self._tokens[name] / self._steps[name], 1e-9)
