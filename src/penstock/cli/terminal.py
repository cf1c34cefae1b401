"""Terminal output of commands: one-line errors, progress bars, tables; numbers in options."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import typer

_T = TypeVar("_T")

SERVE_EXTRA = frozenset(
    {
        "fastapi", "google", "grpc", "huggingface_hub", "prometheus_client", "safetensors",
        "starlette", "tokenizers", "torch", "transformers", "uvicorn",
    }
)  # fmt: skip
"""Import names of the packages of the extra `serve`."""

_EXTRA = "pip install -e '.[{0}]' in a clone, or 'FILE.whl[{0}]'"
_PIPED = 240  # columns of a table in a file or a pipe
_LINE_EVERY_S = 10  # progress where there is no bar


@contextmanager
def one_line(*expected: type[Exception]) -> Iterator[None]:
    """Exit with code 2 and one line on standard error if one of `expected` is raised."""
    try:
        yield
    except expected as error:
        print("penstock:", " ".join(str(error).split()), file=sys.stderr)
        raise typer.Exit(2) from error


def what_to_install(error: ModuleNotFoundError) -> str | None:
    """Return one line on the extra to install for a missing module; None for other modules."""
    module = (error.name or "").partition(".")[0]
    if module == "opentelemetry":
        return f"this needs OpenTelemetry, which is not installed: {_EXTRA.format('otel')}"
    if module not in SERVE_EXTRA:
        return None
    return (
        f"this needs {module}, which is not installed: {_EXTRA.format('serve')} (on Linux without "
        "a GPU: with --extra-index-url https://download.pytorch.org/whl/cpu)"
    )


def note(line: str) -> None:
    """Print a line for the user on standard error."""
    print(f"penstock: {line}", file=sys.stderr)


def announce(line: str) -> None:
    """Print a line and flush, as scripts wait for it. Errors (a full disk) are ignored."""
    try:
        print(f"penstock: {line}", flush=True)
    except OSError:
        # The buffered rest would fail again at exit.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """Parse positive numbers separated by commas. Raises: ConfigError."""
    from penstock.config import ConfigError

    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"{option} takes positive numbers separated by commas, not {text!r}")
    return numbers


def print_table(title: str | None, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table, with the first column left-aligned and the others right-aligned."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title)
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=not i)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED).print(table)


@contextmanager
def progress(total: int | None, what: str) -> Iterator[Callable[[int], None]]:
    """Show a progress bar, or lines where standard error is no terminal; yield what advances it."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    is_shown = console.is_terminal
    with Progress(console=console, transient=True, disable=not is_shown) as bar:
        task, told_at = bar.add_task(what, total=total), time.monotonic()

        def advance(num: int) -> None:
            nonlocal told_at
            bar.advance(task, num)
            if not is_shown and time.monotonic() > told_at + _LINE_EVERY_S:
                told_at = time.monotonic()
                done = int(bar.tasks[task].completed)
                print(f"{what}: {done:,}{f' of {total:,}' if total else ''}", file=sys.stderr)

        yield advance


def with_progress(items: Iterable[_T], total: int, what: str) -> Iterator[_T]:
    """Yield the items, with a progress bar."""
    with progress(total, what) as advance:
        for item in items:
            yield item
            advance(1)
