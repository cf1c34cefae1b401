"""Trace files: request lengths and arrival times from CSV or JSON lines, optionally gzipped."""

from __future__ import annotations

import csv
import gzip
import json
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

_Row = TypeVar("_Row")

MAX_LENGTH = 10_000_000
"""Largest number of tokens in a column: beyond any context length, so a wrong unit."""


class WorkloadError(ValueError):
    """Input of a simulated run that cannot be used. The message is one line."""


class Trace(NamedTuple):
    """Columns of a trace file, all of one length, in file order.

    prompt_len, output_len: tokens, int64. arrival_time: seconds since the first arrival, float64.
    tenants: names. tpot, deadline: of the requests' `LatencyTarget` in seconds, NaN where a request
    has none. None: the file has no such column."""

    prompt_len: NDArray[np.int64]
    output_len: NDArray[np.int64]
    arrival_time: NDArray[np.float64] | None
    tenants: NDArray[np.str_] | None
    tpot: NDArray[np.float64] | None = None
    deadline: NDArray[np.float64] | None = None


class _Layout(NamedTuple):
    arrival: str | None
    prompt: str
    output: str
    tenant: str | None = None

    @property
    def required(self) -> list[str]:
        return [c for c in (self.arrival, self.prompt, self.output) if c is not None]


_LAYOUTS = (
    _Layout("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    _Layout("arrived_at", "num_prefill_tokens", "num_decode_tokens", "tenant"),
    _Layout(None, "num_prefill_tokens", "num_decode_tokens"),
    _Layout("Timestamp", "Request tokens", "Response tokens"),
    _Layout("timestamp", "input_length", "output_length"),
)
_ARRIVAL_COLUMNS = tuple(x.arrival for x in _LAYOUTS if x.arrival is not None)


def read_trace(path: Path) -> Trace:
    """Read a file of one of these column sets; further columns are ignored.

    - `TIMESTAMP, ContextTokens, GeneratedTokens` (Azure): times such as 2023-11-16 18:17:03.9799600
      (UTC);
    - `arrived_at, num_prefill_tokens, num_decode_tokens` (Vidur), optionally `tenant`: seconds;
    - `num_prefill_tokens, num_decode_tokens`: lengths without arrivals;
    - `Timestamp, Request tokens, Response tokens` (BurstGPT): seconds;
    - `timestamp, input_length, output_length` (Mooncake): whole milliseconds.

    Any of them may have `tpot_ms` and `deadline_ms`, latency targets of the requests; an empty cell
    is no target. A file with `.jsonl` in its name has a JSON object a line with the columns as
    keys. Raises: WorkloadError."""
    table = read_table(path)
    header = table.header
    layout = next((x for x in _LAYOUTS if all(c in header for c in x.required)), None)
    if layout is None:
        allowed = "; or ".join(", ".join(x.required) for x in _LAYOUTS)
        raise WorkloadError(
            f"{path} has the columns {', '.join(header) or '(none)'}; a trace has {allowed}"
        )
    table.demand_rows()
    return Trace(
        prompt_len=_lengths(table, layout.prompt),
        output_len=_lengths(table, layout.output),
        arrival_time=None if layout.arrival is None else _times(table, layout.arrival),
        tenants=_names(table, layout.tenant) if layout.tenant in header else None,
        tpot=_targets(table, "tpot_ms") if "tpot_ms" in header else None,
        deadline=_targets(table, "deadline_ms") if "deadline_ms" in header else None,
    )


def read_arrivals(path: Path) -> NDArray[np.float64]:
    """Read arrival times in seconds since the first, float64. Raises: WorkloadError.

    From a trace, or a file of one column, `TIMESTAMP` or `arrived_at`, with or without its
    header."""
    table = read_table(path)
    column = next((c for c in _ARRIVAL_COLUMNS if c in table.header), None)
    if column is None:
        if len(table.header) != 1:
            raise WorkloadError(
                f"{path} has no arrival times: it needs a column TIMESTAMP or arrived_at, "
                "or one column alone"
            )
        value = table.header[0]
        column = "TIMESTAMP" if ":" in value else "arrived_at"
        table = TraceTable(path, [column], [[value], *table.rows], [1, *table.lines])
    table.demand_rows()
    return _times(table, column)


@dataclass(frozen=True, slots=True)
class TraceTable:
    """Cells of a CSV file as text without the header, and the line number of each row."""

    path: Path
    header: list[str]
    rows: list[list[str]]
    lines: list[int]

    def demand_rows(self) -> None:
        """Raises: WorkloadError for a file without rows."""
        if not self.rows:
            raise WorkloadError(f"{self.path} has no rows")

    def column(self, name: str) -> list[str]:
        i = self.header.index(name)
        return [row[i] for row in self.rows]

    def error(self, row: int, name: str, complaint: str) -> WorkloadError:
        """Return an error that shows the cell and its line."""
        cell = self.column(name)[row]
        return WorkloadError(f"{self.path}, line {self.lines[row]}: {name} {cell!r} {complaint}")


def read_table(path: Path) -> TraceTable:
    """Read a CSV or JSON lines file. Raises: WorkloadError."""
    found = _read_lines(path, _json_rows if ".jsonl" in path.suffixes else _csv_rows)
    if not found:
        raise WorkloadError(f"{path} is empty")
    lines, rows = map(list, zip(*found, strict=True))
    width = len(rows[0])
    for row, line in zip(rows, lines, strict=True):
        if len(row) != width:
            raise WorkloadError(f"{path}, line {line}: {len(row)} columns instead of {width}")
    return TraceTable(path, [name.strip() for name in rows[0]], rows[1:], lines[1:])


def read_json_lines(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """Return the objects of a file of JSON lines, and their lines' numbers. Raises: WorkloadError.

    Empty lines are left out."""
    return _read_lines(path, _json_objects)


def _read_lines(
    path: Path, read: Callable[[Iterable[str]], Iterator[tuple[int, _Row]]]
) -> list[tuple[int, _Row]]:
    """Return what `read` yields of a text file, gzipped or not. Raises: WorkloadError."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="") as file:
            return list(read(file))
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path} is not text in UTF-8") from error
    except _BadLine as error:
        raise WorkloadError(f"{path}, line {error.line}: {error}") from error
    except (OSError, EOFError, zlib.error, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise WorkloadError(f"{path} cannot be read: {reason}") from error


class _BadLine(ValueError):
    def __init__(self, line: int, complaint: str) -> None:
        super().__init__(complaint)
        self.line = line


def _csv_rows(file: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader(file)
    for row in reader:
        if row:
            yield reader.line_num, row


def _json_objects(file: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise _BadLine(number, "not JSON") from error
        if not isinstance(record, dict):
            raise _BadLine(number, "not a JSON object")
        yield number, record


def _json_rows(file: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield line numbers and cells of JSON objects, the keys first. Raises: _BadLine."""
    names: list[str] = []
    for number, record in _json_objects(file):
        if not names:
            names = list(record)
            yield number, names
        missing = [name for name in names if name not in record]
        if missing:
            raise _BadLine(number, f"{missing[0]} is missing")
        yield number, [str(record[name]) for name in names]


def numbers(table: TraceTable, name: str) -> NDArray[np.float64]:
    """Return a column of finite numbers, shape [rows]. Raises: WorkloadError."""
    cells = table.column(name)
    try:
        values = np.array(list(map(float, cells)))
    except ValueError as error:
        row = _first(cells, float)
        raise table.error(row, name, "is not a number") from error
    if not np.isfinite(values).all():
        raise table.error(int(np.argmin(np.isfinite(values))), name, "is not a finite number")
    return values


def _lengths(table: TraceTable, name: str) -> NDArray[np.int64]:
    values = numbers(table, name)
    good = (values >= 1) & (values <= MAX_LENGTH) & (values == np.floor(values))
    if not good.all():
        complaint = f"is not a whole number from 1 to {MAX_LENGTH}"
        raise table.error(int(np.argmin(good)), name, complaint)
    return values.astype(np.int64)


def _times(table: TraceTable, name: str) -> NDArray[np.float64]:
    if name == "TIMESTAMP":
        stamps = _timestamps(table, name)
        values = np.asarray((stamps - stamps[0]) / np.timedelta64(1, "s"))
    else:
        values = numbers(table, name)
        if values.min() < 0:
            raise table.error(int(np.argmax(values < 0)), name, "is negative")
        if name == "timestamp":
            whole = values == np.floor(values)
            if not whole.all():
                complaint = "is not a whole number of milliseconds"
                raise table.error(int(np.argmin(whole)), name, complaint)
            values /= 1000.0
        values -= values[0]
    if (np.diff(values) < 0).any():
        row = int(np.argmax(np.diff(values) < 0)) + 1
        raise table.error(row, name, "is earlier than the line before: times must be sorted")
    return values


def _timestamps(table: TraceTable, name: str) -> NDArray[np.datetime64]:
    cells = [cell.strip().removesuffix("Z").removesuffix("+00:00") for cell in table.column(name)]
    with warnings.catch_warnings():
        # NumPy only warns of a UTC offset and then ignores it.
        warnings.simplefilter("error")
        try:
            stamps = np.array(cells, dtype="datetime64[ns]")
        except (ValueError, OverflowError, Warning) as error:
            row = _first(cells, lambda cell: np.datetime64(cell, "ns"))
            raise table.error(row, name, "is not a time such as 2023-11-16 18:17:03.97") from error
    if np.isnat(stamps).any():
        raise table.error(int(np.argmax(np.isnat(stamps))), name, "is not a time")
    return stamps


def _names(table: TraceTable, name: str | None) -> NDArray[np.str_]:
    assert name is not None
    values = np.array([cell.strip() for cell in table.column(name)])
    if (values == "").any():
        raise table.error(int(np.argmax(values == "")), name, "is not a name")
    return values


def _targets(table: TraceTable, name: str) -> NDArray[np.float64]:
    """Return seconds from milliseconds; NaN for an empty cell."""
    cells = [cell.strip() for cell in table.column(name)]
    # JSON's null is written None.
    given = [row for row, cell in enumerate(cells) if cell not in ("", "None")]
    values = np.full(len(cells), np.nan)
    for row in given:
        try:
            values[row] = float(cells[row]) / 1000
        except ValueError as error:
            raise table.error(row, name, "is not a number") from error
        if not 0 < values[row] < np.inf:
            raise table.error(row, name, "is not a number of milliseconds over 0")
    return values


def _first(cells: list[str], parse: Callable[[str], object]) -> int:
    """Return the index of the first cell that `parse` refuses."""
    for i, cell in enumerate(cells):
        try:
            parse(cell)
        except (ValueError, OverflowError, Warning):
            return i
    raise AssertionError("every cell was fine")
