"""Pace of decoding, the host's cost of choosing a drafter, and what drafters save on average."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.core.policies.base import View
from penstock.core.state import Outcome

_DECAY = 0.99  # memory a step; chosen by hand
_MOST_OVERHEAD = 2.0
"""Most time of a step that counts, over what its rows and drafts should take; the rest is idle."""
_UNDRAFTED_WEIGHT = 0.1
"""Weight of a step without drafts in the time for replays, which hardly pay there."""


@dataclass(slots=True)
class Pace:
    """Mean target step; its seconds count at most twice what its rows and drafts take."""

    rows: float = 0.0
    requests: float = 0.0
    steps: float = 0.0
    total_s: float = 0.0
    last: float | None = None

    @property
    def num_sharing(self) -> int:
        """Requests of a target step."""
        return max(1, round(self.requests / self.steps)) if self.steps else 1

    @property
    def num_undrafted_rows(self) -> int:
        """Rows of a target step besides those of one request's draft."""
        if not self.requests:
            return 1
        drafted = self.rows / self.requests - 1
        return max(1, round(self.rows / self.steps - drafted))

    def on_step(self, outcomes: Sequence[Outcome], view: View) -> None:
        passed = math.inf if self.last is None else view.now - self.last
        self.last = view.now
        rows = 0
        drafts: dict[str, list[int]] = {}
        for state, verdict in outcomes:
            if state.num_output_tokens == len(verdict.token_ids):
                return
            rows += 1 + verdict.num_drafted
            if verdict.drafter is not None:
                drafts.setdefault(verdict.drafter, []).append(verdict.num_drafted)
        if not outcomes:
            return
        times = view.learn.times
        seconds = times.target(rows)
        for drafter, lengths in drafts.items():
            seconds += max(lengths) * times.curve_of(drafter)(len(lengths))
        counted = 1.0 if drafts else _UNDRAFTED_WEIGHT
        self.total_s += counted * min(passed, _MOST_OVERHEAD * seconds)
        self.rows = _DECAY * self.rows + rows
        self.requests = _DECAY * self.requests + len(outcomes)
        self.steps = _DECAY * self.steps + 1


_FEWEST_PAUSES = 8  # least pauses of either kind before a review's time is known
_PAUSE_WEIGHT = 0.05  # weight of a pause in its mean; chosen by hand
_REVIEWS_DECAY = 0.999  # decay per pause without a review: half is left after 700
_LONGEST_PAUSE = 4.0
"""Longest pause that counts, over the mean before: longer ones have other causes."""


@dataclass(slots=True)
class _Pauses:
    seconds: float = 0.0
    num: int = 0

    def add_pause(self, seconds: float) -> None:
        if self.seconds > 0:
            seconds = min(seconds, _LONGEST_PAUSE * self.seconds)
        self.num += 1
        self.seconds += max(_PAUSE_WEIGHT, 1 / self.num) * (seconds - self.seconds)


class ReviewTime:
    """Seconds that all requests wait for a review: the pause before a step is longer by it."""

    def __init__(self) -> None:
        self._plain = _Pauses()
        self._reviews = _Pauses()
        self._num_reviews = 0
        self._is_usual = self._next_is_usual = True

    def reviewed(self, num_requests: int) -> None:
        """Note reviews before the coming step."""
        self._num_reviews += num_requests

    def began(self) -> None:
        """Note a new request before the coming step, which also takes the host's time."""
        self._is_usual = False

    def ended(self) -> None:
        """Note the end of a request: the host is busy after the step that is observed next."""
        self._next_is_usual = False

    def add_pause(self, pause: float) -> None:
        """Take in a step that began `pause` seconds after the one before."""
        if self._is_usual and 0 <= pause < math.inf:
            if not self._num_reviews:
                self._plain.add_pause(pause)
                # What is not measured any more must not prevent reviews for good.
                self._reviews.seconds *= _REVIEWS_DECAY
            elif self._plain.num:
                self._reviews.add_pause((pause - self._plain.seconds) / self._num_reviews)
        self._num_reviews = 0
        self._is_usual, self._next_is_usual = self._next_is_usual, True

    @property
    def seconds(self) -> float:
        """Seconds of one review; 0 while unknown."""
        if min(self._plain.num, self._reviews.num) < _FEWEST_PAUSES:
            return 0.0
        return max(0.0, self._reviews.seconds)


_FAVOURITE_WEIGHT = 0.05  # weight of a request in the means; chosen by hand
_FEWEST = 16  # requests before a favourite is known
_ASKED = 8  # one request in so many is chosen for in any case, to notice changes
_OTHER_LOAD = 1.5  # factor of requests a step from which on earlier findings do not hold


class Favourite:
    """Mean savings of each drafter per token, and of the best for each request."""

    def __init__(self) -> None:
        self._saved: dict[str, float] = {}
        self._best = 0.0
        self._num = 0
        self._num_unasked = 0
        self._num_sharing = 1

    def add_saved(self, saved: Mapping[str, float], num_sharing: int) -> None:
        """Take in the expected savings of a chosen request, in seconds per token by drafter."""
        if not self._num or not self._is_like(num_sharing):
            self._saved, self._best, self._num, self._num_sharing = {}, 0.0, 0, num_sharing
        self._num += 1
        weight = max(_FAVOURITE_WEIGHT, 1 / self._num)
        for name in self._saved.keys() | saved.keys():
            known = self._saved.get(name, 0.0)
            self._saved[name] = known + weight * (saved.get(name, 0.0) - known)
        self._best += weight * (max(0.0, *saved.values(), 0.0) - self._best)

    def gain(self, num_sharing: int) -> float | None:
        """Return the seconds per token that a choice gains over the favourite, if known."""
        if self._num < _FEWEST or not self._is_like(num_sharing):
            return None
        self._num_unasked = (self._num_unasked + 1) % _ASKED
        if not self._num_unasked:
            return None
        return self._best - max(0.0, *self._saved.values(), 0.0)

    @property
    def name(self) -> str | None:
        """Drafter with the largest mean saving; None if none pays."""
        name = max(self._saved, key=self._saved.__getitem__, default=None)
        return name if name is not None and self._saved[name] > 0 else None

    def _is_like(self, num_sharing: int) -> bool:
        most, least = max(num_sharing, self._num_sharing), min(num_sharing, self._num_sharing)
        return most <= _OTHER_LOAD * least
