"""Draft lengths that maximise tokens per second under measured step times: no fairness.

Draft tokens are bought in order of survival until the step's expected tokens per second are
greatest. Prefill in the step is left out: its time does not depend on drafts. A drafter's reading
is spread over the request's expected rounds. Where drafts might not pay, a step without them is
made now and then to measure its time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from penstock.core.learn.times import round_seconds
from penstock.core.policies.allocation.parts.drafters import fade_unused, reading_seconds
from penstock.core.policies.base import AllocationPolicy, DraftCandidate, View
from penstock.core.policies.options import MaxDraftTokens, NonNegativeFloat
from penstock.core.state import Grant

_LEAST_OVERHEAD_S = 1e-6  # keeps rates finite before anything is measured

_IDLE_ROUNDS = 8
"""Steps of the same requests until drafts are reconsidered where none paid: estimates hardly
move."""
_FEW = 0.125  # share of those requests that may change meanwhile
_MANY = 12  # requests from which on it is faster to rule out drafts for all than one by one
_FIRST_GAP, _LONGEST_GAP = 4, 64
"""Steps with doubtful drafts until one without is made: first, and after doubling each time."""
_SAME_PRICE = 0.05  # relative difference below which two prices of a second count as equal
_TRIAL_TOKENS = 4  # draft tokens of a trial

Purchase = tuple[float, int, int]


class Throughput(AllocationPolicy):
    """Buys speculation that pays by the step-time model."""

    name: ClassVar[str] = "throughput"
    weighs_time: ClassVar[bool] = True

    @dataclass(frozen=True, slots=True)
    class Options:
        k_max: MaxDraftTokens = 8  # most draft tokens for one request
        margin: NonNegativeFloat = 0.05  # least gain; the best of many estimates is too high

    options: Options

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._idle: set[tuple[str, str]] = set()
        self._num_idle = 0
        self._num_doubtful = 0
        self._gap = _FIRST_GAP
        self._price = 0.0

    def allocate(self, candidates: Sequence[DraftCandidate], view: View) -> list[Grant]:
        drafting = {(c.state.request.id, c.drafter) for c in candidates}
        if self._num_idle < _IDLE_ROUNDS and self._were_idle(drafting):
            self._num_idle += 1
            return [Grant(0)] * len(candidates)
        step = _Step(candidates, view)
        lengths = [0] * len(candidates)
        if (
            len(candidates) < _MANY
            or any(step.is_chained)
            or step.could_pay(self.options.k_max, self.options.margin)
        ):
            purchases = self._purchases(candidates, step)
            bought, rate = self._worthwhile(purchases, step)
            certain = (1 + self.options.margin) * step.most_without_drafts
            if bought and rate < certain and self._is_plain_step_due():
                return [Grant(0)] * len(candidates)
            for _, index, length in bought:
                lengths[index] = length
            # Chained drafters weigh their sources themselves, and are granted all the room.
            for _, index, length in purchases if any(step.is_chained) else ():
                if step.is_chained[index]:
                    lengths[index] = length
        fade_unused(candidates, lengths, view, self._num_idle or 1, step.trials)
        self._idle, self._num_idle = set() if any(lengths) else drafting, 1
        return [Grant(n) for n in lengths]

    def _is_plain_step_due(self) -> bool:
        """Return whether a step without drafts is due, measured where drafts are doubtful."""
        self._num_doubtful += 1
        if self._num_doubtful < self._gap:
            return False
        self._num_doubtful, self._gap = 0, min(2 * self._gap, _LONGEST_GAP)
        return True

    def _were_idle(self, drafting: set[tuple[str, str]]) -> bool:
        """Return whether nearly all requests were found not worth drafting for."""
        most = len(self._idle) * _FEW
        return len(drafting - self._idle) <= most and len(self._idle - drafting) <= most

    def _purchases(self, candidates: Sequence[DraftCandidate], step: _Step) -> list[Purchase]:
        """Return what the budget can buy, likeliest first: (-survival, candidate, draft length)."""
        longest = [min(c.limit, self.options.k_max) for c in candidates]
        purchases: list[Purchase] = []
        for group, budget in step.view.budgets(candidates, longest):
            own = []
            for index in group:
                survival = step.survival(index, longest[index])
                own += [(-g, index, length) for length, g in enumerate(survival, 1)]
            own.sort()
            purchases += own[:budget]
        purchases.sort()
        return purchases

    def _worthwhile(
        self, purchases: Sequence[Purchase], step: _Step
    ) -> tuple[Sequence[Purchase], float]:
        """Return the purchases with the most expected tokens per second of the step, and that rate.

        A draft that is longer than all others of its drafter takes a step of it alone, so the
        likeliest tokens are not always best. Drafters are held to the steps that are worth their
        time, at the price of a second in the round before, then at the one found."""
        rate = (1 + self.options.margin) * step.rate
        if step.num_candidates == 1:
            return self._likeliest(purchases, step, rate)
        bought: Sequence[Purchase] = ()
        price = max(self._price, rate)
        while True:
            most = step.worthwhile_lengths(purchases, price)
            some = [p for p in purchases if p[2] <= most[p[1]]]
            better, better_rate = self._likeliest(some, step, rate)
            if better:
                bought, rate = better, better_rate
            elif bought or price <= rate:
                break
            if abs(rate - price) <= _SAME_PRICE * rate:
                break
            price = rate
        self._price = rate
        return bought, rate

    @staticmethod
    def _likeliest(
        purchases: Sequence[Purchase], step: _Step, rate: float
    ) -> tuple[Sequence[Purchase], float]:
        """Return the first purchases with the most tokens per second above `rate`, and that."""
        step.begin()
        # Upper bound of the tokens: as costs only rise, it tells when to stop.
        most = step.tokens - sum(p[0] for p in purchases)
        best = 0
        for num_bought, (negative_survival, index, length) in enumerate(purchases, 1):
            if most < rate * step.seconds:
                break
            step.buy(index, length, -negative_survival)
            if step.rate > rate:
                best, rate = num_bought, step.rate
        return purchases[:best], rate


class _Step:
    """The step as drafts are bought for it: expected tokens, and seconds without its prefill."""

    def __init__(self, candidates: Sequence[DraftCandidate], view: View) -> None:
        learn, room = view.learn, view.room
        times, acceptance = learn.times, learn.acceptance
        self.view = view
        self.is_chained = [_is_chained(c, view) for c in candidates]
        self._candidates = candidates
        self._verify = times.target
        self._prefill = times.target(room.num_rows) - times.target(room.num_sampled)
        self._rates = [acceptance.mean(c.state.request.id, c.drafter) for c in candidates]
        self._found = [acceptance.found(c.state.request.id, c.drafter) for c in candidates]
        # Reading beside the target delays no other request.
        self._unread = [
            0.0 if chained or c.drafter in view.beside else reading_seconds(c, view)
            for c, chained in zip(candidates, self.is_chained, strict=True)
        ]
        host = max(times.overhead, _LEAST_OVERHEAD_S)
        self._host = host + times.draft_overhead
        self._plain = round_seconds(times.target(room.num_sampled), host=host)
        self._draft = _DraftSeconds(candidates, view)
        self.begin()

    def begin(self) -> None:
        room = self.view.room
        self.tokens, self.seconds = float(room.num_sampled), self._plain
        self._positions, self._reading = float(room.num_rows), 0.0
        self._draft.begin()

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def num_candidates(self) -> int:
        return len(self._candidates)

    def worthwhile_lengths(self, purchases: Sequence[Purchase], price: float) -> list[int]:
        """Return by candidate the drafter steps that pay at `price`, if target rows were free."""
        longest = max([p[2] for p in purchases], default=0)
        gained = [[0.0] * longest for _ in self._draft.together]
        own = [gained[self._draft.place_of(c.drafter)] for c in self._candidates]
        for negative_survival, index, length in purchases:
            own[index][length - 1] -= negative_survival * self._found[index]
        most = []
        for drafters, by_length in zip(self._draft.together, gained, strict=True):
            one = price * min(map(self._draft.step_seconds, drafters))
            totals = [0.0, *itertools.accumulate([gain - one for gain in by_length])]
            most.append(totals.index(max(totals)))
        return [most[self._draft.place_of(c.drafter)] for c in self._candidates]

    def could_pay(self, k_max: int, margin: float) -> bool:
        """Return whether drafts could pay if all were the likeliest, by the fastest drafter."""
        most = min(self.view.room.budget, k_max * len(self._candidates))
        acceptance, best = self.view.learn.acceptance, 0.0
        for candidate, rate in zip(self._candidates, self._rates, strict=True):
            best = max(best, acceptance.shape_of(candidate.drafter).survival(rate, 1)[0])
        bought = np.arange(most + 1)
        verify = self._verify.at(self.view.room.num_rows + bought) - self._prefill
        seconds = round_seconds(verify, inside=self._draft.least, host=self._host)
        rates = (self.tokens + best * bought) / seconds
        return bool(rates.max() > (1 + margin) * self.tokens / self.seconds)

    def buy(self, index: int, length: int, survival: float) -> None:
        """Extend a candidate's draft to `length` tokens."""
        if length == 1 and self._unread[index]:
            self._reading += self._reading_a_round(index)
        # A drafter takes its time even if it finds no draft.
        self.tokens += survival * self._found[index]
        self._positions += self._found[index]
        drafting = self._draft.lengthen(self._candidates[index].drafter, length)
        verify = self._verify(round(self._positions)) - self._prefill
        self.seconds = self._reading + round_seconds(verify, inside=drafting, host=self._host)

    def survival(self, index: int, longest: int) -> list[float]:
        """Return the survival of a candidate's draft tokens; none if reading costs more."""
        shape = self.view.learn.acceptance.shape_of(self._candidates[index].drafter)
        survival = shape.survival(self._rates[index], longest)
        if not self._unread[index]:
            return survival
        saved = self._found[index] * sum(survival) * self._plain / self.tokens
        return survival if saved >= self._reading_a_round(index) else []

    @property
    def most_without_drafts(self) -> float:
        """Tokens per second of a step without drafts, at best; infinite if all draft beside it."""
        if all(c.drafter in self.view.beside for c in self._candidates):
            return 0.0
        num_sampled = self.view.room.num_sampled
        return num_sampled / max(self._verify.least(num_sampled), _LEAST_OVERHEAD_S)

    @property
    def trials(self) -> list[float]:
        """Steps without drafts that a trial of each candidate's drafts would take."""
        drafting = _TRIAL_TOKENS * self._draft.least
        return [(unread + drafting) / self._plain for unread in self._unread]

    def _reading_a_round(self, index: int) -> float:
        """Return the seconds of reading per expected round of the request."""
        state = self._candidates[index].state
        lengths = self.view.learn.lengths
        left = lengths.remaining(state.num_output_tokens, state.num_remaining_tokens)
        return self._unread[index] / max(1.0, left * (1 - self._rates[index]))


def _is_chained(candidate: DraftCandidate, view: View) -> bool:
    drafter = view.drafters.get(candidate.drafter)
    return drafter is not None and drafter.is_chained


class _DraftSeconds:
    """Seconds of drafting as drafts grow, inside the step and beside it."""

    def __init__(self, candidates: Sequence[DraftCandidate], view: View) -> None:
        curve_of = view.learn.times.curve_of
        drafters = dict.fromkeys(c.drafter for c in candidates)
        self._beside = view.beside
        beside = tuple(d for d in drafters if d in view.beside)
        self.together = [*((d,) for d in drafters if d not in view.beside), *filter(None, [beside])]
        """Groups of drafters that draft at the same time."""
        self._place = {d: i for i, ds in enumerate(self.together) for d in ds}
        self._curves = {d: curve_of(d) for d in drafters}
        self.least = min(curve(1) for curve in self._curves.values()) if drafters else 0.0
        """Seconds of a draft of one token with the fastest drafter."""

    def begin(self) -> None:
        self._inside = self._longest = 0.0
        self._seconds = dict.fromkeys(self._curves, 0.0)
        self._batch = dict.fromkeys(self._curves, 0)
        self._steps = dict.fromkeys(self._curves, 0)

    def place_of(self, drafter: str) -> int:
        """Return the drafter's index in `together`."""
        return self._place[drafter]

    def step_seconds(self, drafter: str) -> float:
        """Return seconds of one step of the drafter, for the requests that it has."""
        return self._curves[drafter](max(1, self._batch[drafter]))

    def lengthen(self, drafter: str, length: int) -> float:
        """Return seconds of all drafting, once a draft of this drafter has `length` tokens."""
        if not 1 < length <= self._steps[drafter]:
            self._batch[drafter] += length == 1
            steps = self._steps[drafter] = max(self._steps[drafter], length)
            seconds = steps * self._curves[drafter](self._batch[drafter])
            if drafter in self._beside:
                self._longest = max(self._longest, seconds)
            else:
                self._inside += seconds - self._seconds[drafter]
            self._seconds[drafter] = seconds
        return self._inside + self._longest


POLICY = Throughput
