"""Why a request is not taken, and when to come again."""

from __future__ import annotations

import time
from collections import deque

_WINDOW_S = 30.0
_SHORTEST_S, _LONGEST_S = 1.0, 60.0
_COUNTED = 256


class NotTaken(Exception):
    """One line. retry_after_s: seconds after which a request may be taken."""

    def __init__(self, message: str, retry_after_s: float = _SHORTEST_S) -> None:
        super().__init__(message)
        self.retry_after_s = min(max(retry_after_s, _SHORTEST_S), _LONGEST_S)


class EngineUnavailable(NotTaken):
    """The engine takes no requests now."""


class QueueFull(NotTaken):
    """Too many requests wait already."""


class Departures:
    """When requests left a queue, for how long those in it will wait."""

    def __init__(self) -> None:
        self._times: deque[float] = deque(maxlen=_COUNTED)

    def add(self) -> None:
        """One has left."""
        self._times.append(time.monotonic())

    def seconds_for(self, num_requests: int) -> float:
        """Until so many have left, at the rate of the last departures; the longest time that is
        ever told where there were none lately."""
        now = time.monotonic()
        while self._times and now - self._times[0] > _WINDOW_S:
            self._times.popleft()
        if not self._times:
            return _LONGEST_S
        return num_requests * (now - self._times[0]) / len(self._times)
