"""Time of a step as a measured curve: size (rows, or batch) to seconds, kept while it runs."""

from __future__ import annotations

import bisect


class StepTimeCurve:
    """A non-decreasing, piecewise linear curve through exponentially averaged measurements.

    Sizes are pooled into cells a few per cent wide. Between measured cells the curve interpolates;
    beyond the last it goes on with the slope of the chord from the first, and before the first it
    is flat: a smaller step is never predicted dearer than a larger one.
    """

    def __init__(self, weight: float = 0.1, cell_width: float = 0.08) -> None:
        self._weight = weight
        self._cell_width = cell_width
        self._cells: dict[int, tuple[float, float]] = {}
        self._sizes: list[float] = []
        self._seconds: list[float] = []
        self._stale = False

    @property
    def is_empty(self) -> bool:
        return not self._cells

    def observe(self, size: float, seconds: float) -> None:
        """Add a measurement. The first of a cell counts in full."""
        if size <= 0 or seconds < 0:
            return
        cell = self._cell(size)
        old = self._cells.get(cell)
        if old is None:
            self._cells[cell] = (size, seconds)
        else:
            w = self._weight
            # A stall of the machine must not look like a property of the size.
            seconds = min(seconds, 4 * old[1])
            self._cells[cell] = (old[0] + w * (size - old[0]), old[1] + w * (seconds - old[1]))
        self._stale = True

    def __call__(self, size: float) -> float:
        """Predicted seconds; 0 while nothing has been measured."""
        if self._stale:
            self._rebuild()
        sizes, seconds = self._sizes, self._seconds
        if not sizes:
            return 0.0
        if size <= sizes[0]:
            return seconds[0]
        if size >= sizes[-1]:
            return seconds[-1] + self._tail_slope() * (size - sizes[-1])
        i = bisect.bisect_right(sizes, size)
        share = (size - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
        return seconds[i - 1] + share * (seconds[i] - seconds[i - 1])

    def points(self) -> list[tuple[float, float]]:
        """The curve's corners (size, seconds)."""
        if self._stale:
            self._rebuild()
        return list(zip(self._sizes, self._seconds, strict=True))

    def _tail_slope(self) -> float:
        if len(self._sizes) == 1:
            return 0.0
        return (self._seconds[-1] - self._seconds[0]) / (self._sizes[-1] - self._sizes[0])

    def _rebuild(self) -> None:
        """Pool adjacent violators: the nearest non-decreasing curve, in the mean."""
        pools: list[tuple[list[float], float]] = []
        for size, seconds in sorted(self._cells.values()):
            sizes = [size]
            while pools and pools[-1][1] >= seconds:
                before, level = pools.pop()
                seconds = (level * len(before) + seconds * len(sizes)) / (len(before) + len(sizes))
                sizes = before + sizes
            pools.append((sizes, seconds))
        self._sizes = [s for sizes, _ in pools for s in sizes]
        self._seconds = [level for sizes, level in pools for _ in sizes]
        self._stale = False

    def _cell(self, size: float) -> int:
        """Cells are single integers while small, then geometric."""
        exact = round(1 / self._cell_width)
        if size <= exact:
            return round(size)
        cell, edge = exact, float(exact)
        while edge < size:
            edge *= 1 + self._cell_width
            cell += 1
        return cell
