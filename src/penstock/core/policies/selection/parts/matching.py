"""Requests to drafters of limited capacity, at the greatest sum of values (Spin, eqs. 10 to 12)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def assign(
    values: FloatArray, room: Sequence[int | None], alone: float | FloatArray = 0.0
) -> list[int | None]:
    """The drafter of each request, or None: the assignment of the greatest sum, with a column for
    every place of a drafter. Of equals, the earlier drafter, and a drafter before none.

    values: [N, M], -inf where a drafter is excluded. room: [M] requests that each takes
    at most (0 or less: none; None: any number). alone: value of no drafter, of all or [N]; there is
    always room for that.
    """
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
