"""Drafters of limited capacity: room, and the best assignment (Spin, eqs. 10 to 12)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from penstock.core.policies.base import View, usable
from penstock.core.state import RequestState

FloatArray = npt.NDArray[np.float64]


class Places:
    """Places of drafters: requests outside `states` keep theirs, the others take new ones."""

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

    def reserve(self, name: str | None) -> bool:
        """Take a place if there is one; there is always room for no drafter."""
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
        """Return the places left of each drafter, None for any number."""
        return [self._left[n] for n in drafters]

    def first_with_room(self, names: Iterable[str]) -> str | None:
        """Take a place with the first drafter that has one."""
        return next((n for n in names if self.reserve(n)), None)


def assign(
    values: FloatArray, room: Sequence[int | None], alone: float | FloatArray = 0.0
) -> list[int | None]:
    """Return the drafter index of each request, or None, with the greatest sum of values.

    Of equals, the earlier drafter, and a drafter before none.

    values: [N, M], -inf where a drafter is excluded. room: [M] most requests of each (None: any
    number). alone: value of no drafter, for all or [N]."""
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
        # Importing SciPy takes 0.3 s, and most servers limit no drafter.
        from scipy.optimize import linear_sum_assignment

        finite = np.isfinite(table)
        # Below any sum, but finite, as rows must be.
        never = -1.0 - 2 * num_requests * float(np.abs(table[finite]).max(initial=0.0))
        column_of = np.repeat(np.arange(num_drafters + 1), places)
        table = np.where(finite, table, never)[:, column_of]
        best = column_of[linear_sum_assignment(table, maximize=True)[1]]
    return [None if j == num_drafters else j for j in best.tolist()]
