"""Whether it is worth the host's time to choose a drafter for each request by itself.

Where a step takes less than a millisecond a choice takes as long as several rounds, and what it
saves over the drafter that is best for all may be less. Then most requests have that one unasked.
"""

from __future__ import annotations

from collections.abc import Mapping

_WEIGHT = 0.05
_FEWEST = 16
_ASKED = 8
"""One request in so many is chosen for whatever it costs, so that a change is noticed."""
_OTHER_LOAD = 1.5
"""What was found out at so many times as many requests a step, or as few, does not hold."""


class Favourite:
    """What drafters save requests by token, in the mean, and what the best for each would."""

    def __init__(self) -> None:
        self._saved: dict[str, float] = {}
        self._best = 0.0
        self._num = 0
        self._num_unasked = 0
        self._num_sharing = 1

    def observe(self, saved: Mapping[str, float], num_sharing: int) -> None:
        """A request has been chosen for: seconds saved for each token by every drafter that may
        pay, as far as could be known beforehand. num_sharing: requests of a step."""
        if not self._num or not self._is_like(num_sharing):
            self._saved, self._best, self._num, self._num_sharing = {}, 0.0, 0, num_sharing
        self._num += 1
        weight = max(_WEIGHT, 1 / self._num)
        for name in self._saved.keys() | saved.keys():
            known = self._saved.get(name, 0.0)
            self._saved[name] = known + weight * (saved.get(name, 0.0) - known)
        self._best += weight * (max(0.0, *saved.values(), 0.0) - self._best)

    def gain(self, num_sharing: int) -> float | None:
        """Seconds for each token that a choice saves over the favourite; None where that is not
        known, or a request should be chosen for anyway."""
        if self._num < _FEWEST or not self._is_like(num_sharing):
            return None
        self._num_unasked = (self._num_unasked + 1) % _ASKED
        if not self._num_unasked:
            return None
        return self._best - max(0.0, *self._saved.values(), 0.0)

    @property
    def name(self) -> str | None:
        """None: no drafter pays."""
        name = max(self._saved, key=self._saved.__getitem__, default=None)
        return name if name is not None and self._saved[name] > 0 else None

    def _is_like(self, num_sharing: int) -> bool:
        most, least = max(num_sharing, self._num_sharing), min(num_sharing, self._num_sharing)
        return most <= _OTHER_LOAD * least
