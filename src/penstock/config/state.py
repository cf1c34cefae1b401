"""Folder of what was learned."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

_NONE = "none"


def default_state_folder() -> Path | None:
    """Return the folder in the user's cache; None for a user without a home."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        # A relative path does not count, by the XDG specification.
        return (cache if cache.is_absolute() else Path.home() / ".cache") / "penstock" / "state"
    except RuntimeError:
        return None


def _without_none(value: Any) -> Any:
    return None if value == _NONE else value


def _writable(folder: Path | None) -> Path | None:
    """Check that a folder can be written or made, without making it. Raises ValueError."""
    if folder is None:
        return None
    folder = folder.expanduser().absolute()
    nearest = next(p for p in (folder, *folder.parents) if p.exists())
    if not nearest.is_dir():
        raise ValueError(f"{nearest} is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ValueError(f"{nearest} cannot be written; allowed: a folder, {_NONE}")
    return folder


StateFolder = Annotated[Path | None, AfterValidator(_writable), BeforeValidator(_without_none)]
