"""Checks of numbers that were saved."""

from __future__ import annotations

from typing import Any

_MOST = 1e12  # far above any second or weight


def number(value: Any, most: float = _MOST) -> float:
    """Return a saved number. Raises ValueError unless it is from 0 to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(f"{value!r} is not a number from 0 to {most:g}")
    return float(value)


def numbers(values: Any) -> list[float]:
    """Return a saved list of numbers. Raises ValueError."""
    return [number(value) for value in values]
