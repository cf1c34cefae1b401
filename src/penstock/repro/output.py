"""Tables, pictures and intervals of a reproduction. matplotlib is imported when one is drawn."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from penstock.repro import ReproError


def pyplot() -> Any:
    """matplotlib's pyplot, drawing into files. Raises: ReproError where it is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ReproError("reproduce needs matplotlib: pip install 'penstock[plot]'") from error
    matplotlib.use("agg")
    from matplotlib import pyplot

    return pyplot


def write_table(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A CSV file; floats with six significant digits. Raises: OSError."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        for row in rows:
            writer.writerow([f"{x:.6g}" if isinstance(x, float) else x for x in row])


def save_figure(figure: Any, path: Path) -> None:
    """Write a picture and forget it. Raises: OSError."""
    figure.savefig(path, dpi=150)
    pyplot().close(figure)


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its interval of 95%."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} ({self.low:.2f} to {self.high:.2f})"


def student(values: Sequence[float]) -> Interval:
    """Of a mean, by Student's t; of a single value nothing can be said."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return Interval(mean, -math.inf, math.inf)
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    half = float(stats.t.ppf(0.975, len(values) - 1)) * error
    return Interval(mean, mean - half, mean + half)
