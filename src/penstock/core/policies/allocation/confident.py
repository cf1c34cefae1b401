"""Drafts that end where their own tokens stop paying: `throughput` with prices.

A drafter knows how sure it is of each token, and learns how far that can be believed. Every request
gets the same price of a position: the tokens that the step's time would otherwise yield. A draft
ends with the token whose predicted survival is under it. So positions go to whom they serve best,
over all requests of the step, without anybody's knowing the others' drafts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from penstock.core.learn.times import Times, round_seconds
from penstock.core.policies.allocation import Grant
from penstock.core.policies.allocation.throughput import Throughput
from penstock.core.state import Outcome
from penstock.core.view import DraftCandidate, View

_KEEP = 0.99
"""A drafter's yield is that of its last hundred drafts."""
_PRIOR_DRAFTS = 4.0
_FIRST_PAUSE = 8
_LONGEST_PAUSE = 256
_CLOCK_WEIGHT = 0.05
_PLAIN_EVERY, _NUM_PLAIN = 64, 2
"""Where drafts gain: of so many steps, how many have none, to know what those take."""
_TRIAL = 8
"""Steps of a trial after a pause."""


class Yield:
    """What drafts of one drafter come to, in the mean over its last ones; at first half of what
    they may be."""

    def __init__(self, k_max: int) -> None:
        half = k_max / 2
        self._num = _PRIOR_DRAFTS
        self._proposed, self._accepted = _PRIOR_DRAFTS * half, _PRIOR_DRAFTS * half / 2

    def observe(self, num_proposed: int, num_accepted: int) -> None:
        self._num = self._num * _KEEP + 1
        self._proposed = self._proposed * _KEEP + num_proposed
        self._accepted = self._accepted * _KEEP + num_accepted

    @property
    def proposed(self) -> float:
        return self._proposed / self._num

    @property
    def accepted(self) -> float:
        return self._accepted / self._num


class _Clock:
    """How much longer steps take than is expected of them, with drafts and without."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._expected: tuple[bool, float] | None = None
        self._ratios = {False: 1.0, True: 1.0}

    def expect(self, seconds: float, *, drafting: bool) -> None:
        """Of the step that comes."""
        self._expected = (drafting, seconds)

    def ended(self, now: float) -> None:
        if self._last is not None and self._expected is not None and self._expected[1] > 0:
            drafting, expected = self._expected
            # A longer one has waited for something else.
            ratio = min(2.0, (now - self._last) / expected)
            self._ratios[drafting] += _CLOCK_WEIGHT * (ratio - self._ratios[drafting])
        self._last, self._expected = now, None

    def seconds(self, expected: float, *, drafting: bool) -> float:
        return expected * self._ratios[drafting]


class Confident(Throughput):
    """As much speculation as each draft's own confidence is worth."""

    name: ClassVar[str] = "confident"

    def __init__(self, options: Throughput.Options) -> None:
        super().__init__(options)
        self._yields: dict[str, Yield] = {}
        self._clock = _Clock()
        self._longest = options.k_max / 2
        self._pause = _FIRST_PAUSE
        self._num_gaining = _NUM_PLAIN
        self._has_drafts = False
        self._left = -_TRIAL
        """Steps of the pause that are left, or, below zero, of the trial."""

    def allocate(self, candidates: Sequence[DraftCandidate], view: View) -> list[Grant]:
        if not all(view.drafters[c.drafter].stops_early for c in candidates):
            return super().allocate(candidates, view)
        plain, drafting = self._plain(view), self._drafting(candidates, view)
        drafts = self._has_drafts = self._drafts(plain.rate, drafting.rate)
        if view.room.num_rows == view.room.num_sampled:  # no prefill
            self._clock.expect((drafting if drafts else plain).seconds, drafting=drafts)
        if not drafts:
            return [Grant(0)] * len(candidates)
        price = min(1.0, max(plain.rate, drafting.rate) * drafting.seconds_per_position)
        return [Grant(n, price) for n in self._lengths(candidates, view)]

    def _drafts(self, plain: float, drafting: float) -> bool:
        """Whether this step has drafts: where they gain, and now and then for trial."""
        if self._left > 0:
            self._left -= 1
            if self._left:
                return False
            self._left = -_TRIAL
        if drafting > (1 + self.options.margin) * plain:
            self._pause = _FIRST_PAUSE
            self._num_gaining = (self._num_gaining + 1) % _PLAIN_EVERY
            return self._num_gaining >= _NUM_PLAIN
        if self._left < 0:
            self._left += 1
            return True
        self._left, self._pause = self._pause, min(_LONGEST_PAUSE, 2 * self._pause)
        return False

    def observe(self, outcomes: Sequence[Outcome], now: float) -> None:
        self._clock.ended(now)
        longest = 0
        for state, verdict in outcomes:
            drafter = state.drafter
            # A request's first token comes from its prefill.
            if drafter is None or state.num_output_tokens <= len(verdict.token_ids):
                continue
            if self._has_drafts:
                known = self._yields.setdefault(drafter, Yield(self.options.k_max))
                known.observe(verdict.num_proposed, verdict.num_accepted)
                longest = max(longest, verdict.num_proposed)
        if longest:
            self._longest += 0.1 * (longest - self._longest)

    def _lengths(self, candidates: Sequence[DraftCandidate], view: View) -> list[int]:
        """As long as may be: drafts end by themselves."""
        longest = [min(c.limit, self.options.k_max) for c in candidates]
        lengths = [0] * len(candidates)
        for group, budget in view.budgets(candidates, longest):
            for rank, index in enumerate(group):
                lengths[index] = min(longest[index], budget // (len(group) - rank))
                budget -= lengths[index]
        return lengths

    def _plain(self, view: View) -> _Expected:
        """Of the whole step, without drafts."""
        times, room = view.learn.times, view.room
        seconds = round_seconds(times.target(room.num_rows), host=_overhead(times))
        return _Expected(room.num_sampled, seconds, self._clock.seconds(seconds, drafting=False))

    def _drafting(self, candidates: Sequence[DraftCandidate], view: View) -> _Expected:
        """With drafts of everybody."""
        times, room = view.learn.times, view.room
        inside = beside = one_more = positions = 0.0
        tokens = float(room.num_sampled)
        for name, batch in Counter(c.drafter for c in candidates).items():
            known = self._yields.setdefault(name, Yield(self.options.k_max))
            one = times.curve_of(name)(batch)
            # One more is sampled than is proposed, where a draft ends by itself.
            seconds = min(self._longest + 1, self.options.k_max) * one
            if name in view.beside:
                beside = max(beside, seconds)
            else:
                inside += seconds
            one_more += one
            positions += batch * known.proposed
            tokens += batch * known.accepted
        rows, num = room.num_rows + round(positions), len(candidates)
        verify = times.target(rows)
        host = _overhead(times) + times.draft_overhead
        seconds = round_seconds(verify, inside=inside, beside=beside, host=host)
        each = max(0.0, times.target(rows + num) - verify + one_more) / num
        return _Expected(tokens, seconds, self._clock.seconds(seconds, drafting=True), each)


@dataclass(frozen=True, slots=True)
class _Expected:
    """Of a step. seconds: by its parts; likely: by what such steps took; seconds_per_position: what
    one more drafted and verified token of every request costs, for each."""

    tokens: float
    seconds: float
    likely: float
    seconds_per_position: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.likely


def _overhead(times: Times) -> float:
    return max(times.overhead, 1e-6)


POLICY = Confident
