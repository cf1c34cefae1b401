"""Files of an experiment: tables as CSV and pictures. matplotlib is imported when one is drawn."""

from __future__ import annotations

import csv
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lab.common.experiment import LabError
from lab.common.statistics import Interval


def pyplot() -> Any:
    """matplotlib's pyplot, drawing into files. Raises: LabError where it is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise LabError("reproduce needs matplotlib: pip install matplotlib") from error
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


def rows_of(cells: Mapping[tuple[Any, ...], Iterable[Any]]) -> Iterator[tuple[object, ...]]:
    """Of a table: the cell, the seed or turn, and its figure, or several of them."""
    for cell, found in cells.items():
        for number, values in enumerate(found):
            yield (*cell, number, *map(float, np.atleast_1d(values)))


def write_rates(path: Path, first: str, rates: Mapping[Any, Mapping[str, Iterable[float]]]) -> None:
    """Tokens per second of live systems in each turn, as CSV. first: what the outer keys are."""
    cells = {(key, name): own for key, by_name in rates.items() for name, own in by_name.items()}
    write_table(path, (first, "system", "turn", "tokens_per_s"), rows_of(cells))


def save_figure(figure: Any, path: Path) -> None:
    """Write a picture as PNG to `path` and as SVG beside it, and forget it. Raises: OSError."""
    figure.savefig(path, dpi=120)
    # The same picture is the same file: no date in it, and names that are no random numbers.
    with pyplot().rc_context({"svg.hashsalt": "penstock"}):
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    pyplot().close(figure)


COLOURS = ("#0072B2", "#E69F00", "#000000", "#CC79A7", "#56B4E9", "#882255", "#888888", "#D55E00")
"""Okabe and Ito's without its green and yellow, and two of Tol's: told apart by everybody, and
beside no red a green."""
_TITLE_PER_INCH = 8
"""Characters of a title."""
MARKERS = "osD^vPX*"
LINES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (3, 1)), (0, (1, 1)), (0, (8, 2)))


@dataclass(frozen=True)
class Plot:
    """One plot of a picture. lines: x and y by label; the same label looks the same in all plots of
    a picture. bands: the lowest and highest y of a line, where it is a mean. axes: what
    matplotlib's `Axes.set` takes. style: "-" a line, "o" marks, "." small ones, "o-" both; a label
    has its own in `styles`, where "k--" is a line to compare with."""

    lines: Mapping[str, tuple[Any, Any]]
    axes: dict[str, Any] = field(default_factory=dict)
    style: str = "-"
    styles: Mapping[str, str] = field(default_factory=dict)
    bands: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)


def draw(path: Path, title: str, plots: Sequence[Sequence[Plot]]) -> None:
    """A picture of plots in rows, as PNG and SVG, with one legend beside all of them.
    Raises: LabError, OSError."""
    rows, columns = len(plots), len(plots[0])
    flat = [plot for row in plots for plot in row]
    labels = list(dict.fromkeys(label for plot in flat for label in plot.lines))
    looks = _looks(labels, {name: style for plot in flat for name, style in plot.styles.items()})
    width = max(5.5 * columns, 6.5)
    # As many names side by side as there is room for.
    names = max(1, int(width / (0.7 + 0.11 * max(map(len, labels)))))
    legend_rows = -(-len(labels) // names)
    with pyplot().rc_context({"font.size": 13, "legend.fontsize": 12}):
        figure, grid = pyplot().subplots(
            rows,
            columns,
            figsize=(width, 3.8 * rows + 0.7 + 0.3 * legend_rows),
            layout="constrained",
            squeeze=False,
        )
        handles: dict[str, Any] = {}
        for axes, plot in zip(grid.flat, flat, strict=True):
            handles = _fill(axes, plot, looks) | handles
        figure.suptitle(textwrap.fill(title, round(_TITLE_PER_INCH * figure.get_figwidth())))
        figure.legend(
            [handles[label] for label in labels], labels, loc="outside lower center", ncols=names
        )
        save_figure(figure, path)


def draw_intervals(
    path: Path,
    title: str,
    panels: Mapping[str, Mapping[str, Mapping[str, Interval]]],
    ylabel: str,
    yscale: str = "linear",
) -> None:
    """Plots side by side: for each series a mark with its interval above every name, beside a line
    at 1. panels: intervals by plot, series and name. Raises: LabError, OSError."""
    labels = list(next(iter(panels.values())))
    figure, grid = pyplot().subplots(
        1, len(panels), figsize=(max(11, 6 * len(panels)), 4.8), layout="constrained", squeeze=False
    )
    handles: list[Any] = []
    for axes, (panel, by_series) in zip(grid.flat, panels.items(), strict=True):
        handles = []
        for i, found in enumerate(by_series.values()):
            places = np.arange(len(found)) + 0.2 * (i - (len(labels) - 1) / 2)
            means = [x.mean for x in found.values()]
            errors = [[x.mean - max(x.low, 0) for x in found.values()]]
            errors.append([x.half for x in found.values()])
            look: dict[str, Any] = {"fmt": MARKERS[i], "color": COLOURS[i], "capsize": 4}
            handles.append(axes.errorbar(places, means, errors, markersize=7, **look))
            axes.set_xticks(range(len(found)), list(found), fontsize=11)
        axes.axhline(1, color="#555555", linewidth=1.2, zorder=1)
        axes.set(title=panel, yscale=yscale)
        axes.grid(axis="y", which="both", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
    grid[0, 0].set_ylabel(ylabel, fontsize=12)
    figure.suptitle(title)
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=12)
    save_figure(figure, path)


def _looks(labels: Sequence[str], styles: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Colour, mark and kind of line by label."""
    looks: dict[str, dict[str, Any]] = {}
    own = [label for label in labels if not styles.get(label, "").startswith("k")]
    for i, label in enumerate(own):
        # A colour that comes again has another mark and another kind of line.
        turn = (i + 3 * (i // len(COLOURS))) % len(COLOURS)
        colour = COLOURS[i % len(COLOURS)]
        looks[label] = {"color": colour, "marker": MARKERS[turn], "linestyle": LINES[turn]}
    # What others are compared with is grey and thin, so that it covers nothing.
    reference: dict[str, Any] = {"color": "#555555", "marker": "", "linewidth": 1.4, "zorder": 1.5}
    for label in labels:
        if label not in looks:
            looks[label] = {**reference, "linestyle": styles[label][1:] or "-"}
    return looks


def _plain_ticks(axes: Any) -> None:
    """On logarithmic scales: 1, 2, 5, 10, … or 1, 10, … as there is room, and no powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        if axis.get_scale() == "log" and low > 0 and high < 1000 * low:
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
            axis.set_minor_formatter(NullFormatter())


def _fill(axes: Any, plot: Plot, looks: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Draw a plot; returns what its legend shows, by label."""
    handles = {}
    for label, (x, y) in plot.lines.items():
        style = plot.styles.get(label, plot.style)
        look = dict(looks[label])
        if not style.startswith("k"):
            look["marker"] = look["marker"] if style.strip("-") else ""
            look["linestyle"] = look["linestyle"] if "-" in style else ""
        size = {"linewidth": 1.8, "markersize": 2.5 if "." in style else 6}
        (handles[label],) = axes.plot(x, y, **{**size, **look})
        if label in plot.bands:
            low, high = plot.bands[label]
            axes.fill_between(x, low, high, color=look["color"], alpha=0.2, linewidth=0)
    axes.set(**plot.axes)
    _plain_ticks(axes)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    return handles


def draw_cells(path: Path, title: str, rows: Mapping[str, tuple[Interval, float]]) -> None:
    """Cells from the best down: a mark with its interval, and a second ratio, beside a line at 1.
    Raises: LabError, OSError."""
    ordered = sorted(rows.items(), key=lambda pair: pair[1][0].mean)
    names = [name for name, _ in ordered]
    found = [x for _, (x, _) in ordered]
    means = [x.mean for x in found]
    errors = [[x.mean - x.low if x.half else 0.0 for x in found], [x.half for x in found]]
    size = (9, 1.2 + 0.2 * len(names))
    figure, axes = pyplot().subplots(figsize=size, layout="constrained")
    axes.plot([x for _, (_, x) in ordered], names, "D", color=COLOURS[4], markersize=4)
    axes.errorbar(means, names, xerr=errors, fmt="o", color=COLOURS[0], markersize=5, capsize=2)
    axes.axvline(1, color="#555555", linewidth=1.2, zorder=1)
    axes.set(xscale="log", xlabel=title, ylim=(-1, len(names)))
    ticks = [0.8, 1, 1.25, 1.5, 2, 3, 5, 10]
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axes.xaxis.minorticks_off()
    axes.tick_params(axis="y", labelsize=8)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    save_figure(figure, path)
