"""The command of a benchmark: the same options, tables, verdicts, JSON and result files for all."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from lab.common.claims import ClaimVerdict, summary

DATA = Path(os.environ.get("PENSTOCK_DATA", "../shared/data"))
"""Recorded measurements and traces, where `--data` names no other folder."""


@dataclass(frozen=True)
class ResultTable:
    """Cells as they are shown."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def table(title: str, rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> ResultTable:
    """Of rows with named figures. columns: header to format string, such as "{total:.2f}"."""
    cells = [[form.format_map(row) for form in columns.values()] for row in rows]
    return ResultTable(title, list(columns), cells)


@dataclass(frozen=True)
class Results:
    """What a benchmark came to. runs: its figures, for JSON."""

    runs: Any
    verdicts: Sequence[ClaimVerdict] = ()
    tables: Sequence[ResultTable] = field(default_factory=list)


def parser(doc: str | None, quick: str = "") -> argparse.ArgumentParser:
    """With what every benchmark takes. quick: help of `--quick`, if there is such a thing."""
    made = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    made.add_argument("--json", action="store_true", help="one JSON object on standard output")
    made.add_argument("--result", type=Path, metavar="FILE", help="write a result file, too")
    if quick:
        made.add_argument("--quick", action="store_true", help=quick)
    return made


def count(text: str) -> int:
    """Parse an option's number from 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: numbers from 1")
    return int(text)


def counts(text: str) -> list[int]:
    """Parse numbers from 1 between commas."""
    return [count(part) for part in text.split(",")]


def names_of(known: Collection[str]) -> Callable[[str], list[str]]:
    """Return a parser of known names between commas."""

    def parse(text: str) -> list[str]:
        if unknown := [name for name in text.split(",") if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r}; allowed: {', '.join(known)}")
        return text.split(",")

    return parse


def tell(args: argparse.Namespace, results: Results) -> int:
    """Print a benchmark's results as was asked for; returns 0. Raises: OSError."""
    if args.result:
        save(args.result, results)
    if args.json:
        print(json.dumps({"runs": results.runs, "verdict": summary(results.verdicts)}))
        return 0
    show(results)
    return 0


def show(results: Results) -> None:
    """Tables and verdicts on standard output."""
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console(width=None if sys.stdout.isatty() else 200)
    for one in results.tables:
        shown = RichTable(title=one.title)
        for i, column in enumerate(one.header):
            shown.add_column(column, justify="right" if i else "left")
        for row in one.rows:
            shown.add_row(*row)
        console.print(shown)
    for verdict in results.verdicts:
        print(verdict.line())


def save(path: Path, results: Results, **told: str) -> None:
    """A result file (`lab.common.pages`): what was measured by which command, when and where;
    `told` says otherwise. What an older file says about the experiment is kept. Raises: OSError."""
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    arguments = [a for a in sys.argv[1:] if a not in ("--result", str(path), f"--result={path}")]
    found = {key: kept[key] for key in ("title", "order", "about") if key in kept} | {
        "command": " ".join(["python -m", _module(), *arguments]),
        "date": date.today().isoformat(),
        "machine": machine(),
        **told,
        "tables": [asdict(one) for one in results.tables],
        "verdicts": [v.line() for v in results.verdicts],
    }
    write_result(path, found)


def write_result(path: Path, found: Mapping[str, Any]) -> None:
    """JSON, a table's row on each line. Raises: OSError."""
    rows: list[str] = []

    def one_line(cells: Sequence[str]) -> str:
        rows.append(json.dumps(cells, ensure_ascii=False))
        return f"@row {len(rows) - 1}@"

    tables = [
        {**one, "header": one_line(one["header"]), "rows": [one_line(row) for row in one["rows"]]}
        for one in found.get("tables", ())
    ]
    text = json.dumps({**found, "tables": tables}, indent=1, ensure_ascii=False)
    for i, row in enumerate(rows):
        text = text.replace(f'"@row {i}@"', row)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def machine() -> str:
    """Number of cores, and the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(x.partition(": ")[2] for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{os.cpu_count()} cores, {name}"


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).stem
