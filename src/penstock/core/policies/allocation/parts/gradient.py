"""What policies share that maximise the gradient of a fair utility (GoodSpeed eqs. 1, 5)."""

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

IDLE_STEPS = 10
_KEEP = 1 - 1 / 1000
"""Of what was seen, from step to step: goodput is an average over a thousand of them."""
_MAX_STEP_STRETCH = 1.5
_START_STEPS = 4.0
_LEAST_WEIGHT = 1e-6


Fairness = Annotated[float, Range(at_least=0, at_most=16)]
"""Exponent of a concave utility: 0 total tokens, 1 proportional; beyond 16 floats underflow."""


def draft_budget(total: int | None, view: View) -> int:
    """Draft tokens of the round (C): as given, or by the profile of step times as many as make the
    step half as long again; and never more than the step has room for."""
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
    """A tenant's weight, 1 where it has none; positive, so that shares can be compared."""
    tenant = tenants.get(name)
    return 1.0 if tenant is None else max(tenant.weight, _LEAST_WEIGHT)


def tokens_by_tenant(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Realised goodput of a step: its tokens, summed over a tenant's requests."""
    tokens: defaultdict[str, int] = defaultdict(int)
    for state, verdict in outcomes:
        tokens[state.request.tenant] += len(verdict.token_ids)
    return tokens


class GoodputAverages:
    """Average goodput X of each tenant (eq. 4), in tokens a step or, told how long steps take, a
    second: over all that is known, up to a thousand steps. A constant β (eq. 4) never comes to
    rest, and one that falls for ever stops listening. A tenant that is new, or idle for IDLE_STEPS,
    starts at the average of those present."""

    def __init__(self) -> None:
        self._tokens: dict[str, float] = {}
        self._time: dict[str, float] = {}
        self._absent: dict[str, int] = {}
        self._weights: dict[str, float] = {}

    def meet(self, weights: Mapping[str, float], step: float = 1.0, first: float = 1.0) -> None:
        """Tenants that compete in this step, with their weights. step: how long steps take.
        first: tokens that each is expected to get in a step, where nothing is known of anybody."""
        known = [n for n in weights if n in self._tokens]
        start = first / step
        if known:
            start = sum(self.of(n) / weights[n] for n in known) / len(known)
        for name, weight in weights.items():
            if name not in self._tokens:
                self._time[name] = _START_STEPS * step
                self._tokens[name] = start * weight * self._time[name]
        self._weights = dict(weights)

    def observe(self, tokens: Mapping[str, float], seconds: float = 1.0) -> None:
        """A step is over: tokens of those that got some, and how long it took."""
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
        """U' = weight · X^(−fairness) of the candidates' tenants, which are met."""
        names = dict.fromkeys(c.state.request.tenant for c in candidates)
        weights = {name: tenant_weight(view.tenants, name) for name in names}
        self.meet(weights, step)
        return {n: w / self.of(n) ** fairness for n, w in weights.items()}

    def of(self, name: str) -> float:
        """X of a tenant that was met; positive."""
        return max(self._tokens[name] / self._time[name], 1e-9)


class Streams:
    """Acceptance of each tenant's drafts by each drafter."""

    def __init__(self) -> None:
        self._population = Population()
        self._models: dict[tuple[str, str], StreamModel] = {}
        self._drafters: dict[str, str] = {}

    def rates(self, candidates: Sequence[DraftCandidate]) -> list[float]:
        """Probability for each candidate that its next draft token is accepted."""
        self._drafters = {c.state.request.id: c.drafter for c in candidates}
        rates: dict[tuple[str, str], float] = {}
        found = []
        for candidate in candidates:
            key = candidate.state.request.tenant, candidate.drafter
            if key not in rates:
                rates[key] = self._model(key).rate()
            found.append(rates[key])
        return found

    def observe(self, outcomes: Iterable[Outcome]) -> None:
        """All verdicts of a step. A candidate that drafted nothing ages what is known of it."""
        for state, verdict in outcomes:
            drafter = verdict.drafter or self._drafters.get(verdict.request_id)
            if drafter is None:
                continue
            evidence = Evidence.of(verdict)
            self._model((state.request.tenant, drafter)).observe(evidence)
            self._population.observe(evidence)

    def _model(self, key: tuple[str, str]) -> StreamModel:
        model = self._models.get(key)
        if model is None:
            model = self._models[key] = switching_or_steady(self._population)
        return model
