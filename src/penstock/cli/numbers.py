"""Numbers in options."""

from __future__ import annotations


def whole_numbers(option: str, text: str) -> tuple[int, ...]:
    """Positive numbers separated by commas. Raises: ConfigError."""
    from penstock.config import ConfigError

    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"{option} takes positive numbers separated by commas, not {text!r}")
    return numbers
