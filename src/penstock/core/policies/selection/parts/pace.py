"""How fast the target decodes, how much of its time can be saved by drafts, and what it costs the
host to choose a drafter again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.core.policies.base import View
from penstock.core.state import Outcome

_DECAY = 0.99
_MOST_OVERHEAD = 2.0
"""Most time of a step that counts, over what its rows and drafts should take: more is no work."""
_UNDRAFTED_WEIGHT = 0.1
"""Of a step without drafts, towards the time for replays, which hardly pay where drafts do not."""


@dataclass(slots=True)
class Pace:
    """What the target's decoding steps are like: rows and requests, faded; and their seconds in
    all, each step counting for no more than twice what its rows and drafts take by themselves, and
    for little where nobody drafted: then there is little to find out about drafters."""

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

    def observe(self, outcomes: Sequence[Outcome], view: View) -> None:
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


_FEWEST_PAUSES = 8
"""Of either kind, before anything is said of reviews."""
_PAUSE_WEIGHT = 0.05
_REVIEWS_DECAY = 0.999
"""For each pause without a review: half is left after 700."""
_LONGEST_PAUSE = 4.0
"""Over the mean of those before: a longer one is something else."""


@dataclass(slots=True)
class _Pauses:
    seconds: float = 0.0
    num: int = 0

    def observe(self, seconds: float) -> None:
        if self.seconds > 0:
            seconds = min(seconds, _LONGEST_PAUSE * self.seconds)
        self.num += 1
        self.seconds += max(_PAUSE_WEIGHT, 1 / self.num) * (seconds - self.seconds)


class ReviewTime:
    """Seconds for which all requests wait while it is looked again at the drafter of one: by so
    much the pause before a step is longer. Where the host takes no time, in the simulator, 0."""

    def __init__(self) -> None:
        self._plain = _Pauses()
        self._reviews = _Pauses()
        self._num_reviews = 0
        self._is_usual = self._next_is_usual = True

    def reviewed(self, num_requests: int) -> None:
        """Before the coming step so many requests were looked at again."""
        self._num_reviews += num_requests

    def began(self) -> None:
        """Before the coming step the host had to do with a new request as well."""
        self._is_usual = False

    def ended(self) -> None:
        """A request has ended, which keeps the host busy after the step that is observed next."""
        self._next_is_usual = False

    def observe(self, pause: float) -> None:
        """The step has ended; it began so long after the one before."""
        if self._is_usual and 0 <= pause < math.inf:
            if not self._num_reviews:
                self._plain.observe(pause)
                # What is not measured any more must not keep reviews away for good.
                self._reviews.seconds *= _REVIEWS_DECAY
            elif self._plain.num:
                self._reviews.observe((pause - self._plain.seconds) / self._num_reviews)
        self._num_reviews = 0
        self._is_usual, self._next_is_usual = self._next_is_usual, True

    @property
    def seconds(self) -> float:
        """Of one review; 0 while it is not known."""
        if min(self._plain.num, self._reviews.num) < _FEWEST_PAUSES:
            return 0.0
        return max(0.0, self._reviews.seconds)


_FAVOURITE_WEIGHT = 0.05
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
        weight = max(_FAVOURITE_WEIGHT, 1 / self._num)
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
