"""Figures by key, a line of JSON each, kept in a file: a long comparison can be stopped and
continued, since what is there already is not measured again. A key ends with the seed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from lab.common.statistics import Interval, interval
from penstock.sim.parallel import HERE, Workers

Figures = dict[str, Any]


class Cells:
    """What was measured so far. Raises: OSError, ValueError (a file that holds something else)."""

    def __init__(self, out: Path, *, silent: bool = False) -> None:
        """out: read, and where new figures go; silent: only there, not on standard output."""
        self._out, self._silent = out, silent
        self.done: dict[str, Figures] = {}
        self.dates: dict[str, date] = {}
        if out.exists():
            lines = map(json.loads, out.read_text(encoding="utf-8").splitlines())
            self.done = {figures["key"]: figures for figures in lines}
            self.dates = dict.fromkeys(self.done, date.fromtimestamp(out.stat().st_mtime))

    def measure(self, key: str, measure: Callable[[], Figures]) -> Figures:
        """The figures under `key`, measured unless they are known."""
        return self.measure_all({key: measure})[0]

    def measure_all(
        self, cells: Mapping[str, Callable[[], Figures]], workers: Workers = HERE
    ) -> list[Figures]:
        """The figures under every key; what is not known is measured by the workers."""
        missing = {key: measure for key, measure in cells.items() if key not in self.done}
        for key, measured in zip(missing, workers.map(_timed, missing.values()), strict=True):
            figures = {"key": key, **measured}
            self.done[key] = figures
            self.dates[key] = date.today()
            with self._out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(figures) + "\n")
            if not self._silent:
                print(json.dumps(figures), flush=True)
        return [self.done[key] for key in cells]

    def values(self, key: str, figure: str) -> list[float]:
        """A figure by seed; of a key without seeds, one."""
        if key in self.done:
            return [self.done[key][figure]]
        seeds = (
            k for k in self.done if k.rpartition("/")[0] == key and k.rpartition("/")[2].isdigit()
        )
        return [self.done[k][figure] for k in sorted(seeds) if figure in self.done[k]]

    def mean(self, key: str, figure: str) -> Interval | None:
        """Over the seeds; None where nothing was measured."""
        values = self.values(key, figure)
        return interval(values) if values else None

    def ratio(self, key: str, rival: str, figure: str) -> Interval | None:
        """Mean of a figure over another key's, seed by seed."""
        ours, theirs = self.values(key, figure), self.values(rival, figure)
        pairs = list(zip(ours, theirs, strict=False))
        return interval([a / b for a, b in pairs]) if pairs else None


def _timed(measure: Callable[[], Figures]) -> Figures:
    started = time.process_time()
    return {**measure(), "cpu_s": time.process_time() - started}
