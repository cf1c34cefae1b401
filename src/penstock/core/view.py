"""What a policy may see. Read-only: nothing but the scheduler changes what is behind it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from penstock.core.learn import Estimators
from penstock.core.state import Drafter, RequestState
from penstock.core.types import Tenant
from penstock.fluid.shares import max_min_shares

_ROUNDING = 1e-9


class DraftCandidate(NamedTuple):
    """A request that could draft with `drafter`, at most `limit` tokens this round, of which the
    first `num_at_hand` need not be waited for."""

    state: RequestState
    drafter: str
    limit: int
    num_at_hand: int = 0


class Room(NamedTuple):
    """What the step holds besides drafts: `budget` draft positions may join the `num_rows` target
    positions that are certain, of which `num_sampled` end in a token."""

    budget: int = 0
    num_rows: int = 0
    num_sampled: int = 0


NO_ROOM = Room()


@dataclass(frozen=True, slots=True)
class View:
    """The moment of a decision. drafters: by name; some may be down or silent. loads: running
    requests by drafter's name, those to be decided on included. beside: drafters with lanes of
    their own, which work at the same time as the target. room: of the step that is composed.
    is_fair: what is short is shared out between tenants, by weight."""

    drafters: Mapping[str, Drafter]
    learn: Estimators
    now: float = 0.0
    loads: Mapping[str, int] = field(default_factory=dict)
    tenants: Mapping[str, Tenant] = field(default_factory=dict)
    beside: frozenset[str] = frozenset()
    room: Room = NO_ROOM
    is_fair: bool = False

    def is_beside(self, drafter: Drafter) -> bool:
        """Whether it works beside the target, not inside its step."""
        return drafter.name in self.beside

    def budgets(
        self, candidates: Sequence[DraftCandidate], wanted: Sequence[int]
    ) -> list[tuple[list[int], int]]:
        """Groups of candidates, by index, each with its part of the budget: one group with all of
        it, or where it is short of what is wanted and tenants share it, weighted max-min fair
        parts of a group for each tenant."""
        everybody = [(list(range(len(candidates))), self.room.budget)]
        if not self.is_fair or sum(wanted) <= self.room.budget:
            return everybody
        groups: dict[str, list[int]] = {}
        for i, candidate in enumerate(candidates):
            groups.setdefault(candidate.state.request.tenant, []).append(i)
        if len(groups) == 1:
            return everybody
        demands = np.array([sum(wanted[i] for i in g) for g in groups.values()], dtype=float)
        weights = np.array([self.tenants[name].weight for name in groups])
        shares = max_min_shares(self.room.budget, demands, weights)
        budgets = np.floor(shares + _ROUNDING)
        # What rounding leaves goes to those from whom it took most.
        left = self.room.budget - int(budgets.sum())
        for i in np.argsort(budgets - shares, kind="stable")[:left]:
            budgets[i] += 1
        return [(g, int(b)) for g, b in zip(groups.values(), budgets, strict=True)]


class Loads(Mapping[str, int]):
    """Running requests by drafter's name, counted on first use."""

    def __init__(self, running: Mapping[str, RequestState]) -> None:
        self._running = running
        self._counts: Counter[str] | None = None

    def _counted(self) -> Counter[str]:
        if self._counts is None:
            self._counts = Counter(s.drafter for s in self._running.values() if s.drafter)
        return self._counts

    def __getitem__(self, name: str) -> int:
        return self._counted()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._counted())

    def __len__(self) -> int:
        return len(self._counted())
