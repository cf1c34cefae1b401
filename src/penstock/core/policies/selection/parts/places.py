"""Drafters of limited capacity: who has room, and the best assignment (Spin, eqs. 10 to 12)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from penstock.core.policies.base import View, usable
from penstock.core.policies.selection.parts.goodput import model_of
from penstock.core.state import Drafter, RequestState

FloatArray = npt.NDArray[np.float64]


class Places:
    """Whoever is not among `states` keeps its place; those who are take one as they are decided."""

    def __init__(self, states: Sequence[RequestState], view: View) -> None:
        self.drafters = usable(view.drafters)
        self._left: dict[str, int | None] = {}
        loads = view.loads
        for name, drafter in self.drafters.items():
            most = drafter.max_num_seqs
            self._left[name] = None if most is None else most - loads.get(name, 0)
        for state in states:
            left = self._left.get(state.drafter or "")
            if left is not None and state.drafter is not None:
                self._left[state.drafter] = left + 1

    def take(self, name: str | None) -> bool:
        """Take a place, if the drafter is there and has one; there is always room for none."""
        if name is None:
            return True
        if name not in self._left:
            return False
        left = self._left[name]
        if left is None:
            return True
        self._left[name] = left - 1 if left > 0 else left
        return left > 0

    def room(self, drafters: Iterable[str]) -> list[int | None]:
        """Places left of each, None for any number."""
        return [self._left[n] for n in drafters]

    def first_with_room(self, names: Iterable[str]) -> str | None:
        """Take a place with the first that has one."""
        return next((n for n in names if self.take(n)), None)

    def by_preference(self, state: RequestState, models: Iterable[str]) -> str | None:
        """Take a place with a drafter of the first model that has one: with the request's own
        drafter if it runs that model, else with the one that has the most room."""
        for model in models:
            instances = [d for d in self.drafters.values() if model_of(d) == model]
            instances.sort(key=lambda d: (d.name != state.drafter, -self._free(d)))
            name = self.first_with_room(d.name for d in instances)
            if name is not None:
                return name
        return None

    def _free(self, drafter: Drafter) -> float:
        left = self._left[drafter.name]
        return float("inf") if left is None else left


def assign(
    values: FloatArray, room: Sequence[int | None], alone: float | FloatArray = 0.0
) -> list[int | None]:
    """The drafter of each request, or None: the assignment of the greatest sum. Of equals, the
    earlier drafter, and a drafter before none.

    values: [N, M], -inf where a drafter is excluded. room: [M] requests that each takes at most
    (None: any number). alone: value of no drafter, of all or [N]."""
    num_requests, num_drafters = values.shape
    if not num_requests:
        return []
    places = np.array([num_requests if r is None else r for r in room] + [num_requests])
    places = places.clip(0, num_requests)
    table = np.empty((num_requests, num_drafters + 1))
    table[:, :-1] = np.where(places[:-1] > 0, values, -np.inf)
    table[:, -1] = alone
    best = table.argmax(axis=1)
    if (np.bincount(best, minlength=num_drafters + 1) > places).any():
        # A third of a second of imports, once; most servers limit no drafter and never come here.
        from scipy.optimize import linear_sum_assignment

        finite = np.isfinite(table)
        # Less than anything else could make up for, but a number, as rows must have.
        never = -1.0 - 2 * num_requests * float(np.abs(table[finite]).max(initial=0.0))
        column_of = np.repeat(np.arange(num_drafters + 1), places)
        table = np.where(finite, table, never)[:, column_of]
        best = column_of[linear_sum_assignment(table, maximize=True)[1]]
    return [None if j == num_drafters else j for j in best.tolist()]
