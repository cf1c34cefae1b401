"""Step-time profile learned from the steps of served requests."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from penstock.core.learn.running import CLEARLY, ERROR_WEIGHT
from penstock.fluid.step_profile import StepProfile, StepWork

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

_MEMORIES = (1000.0, 125.0)  # steps after which a measurement counts for a third
_STALL = 4.0  # most that a measurement counts, over its size's earlier mean
_RIDGE = 1e-9  # ridge towards no cost: divides what steps cannot distinguish
_CELL = 1.08  # sizes in a cell differ by less than this factor
_NUM_CELLS = 160  # cells beyond the largest steps
_HOPE = 0.9
"""Share of the expected seconds that a size without a step is given: it should be tried."""
_NEAR = 2**0.25  # sizes within this factor are one
_CLEAR = 3.0  # standard errors from which on a size is off the line
_FAR = 1 << 16  # more positions than a step has
_KINKS = (32, 96, 256)  # positions beyond which each may cost more: memory-bound steps end
_NUM_TERMS = 5 + len(_KINKS)
_SECONDS, _COUNT = _NUM_TERMS, _NUM_TERMS + 1


class LearnedProfile:
    """Profile by non-negative least squares of relative errors over terms of `StepWork`.

    Old steps fade, as fast as predicts steps best. A table has sizes clearly off the line: noisy
    stairs would cut prompts."""

    def __init__(self) -> None:
        # By memory and cell of sizes: sums of products of the terms, the seconds and 1, each
        # divided by the expected seconds.
        num = len(_MEMORIES)
        self._all_sums = np.zeros((num, _NUM_CELLS, _COUNT + 1, _COUNT + 1))
        self._weights, self._all_costs = np.ones(num), np.zeros((num, _NUM_TERMS))
        self._errors = np.zeros(num)
        """Mean squared relative errors of the latest steps' predictions."""
        self._best, self._largest = 0, 1
        self._new: list[tuple[float, ...]] = []
        """Steps since the last fit: adding each at once would take as long as planning it."""

    def add_step(self, work: StepWork, seconds: float) -> None:
        """Note a step for the next fit."""
        if work.num_positions and seconds > 0:
            self._largest = max(self._largest, work.num_positions)
            self._new.append((*_terms(work), seconds))

    def _add_new(self) -> None:
        if not self._new:
            return
        steps, self._new = np.array(self._new), []
        terms, seconds = steps[:, :_NUM_TERMS], steps[:, _SECONDS]
        cells = np.minimum(_NUM_CELLS - 1, [cell_of(n) for n in terms[:, 1]])
        sums, costs = self._all_sums[self._best], self._all_costs[self._best]
        known = sums[cells, 0, _COUNT]
        before = sums[cells, _SECONDS, _COUNT] / np.where(known > 0, known, 1.0)
        seconds = np.where(known > 0, np.minimum(seconds, _STALL * before), seconds)
        expected = np.maximum((terms * costs).sum(axis=1), seconds / _STALL)
        rows = np.column_stack([terms, seconds, expected]) / expected[:, None]
        errors = np.square(terms @ self._all_costs.T / seconds[:, None] - 1).mean(axis=0)
        kept = (1 - ERROR_WEIGHT) ** len(rows)
        self._errors += (1 - kept) * (errors - self._errors)
        products, ages = rows[:, :, None] * rows[:, None], np.arange(1, len(rows) + 1)
        for i, memory in enumerate(_MEMORIES):
            weights = self._weights[i] * (1 + 1 / memory) ** ages
            np.add.at(self._all_sums[i], cells, weights[:, None, None] * products)
            self._weights[i] = weights[-1]
            if weights[-1] > 1e9:
                self._all_sums[i] /= weights[-1]
                self._weights[i] = 1.0

    def drawn(self, before: StepProfile) -> StepProfile:
        """Return the profile, with memory and drafters of the one before."""
        self._add_new()
        self._all_costs = np.array([_fitted(sums.sum(axis=0)) for sums in self._all_sums])
        long, short = self._errors
        self._best = int(short < CLEARLY * long)
        self._costs, self._sums = self._all_costs[self._best], self._all_sums[self._best]
        per_decode, per_kv_token, per_context = self._costs[2:5].tolist()
        counts, deviations = self._stairs()
        line = self._line(counts) * (1 + deviations)
        table = {round(n): float(s) for n, s in zip(counts, line, strict=True)}
        seen = self._largest
        beside, gaps = self._untried()
        for n, share in ((beside, 1.0), (gaps, _HOPE)):
            for size, seconds in zip(n.tolist(), (share * self._line(n)).tolist(), strict=True):
                table.setdefault(round(size), seconds)
        # Beyond what was seen no cheaper than the line: prompts would wait for such steps.
        kinks = np.array([1, *(n for n in _KINKS if n < seen), seen, _FAR])
        for n, seconds in zip(kinks.tolist(), self._line(kinks).tolist(), strict=True):
            table.setdefault(n, seconds)
        table[_FAR] = max(table.values())
        points = sorted(table.items())
        return StepProfile(
            "measured",
            before.kv_tokens,
            tuple(n for n, _ in points),
            tuple(s for _, s in points),
            per_decode=per_decode,
            per_kv_token=per_kv_token,
            per_prefill_context=per_context,
            drafters=before.drafters,
        )

    def _untried(self) -> tuple[FloatArray, FloatArray]:
        """Return sizes that no step was near, up to the largest, and the tried ones beside them."""
        sums = self._sums[self._sums[:, _COUNT, _COUNT] > 0]
        tried = np.unique(np.round(sums[:, 1, _COUNT] / sums[:, 0, _COUNT]))
        sizes = np.unique(np.round(_NEAR ** (2 * np.arange(math.log(self._largest, _NEAR) / 2))))
        above = np.searchsorted(tried, sizes)
        has_both = (above > 0) & (above < len(tried))
        sizes, above = sizes[has_both], above[has_both]
        is_far = (sizes > _NEAR * tried[above - 1]) & (_NEAR * sizes < tried[above])
        above = above[is_far]
        return np.unique(np.concatenate([tried[above - 1], tried[above]])), sizes[is_far]

    def _line(self, counts: FloatArray) -> FloatArray:
        """Return the fitted seconds of steps of so many positions without attention."""
        seconds = self._costs[0] + self._costs[1] * counts
        for kink, cost in zip(_KINKS, self._costs[5:], strict=True):
            seconds = seconds + cost * np.maximum(0, counts - kink)
        return np.asarray(seconds)

    def _stairs(self) -> tuple[FloatArray, FloatArray]:
        """Return the sizes that are clearly off the line, with neighbours, and by which share."""
        sums = self._sums[self._sums[:, _COUNT, _COUNT] > 0]
        off = np.array([*-self._costs, 1.0])
        weights = sums[:, _COUNT, _COUNT]
        means = sums[:, :_COUNT, _COUNT] @ off / weights
        squares = np.einsum("i,cij,j->c", off, sums[:, :_COUNT, :_COUNT], off) / weights
        is_stair = clear_stairs(means, squares, weights / self._weights[self._best])
        # Share of the table's part of the seconds.
        counts = sums[:, 1, _COUNT] / sums[:, 0, _COUNT]
        line = self._line(counts)
        expected = weights / sums[:, 0, _COUNT]
        deviations = np.where(is_stair, means * expected / np.maximum(line, 1e-12), 0.0)
        beside = with_neighbours(is_stair)
        return counts[beside], np.maximum(deviations[beside], -0.9)


def _fitted(sums: FloatArray) -> FloatArray:
    """Return the seconds of each term, [_NUM_TERMS]."""
    # Importing SciPy takes 0.3 s, and most engines know their profile.
    from scipy.optimize import nnls

    terms, right = sums[:_NUM_TERMS, :_NUM_TERMS], sums[:_NUM_TERMS, _SECONDS]
    squares = np.diagonal(terms)
    sizes = np.sqrt(np.where(squares > 0, squares, 1.0))
    scaled = terms / np.outer(sizes, sizes) + _RIDGE * np.eye(_NUM_TERMS)
    root = np.linalg.cholesky(scaled)
    found, _ = nnls(root.T, np.linalg.solve(root, right / sizes))
    costs: FloatArray = found / sizes
    return costs


def _terms(work: StepWork) -> tuple[float, ...]:
    num = work.num_positions
    beyond = [max(0, num - kink) for kink in _KINKS]
    return (1.0, num, work.num_decodes, work.num_kv_tokens, work.prefill_context, *beyond)


def cell_of(size: float) -> int:
    """Return the cell of a size: single sizes while small, then geometric."""
    exact = round(1 / (_CELL - 1))
    return int(size) if size <= exact else exact + round(math.log(size / exact, _CELL))


def clear_stairs(means: FloatArray, squares: FloatArray, nums: FloatArray) -> BoolArray:
    """Return the cells off the line by three standard errors, by moments of the deviations."""
    noise = float((nums * np.maximum(squares - means**2, 0.0)).sum() / nums.sum())
    found: BoolArray = np.abs(means) > _CLEAR * np.sqrt(noise / nums)
    return found


def with_neighbours(cells: BoolArray) -> BoolArray:
    """Add neighbours of cells, in which a stair begins or ends."""
    beside = cells.copy()
    beside[1:] |= cells[:-1]
    beside[:-1] |= cells[1:]
    return beside
