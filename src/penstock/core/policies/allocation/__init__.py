"""How many tokens each request may draft in a round. One file a policy.

A policy has `name`, an `Options` dataclass, `allocate(candidates, work)`, which returns a grant for
each candidate, `reserve(state)`, the draft positions that admission should keep free for a decoding
request, and `observe(outcomes, now)`, which tells it what every target step came to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import numpy as np

from penstock.core.learn import Estimators
from penstock.core.state import Outcome, RequestState, Tenant
from penstock.fluid.shares import max_min_shares

_ROUNDING = 1e-9


class DraftCandidate(NamedTuple):
    """A request that could draft with `drafter`, at most `limit` tokens this round."""

    state: RequestState
    drafter: str
    limit: int


class Grant(NamedTuple):
    """What one request may draft: so many tokens, but none once the predicted probability that all
    of them are accepted falls under `min_survival`."""

    num_draft_tokens: int
    min_survival: float = 0.0


@dataclass(frozen=True, slots=True)
class StepWork:
    """What the step holds besides drafts: `budget` draft positions may join the `num_rows` target
    positions that are certain, of which `num_sampled` end in a token. `drafters_beside` have lanes
    of their own and work at the same time. is_fair: a short budget is shared out by weight."""

    budget: int
    num_rows: int
    num_sampled: int
    estimators: Estimators
    now: float = 0.0
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    drafters_beside: frozenset[str] = frozenset()
    is_fair: bool = False

    def budgets(
        self, candidates: Sequence[DraftCandidate], wanted: Sequence[int]
    ) -> list[tuple[list[int], int]]:
        """Groups of candidates, by index, each with its part of the budget: one group with all of
        it, or where it is short of what is wanted and tenants share it, weighted max-min fair
        parts of a group for each tenant."""
        everybody = [(list(range(len(candidates))), self.budget)]
        if not self.is_fair or sum(wanted) <= self.budget:
            return everybody
        groups: dict[str, list[int]] = {}
        for i, candidate in enumerate(candidates):
            groups.setdefault(candidate.state.request.tenant, []).append(i)
        if len(groups) == 1:
            return everybody
        demands = np.array([sum(wanted[i] for i in g) for g in groups.values()], dtype=float)
        weights = np.array([self.tenants[name].weight for name in groups])
        shares = max_min_shares(self.budget, demands, weights)
        budgets = np.floor(shares + _ROUNDING)
        # What rounding leaves goes to those from whom it took most.
        for i in np.argsort(budgets - shares, kind="stable")[: self.budget - int(budgets.sum())]:
            budgets[i] += 1
        return [(g, int(b)) for g, b in zip(groups.values(), budgets, strict=True)]


class AllocationPolicy(ABC):
    """Decides how many tokens each request may draft."""

    name: ClassVar[str]

    @abstractmethod
    def allocate(self, candidates: Sequence[DraftCandidate], work: StepWork) -> list[Grant]:
        """A grant for each candidate, together within `work.budget`. Where drafters have lanes of
        their own the candidates are all requests that speculate, whether or not they may start a
        draft now: the same prices hold for everybody."""

    @abstractmethod
    def reserve(self, state: RequestState) -> int:
        """Most tokens that a request would ever be granted."""

    def observe(self, outcomes: Sequence[Outcome], now: float) -> None:  # noqa: B027
        """Take in all verdicts of one target step."""
