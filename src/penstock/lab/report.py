"""Files of an experiment: tables as CSV and pictures. matplotlib is imported when one is drawn."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.lab.experiment import LabError


def pyplot() -> Any:
    """matplotlib's pyplot, drawing into files. Raises: LabError where it is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise LabError("reproduce needs matplotlib: pip install 'penstock[plot]'") from error
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


@dataclass(frozen=True)
class Plot:
    """One plot of a picture. lines: x and y by label. axes: what matplotlib's `Axes.set` takes.
    style: of its lines; a line of its own in `styles`."""

    lines: Mapping[str, tuple[Any, Any]]
    axes: dict[str, Any] = field(default_factory=dict)
    style: str = "-"
    styles: Mapping[str, str] = field(default_factory=dict)


def draw(path: Path, title: str, plots: Sequence[Sequence[Plot]]) -> None:
    """A picture of plots in rows. Raises: LabError, OSError."""
    rows, columns = len(plots), len(plots[0])
    figure, grid = pyplot().subplots(
        rows, columns, figsize=(5 * columns, 3.5 * rows), layout="constrained", squeeze=False
    )
    for axes, plot in zip(grid.flat, (p for row in plots for p in row), strict=True):
        for label, (x, y) in plot.lines.items():
            axes.plot(x, y, plot.styles.get(label, plot.style), label=label, markersize=4)
        axes.set(**plot.axes)
        axes.legend(fontsize="small")
    figure.suptitle(title)
    save_figure(figure, path)
