"""Bad input as one line and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer


@contextmanager
def one_line(*expected: type[Exception]) -> Iterator[None]:
    """End the program with one line on standard error when one of `expected` is raised."""
    try:
        yield
    except expected as error:
        print("penstock:", " ".join(str(error).split()), file=sys.stderr)
        raise typer.Exit(2) from error
