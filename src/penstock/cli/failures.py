"""Bad input as one line and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

_SERVE_EXTRA = frozenset(
    {
        "fastapi", "google", "grpc", "prometheus_client", "safetensors", "starlette", "tokenizers",
        "torch", "transformers", "uvicorn",
    }
)  # fmt: skip
"""What the extra `serve` installs, as it is imported."""


@contextmanager
def one_line(*expected: type[Exception]) -> Iterator[None]:
    """End the program with one line on standard error when one of `expected` is raised."""
    try:
        yield
    except expected as error:
        print("penstock:", " ".join(str(error).split()), file=sys.stderr)
        raise typer.Exit(2) from error


def what_to_install(error: ModuleNotFoundError) -> str | None:
    """One line for a module of an extra that is not installed; None for any other."""
    module = (error.name or "").partition(".")[0]
    if module not in _SERVE_EXTRA:
        return None
    return (
        f"this needs {module}, which is not installed: pip install 'penstock[serve]' (without a "
        "GPU first: pip install torch --index-url https://download.pytorch.org/whl/cpu)"
    )
