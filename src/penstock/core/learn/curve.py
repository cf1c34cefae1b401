"""Seconds of steps by their size, as measured: they fall nowhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_STALL = 4.0
"""Largest measurement, as a multiple of the time so far of its size; above it is a stall."""
_MOST_KNOWN = 4096
"""Most predictions that are cached."""
_WEIGHT = 0.1
"""Weight of a measurement in its own cell."""
_MATURE = 20
"""Measurements after which a cell's deviation says more about the machine than about the size, and
after a `doubt` that may show the machine to be faster."""
_SCALE_WEIGHT = 0.05
"""Weight of a measurement of a mature cell in the speed factor of all cells. A longer memory would
follow the growth of contexts too slowly (0.4% of the default's speed on short outputs)."""
_MATURE_WEIGHT = 0.02
"""Weight of a measurement in its own mature cell."""
_REDRAW = 0.04
"""Relative change of a cell that redraws the curve. All of these are chosen by hand."""


@dataclass(slots=True)
class _Cell:
    """Average of measurements of nearly equal sizes.

    drawn: value in the curve. is_guess: not measured since the last `doubt`."""

    size: float
    seconds: float
    num: int = 1
    drawn: float | None = None
    is_guess: bool = False


class StepTimeCurve:
    """Non-decreasing, piecewise linear curve through exponentially averaged measurements.

    Sizes are pooled into cells a few per cent wide. The curve interpolates between measured cells,
    continues with the slope of the chord from the first to the last, and is flat before the first.

    The machine's current speed is one factor of all sizes and follows every measurement, so that a
    slow minute does not make the sizes tried in it look worse than the others."""

    def __init__(self, cell_width: float = 0.08) -> None:
        self._cell_width = cell_width
        self._num_exact = round(1 / cell_width)
        self._scale = 1.0
        self._num_sure = _MATURE
        self._cells: dict[int, _Cell] = {}
        self._sizes: FloatArray = np.empty(0)
        self._seconds: FloatArray = np.empty(0)
        self._tail_slope = 0.0
        self._stale = False
        self._known: dict[float, float] = {}

    @property
    def is_empty(self) -> bool:
        return not self._cells

    def doubt(self) -> None:
        """Turn all measurements into guesses.

        The machine may have been busy when they were taken. Other work only ever adds to a step, so
        a shorter one counts for much: as the machine's speed, and as the time of its own size."""
        self._num_sure = 0
        for cell in self._cells.values():
            cell.num, cell.is_guess = 0, True

    def add_measurement(self, size: float, seconds: float) -> None:
        """Add a measurement. The first of a cell counts in full, within its neighbours' times."""
        if size <= 0 or seconds < 0:
            return
        index = self._cell_of(size)
        cell = self._cells.get(index)
        seconds /= self._scale
        if cell is None:
            self._cells[index] = _Cell(size, self._between_neighbours(size, seconds))
            self._stale = True
            return
        if cell.seconds:
            # A stall of the machine must not look like a property of the size.
            seconds = min(seconds, _STALL * cell.seconds)
        weight = _WEIGHT
        cell.num += 1
        if cell.is_guess:
            cell.is_guess, self._stale = False, True
        if self._num_sure < _MATURE and cell.seconds:
            self._num_sure += 1
            if seconds < cell.seconds:
                change = 1 - (1 - seconds / cell.seconds) / (self._num_sure + 1)
                self._scale *= change
                seconds /= change
        elif cell.num > _MATURE and cell.seconds:
            weight = _MATURE_WEIGHT
            self._scale *= 1 + _SCALE_WEIGHT * (seconds / cell.seconds - 1)
        if seconds < cell.seconds:
            weight = max(weight, 1 / cell.num)
        cell.size += weight * (size - cell.size)
        cell.seconds += weight * (seconds - cell.seconds)
        if cell.drawn is None or abs(cell.seconds - cell.drawn) > _REDRAW * cell.drawn:
            self._stale = True

    def __call__(self, size: float) -> float:
        """Return the predicted seconds; 0 while nothing has been measured."""
        if self._stale:
            self._draw()
        known = self._known.get(size)
        if known is None:
            # A scheduler asks for the same few sizes thousands of times.
            known = self._known[size] = float(self._shape(np.array([size], dtype=np.float64))[0])
            if len(self._known) > _MOST_KNOWN:
                self._known = {}
        return self._scale * known

    def at(self, sizes: FloatArray | npt.NDArray[np.int64]) -> FloatArray:
        """Return the predicted seconds of several sizes; 0 while nothing has been measured."""
        if self._stale:
            self._draw()
        return self._scale * self._shape(sizes)

    def least(self, size: float) -> float:
        """Return the least seconds of this size, as measured at it or the next smaller one.

        Below all measured sizes: in proportion to the smallest."""
        points = self.points()
        below = [seconds for measured, seconds in points if round(measured) <= size]
        if below or not points:
            return max(below, default=0.0)
        smallest, seconds = points[0]
        return seconds * size / smallest

    def _shape(self, sizes: FloatArray | npt.NDArray[np.int64]) -> FloatArray:
        if not len(self._sizes):
            return np.zeros(np.shape(sizes))
        within: FloatArray = np.interp(sizes, self._sizes, self._seconds)
        beyond: FloatArray = np.maximum(sizes - self._sizes[-1], 0.0)
        return within + self._tail_slope * beyond

    def points(self) -> list[tuple[float, float]]:
        """Return the curve's corners (size, seconds)."""
        if self._stale:
            self._draw()
        seconds = self._scale * self._seconds
        return list(zip(self._sizes.tolist(), seconds.tolist(), strict=True))

    def _between_neighbours(self, size: float, seconds: float) -> float:
        """Clip a new size's time to those of its measured neighbours.

        A stall would otherwise keep the size from being tried again."""
        if self._stale:
            self._draw()
        i = int(np.searchsorted(self._sizes, size))
        if not 0 < i < len(self._sizes):
            return seconds
        return float(np.clip(seconds, self._seconds[i - 1], self._seconds[i]))

    def _draw(self) -> None:
        """Pool adjacent violators: the nearest non-decreasing curve, in the mean."""
        self._known = {}
        pools: list[tuple[list[float], float]] = []
        cells = sorted(self._cells.values(), key=lambda cell: cell.size)
        for cell, level in zip(cells, _with_guesses(cells), strict=True):
            cell.drawn = cell.seconds
            sizes = [cell.size]
            while pools and pools[-1][1] >= level:
                before, lower = pools.pop()
                level = (lower * len(before) + level * len(sizes)) / (len(before) + len(sizes))
                sizes = before + sizes
            pools.append((sizes, level))
        self._sizes = np.array([s for sizes, _ in pools for s in sizes])
        self._seconds = np.array([level for sizes, level in pools for _ in sizes])
        self._tail_slope = 0.0
        if len(self._sizes) > 1:
            rise = self._seconds[-1] - self._seconds[0]
            self._tail_slope = float(rise / (self._sizes[-1] - self._sizes[0]))
        self._stale = False

    def _cell_of(self, size: float) -> int:
        """Return the cell of a size: single integers while small, then geometric."""
        if size <= self._num_exact:
            return round(size)
        cell, edge = self._num_exact, float(self._num_exact)
        while edge < size:
            edge *= 1 + self._cell_width
            cell += 1
        return cell


def _with_guesses(cells: Sequence[_Cell]) -> list[float]:
    """Return the seconds of cells in ascending order, with guesses capped.

    A guess is at most the line through the measured cells, up to twice the largest measured size: a
    guess that is too high would keep its size from being tried."""
    measured = [cell for cell in cells if not cell.is_guess]
    if not measured or len(measured) == len(cells):
        return [cell.seconds for cell in cells]
    sizes, seconds = [c.size for c in measured], [c.seconds for c in measured]
    first, last = measured[0], measured[-1]
    known = []
    for cell in cells:
        most = cell.seconds
        if cell.size <= last.size:
            most = float(np.interp(cell.size, sizes, seconds))
        elif first is not last and cell.size <= 2 * last.size:
            slope = max(0.0, last.seconds - first.seconds) / (last.size - first.size)
            most = last.seconds + slope * (cell.size - last.size)
        known.append(min(cell.seconds, most) if cell.is_guess else cell.seconds)
    return known
