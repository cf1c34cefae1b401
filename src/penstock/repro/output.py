"""Tables and pictures of a reproduction. matplotlib is imported when one is drawn."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

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
