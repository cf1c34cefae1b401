"""A clock that moves only when it is told to."""

from __future__ import annotations


class VirtualClock:
    """Simulated seconds from 0."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def advance_to(self, time: float) -> None:
        """Set the time. Raises: ValueError if `time` is in the past."""
        if not time >= self._now:
            raise ValueError(f"the clock cannot go back from {self._now} to {time}")
        self._now = time
