"""Parts of policies that maximise the gradient of a fair utility (GoodSpeed eqs. 1, 5)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated

from penstock.core.learn.streams import Evidence, Population, StreamModel, switching_or_steady
from penstock.core.policies.base import DraftCandidate, View
from penstock.core.policies.options import Range
from penstock.core.state import Outcome
from penstock.core.types import Tenant
from penstock.fluid.step_profile import StepWork

IDLE_STEPS = 10  # steps until an idle tenant starts anew
_KEEP = 1 - 1 / 1000  # memory of goodput: an average over a thousand steps
_MAX_STEP_STRETCH = 1.5  # longest step with drafts over one without; chosen by hand
_START_STEPS = 4.0  # steps that a new tenant's start counts for; chosen by hand
_LEAST_WEIGHT = 1e-6  # for a tenant of weight 0


Fairness = Annotated[float, Range(at_least=0, at_most=16)]
"""Exponent of a concave utility: 0 total tokens, 1 proportional; beyond 16 floats underflow."""


def draft_budget(total: int | None, view: View) -> int:
    """Return the draft tokens of the round (C), by default for a step half as long again."""
    if total is not None:
        return min(total, view.room.budget)
    times, num = view.learn.times, view.room.num_sampled
    longest = _MAX_STEP_STRETCH * times.step_seconds(StepWork(num_decodes=num))
    low, high = 0, view.room.budget
    while low < high:
        middle = (low + high + 1) // 2
        if times.step_seconds(StepWork(num_decodes=num, num_draft_tokens=middle)) <= longest:
            low = middle
        else:
            high = middle - 1
    return low


def tenant_weight(tenants: Mapping[str, Tenant], name: str) -> float:
    """Return a tenant's weight, 1 by default; positive, so that shares can be compared."""
    tenant = tenants.get(name)
    return 1.0 if tenant is None else max(tenant.weight, _LEAST_WEIGHT)


def tokens_by_tenant(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Return the realised goodput of a step: tokens by tenant."""
    tokens: defaultdict[str, int] = defaultdict(int)
    for state, verdict in outcomes:
        tokens[state.request.tenant] += len(verdict.token_ids)
    return tokens


class GoodputAverages:
    """Average goodput X of each tenant (eq. 4), in tokens a step, or a second if given seconds.

    It is the mean of up to a thousand steps: a constant β (eq. 4) never converges, and a falling
    one stops adapting. A tenant that is new, or idle for IDLE_STEPS, starts at the average of those
    present."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}
        self._time: dict[str, float] = {}
        self._absent: dict[str, int] = {}
        self._weights: dict[str, float] = {}

    def meet(self, weights: Mapping[str, float], step: float = 1.0, first: float = 1.0) -> None:
        """Set the competing tenants' weights; `first`: tokens expected of each a step at first."""
        known = [n for n in weights if n in self._tokens]
        start = first / step
        if known:
            start = sum(self.goodput_of(n) / weights[n] for n in known) / len(known)
        for name, weight in weights.items():
            if name not in self._tokens:
                self._time[name] = _START_STEPS * step
                self._tokens[name] = start * weight * self._time[name]
        self._weights = dict(weights)

    def add_tokens(self, tokens: Mapping[str, float], seconds: float = 1.0) -> None:
        """Take in a step: tokens by tenant, and its seconds."""
        for name in self._weights:
            self._tokens[name] = _KEEP * self._tokens[name] + tokens.get(name, 0)
            self._time[name] = _KEEP * self._time[name] + seconds
            self._absent.pop(name, None)
        for name in [n for n in self._tokens if n not in self._weights]:
            self._absent[name] = self._absent.get(name, 0) + 1
            if self._absent[name] >= IDLE_STEPS:
                del self._tokens[name], self._time[name], self._absent[name]

    def slopes(
        self, candidates: Sequence[DraftCandidate], view: View, fairness: float, step: float = 1.0
    ) -> dict[str, float]:
        """Return U' = weight · X^(−fairness) of the candidates' tenants."""
        names = dict.fromkeys(c.state.request.tenant for c in candidates)
        weights = {name: tenant_weight(view.tenants, name) for name in names}
        self.meet(weights, step)
        return {n: w / self.goodput_of(n) ** fairness for n, w in weights.items()}

    def goodput_of(self, name: str) -> float:
        """Return X of a known tenant; positive."""
        return max(self._tokens[name] / self._time[name], 1e-9)


class Streams:
    """Acceptance of each tenant's drafts by each drafter."""

    def __init__(self) -> None:
        self._population = Population()
        self._models: dict[tuple[str, str], StreamModel] = {}
        self._drafters: dict[str, str] = {}

    def rates(self, candidates: Sequence[DraftCandidate]) -> list[float]:
        """Return each candidate's probability that its next draft token is accepted."""
        self._drafters = {c.state.request.id: c.drafter for c in candidates}
        rates: dict[tuple[str, str], float] = {}
        found = []
        for candidate in candidates:
            key = candidate.state.request.tenant, candidate.drafter
            if key not in rates:
                rates[key] = self._model(key).rate()
            found.append(rates[key])
        return found

    def add_outcomes(self, outcomes: Iterable[Outcome]) -> None:
        """Take in all verdicts of a step; a candidate without a draft ages its estimate."""
        for state, verdict in outcomes:
            drafter = verdict.drafter or self._drafters.get(verdict.request_id)
            if drafter is None:
                continue
            evidence = Evidence.from_verdict(verdict)
            self._model((state.request.tenant, drafter)).add_evidence(evidence)
            self._population.add_evidence(evidence)

    def _model(self, key: tuple[str, str]) -> StreamModel:
        model = self._models.get(key)
        if model is None:
            model = self._models[key] = switching_or_steady(self._population)
        return model
