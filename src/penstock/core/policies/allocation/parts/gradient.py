"""Parts of policies that maximise the gradient of a fair utility (GoodSpeed eqs. 1, 5)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Annotated

from penstock.core.policies.base import View
from penstock.core.policies.options import Range
from penstock.core.state import Outcome
from penstock.core.types import Tenant
from penstock.fluid.step_profile import StepWork

_MAX_STEP_STRETCH = 1.5  # longest step with drafts over one without; chosen by hand
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
