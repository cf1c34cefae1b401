"""Allocation whose drafts end where their own tokens stop paying: `throughput` with prices.

Every drafting request gets the same price of a position: the tokens that the step's time would
otherwise yield. A draft ends with the token whose predicted survival is below it. Which requests
draft is decided before, by the yields of their earlier drafts. Requests that are left out are tried
again for a set share of the time."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, NamedTuple

from penstock.core.learn.times import round_seconds
from penstock.core.policies.allocation.parts.drafters import reading_seconds
from penstock.core.policies.allocation.parts.yields import DraftYield, DraftYields
from penstock.core.policies.allocation.throughput import Throughput
from penstock.core.policies.base import DraftCandidate, View
from penstock.core.state import Grant, Outcome

_IDLE_ROUNDS = 8  # as in `throughput`
_TRIALS = 0.005  # share of the time for drafts that are not expected to gain
_LEAST_OVERHEAD_S = 1e-6  # as in `throughput`
_RECORD_KEEP = 0.998
"""Memory of expectations and their outcomes a step: noise averages to a tenth over fifty steps."""
_PRIOR_TOKENS, _PRIOR_S = 50.0, 0.1  # expectations taken as met at first; chosen by hand
_LONGEST_STEP = 2.0  # most that a step may count, over its expected seconds


class _Offer(NamedTuple):
    """A request that could draft."""

    candidate: int  # its index
    request_id: str
    drafter: str
    expected: DraftYield
    reading: float  # seconds until its drafter has read the text
    rounds: float  # remaining rounds


class _Ordered(NamedTuple):
    epoch: int
    round: int
    drafter: str
    price: float


@dataclass(slots=True)
class _Round:
    """A step, built up by adding drafting requests."""

    view: View
    longest: Callable[[str, int], float]
    members: list[_Offer] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    proposed: float = 0.0
    tokens: float = 0.0
    reading: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = float(self.view.room.num_sampled)

    def join(self, offer: _Offer) -> None:
        self.members.append(offer)
        self.counts[offer.drafter] += 1
        self.proposed += offer.expected.proposed
        self.tokens += offer.expected.accepted
        # The drafter reads once for all remaining rounds.
        self.reading += offer.reading / offer.rounds

    @property
    def seconds(self) -> float:
        """Seconds without prefill, with which drafts would always seem to pay."""
        times = self.view.learn.times
        inside = beside = 0.0
        for name, num in self.counts.items():
            seconds = self.longest(name, num) * times.curve_of(name)(num)
            if name in self.view.beside:
                beside = max(beside, seconds)
            else:
                inside += seconds
        host = max(times.overhead, _LEAST_OVERHEAD_S)
        if self.counts:
            host += times.draft_overhead
        room = self.view.room
        prefill = times.target(room.num_rows) - times.target(room.num_sampled)
        verify = times.target(room.num_rows + round(self.proposed)) - prefill
        return self.reading + round_seconds(verify, inside=inside, beside=beside, host=host)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class _Record:
    """Outcomes of expected steps: the best of many estimates is mostly too high."""

    def __init__(self) -> None:
        self._now: float | None = None
        self._expected: tuple[bool, float, float] | None = None
        # By whether there are drafts: expected and real tokens, expected and real seconds.
        self._sums = {drafts: [_PRIOR_TOKENS] * 2 + [_PRIOR_S] * 2 for drafts in (False, True)}

    def expect(self, step: _Round) -> None:
        """Note the coming step; one with prefill says nothing about drafts."""
        room = step.view.room
        if room.num_rows == room.num_sampled:
            self._expected = bool(step.members), step.tokens, step.seconds

    def ended(self, num_tokens: int, now: float) -> None:
        expected, before = self._expected, self._now
        self._now, self._expected = now, None
        if before is None or expected is None or now <= before:
            return
        drafts, tokens, seconds = expected
        # A longer step has waited for something else.
        taken = min(now - before, _LONGEST_STEP * seconds)
        sums = self._sums[drafts]
        for i, value in enumerate((tokens, num_tokens, seconds, taken)):
            sums[i] = sums[i] * _RECORD_KEEP + value

    @property
    def realised(self) -> float:
        """Share of the expected gain in tokens a second that drafts bring."""
        expected, real, seconds, taken = self._sums[True]
        _, _, plain_seconds, plain_taken = self._sums[False]
        return real / expected * seconds / taken * plain_taken / plain_seconds


class Confident(Throughput):
    """Speculates as far as each draft's own confidence pays."""

    name: ClassVar[str] = "confident"
    weighs_time: ClassVar[bool] = True

    def __init__(self, options: Throughput.Options) -> None:
        super().__init__(options)
        self._yields: defaultdict[str, DraftYields] = defaultdict(
            partial(DraftYields, options.k_max)
        )
        self._ordered: dict[str, _Ordered] = {}
        self._min_survival, self._gain = 0.5, 1.0
        """Last step's price of a position in tokens (the least survival that pays; the base class's
        `_price` is in tokens a second), and its expected tokens a second over those without
        drafts."""
        self._record = _Record()
        self._for_trials = 0.0  # seconds
        self._num_idle = 1

    def allocate(self, candidates: Sequence[DraftCandidate], view: View) -> list[Grant]:
        if not all(view.drafters[c.drafter].stops_early for c in candidates):
            return super().allocate(candidates, view)
        grants = [Grant(0)] * len(candidates)
        who = {(c.state.request.id, c.drafter) for c in candidates}
        if who == self._idle and self._num_idle < _IDLE_ROUNDS:
            self._num_idle += 1
            self._record.expect(self._round((), view))
            return grants
        price = self._min_survival = self._next_price(candidates, view)
        members = self._members(candidates, view)
        self._record.expect(self._round(members, view))
        self._idle, self._num_idle = set() if members else who, 1
        lengths = self._lengths(candidates, members, view) if members else {}
        for index, length in lengths.items():
            state, drafter = candidates[index].state, candidates[index].drafter
            grants[index] = Grant(length, price)
            self._ordered[state.request.id] = _Ordered(state.epoch, state.round, drafter, price)
        return grants

    def on_step(self, outcomes: Sequence[Outcome], now: float) -> None:
        self._record.ended(sum([len(verdict.token_ids) for _, verdict in outcomes]), now)
        for state, verdict in outcomes:
            request_id = state.request.id
            given = self._ordered.pop(request_id, None)
            if given is not None and given[:2] == (verdict.epoch, verdict.round):
                yields = self._yields[given.drafter]
                proposed, accepted = verdict.num_proposed, verdict.num_accepted
                yields.add_verified(request_id, given.price, proposed, accepted)

    def release_request(self, request_id: str) -> None:
        self._ordered.pop(request_id, None)
        for yields in self._yields.values():
            yields.release_request(request_id)

    def _next_price(self, candidates: Sequence[DraftCandidate], view: View) -> float:
        """Return the cost in tokens of one more drafted and verified position of every request."""
        times, room, num = view.learn.times, view.room, len(candidates)
        counts = Counter(c.drafter for c in candidates)
        proposed = sum(
            n * self._yields[d].mean(self._min_survival).proposed for d, n in counts.items()
        )
        rows = room.num_rows + round(proposed)
        verify = times.target(rows + num) - times.target(rows)
        drafting = sum(times.curve_of(name)(n) for name, n in counts.items())
        rate = self._gain * self._round((), view).rate
        return max(0.0, verify + drafting) / num * rate

    def _members(self, candidates: Sequence[DraftCandidate], view: View) -> list[_Offer]:
        """Return the requests with which the step gains most, and perhaps one for trial."""
        if self._min_survival >= 1:
            self._gain = 1.0
            return []
        means = {name: self._yields[name].mean(self._min_survival) for name in view.drafters}
        offers = [
            self._offer(i, c, means[c.drafter], view) for i, c in enumerate(candidates) if c.limit
        ]
        if not offers:
            return []
        plain, step = self._round((), view), self._best(offers, view)
        self._for_trials += _TRIALS * plain.seconds * self._num_idle
        if step.members:
            # Corrected by the outcomes of earlier steps.
            rate = self._record.realised * step.rate
            lost = step.seconds * max(0.0, 1 - rate / plain.rate / (1 + self.options.margin))
            if lost > self._for_trials:
                step = plain
            else:
                self._for_trials -= lost
                self._gain = max(1.0, rate / plain.rate)
        if not step.members:
            self._gain = 1.0
        drafting = {offer.candidate for offer in step.members}
        left_out = [offer for offer in offers if offer.candidate not in drafting]
        tried = self._trial(left_out, step, candidates) if left_out else None
        return step.members if tried is None else [*step.members, tried]

    def _offer(self, index: int, candidate: DraftCandidate, mean: DraftYield, view: View) -> _Offer:
        state, drafter = candidate.state, candidate.drafter
        expected = self._yields[drafter].yield_of(state.request.id, mean)
        reading = reading_seconds(candidate, view)
        rounds = max(1.0, state.num_remaining_tokens / (1 + expected.accepted))
        return _Offer(index, state.request.id, drafter, expected, reading, rounds)

    def _round(self, members: Iterable[_Offer], view: View) -> _Round:
        step = _Round(view, self._num_steps)
        for offer in members:
            step.join(offer)
        return step

    def _num_steps(self, drafter: str, num_drafts: int) -> float:
        """Return the steps of the longest draft: one that ends by itself samples one more."""
        longest = self._yields[drafter].longest(self._min_survival, num_drafts)
        return min(longest + 1, self.options.k_max)

    def _best(self, offers: Sequence[_Offer], view: View) -> _Round:
        """Return the step with the most expected tokens per second, best gains first."""
        step = self._round((), view)
        best, best_rate = 0, step.rate
        verify, rows, num = view.learn.times.target, view.room.num_rows, len(offers)
        row = max(0.0, verify(rows + num) - verify(rows)) / num
        plain_rate = best_rate

        def gain(offer: _Offer) -> float:
            cost = row * offer.expected.proposed + offer.reading / offer.rounds
            return offer.expected.accepted - plain_rate * cost

        ordered = sorted([o for o in offers if gain(o) > 0], key=gain, reverse=True)
        for size, offer in enumerate(ordered, 1):
            step.join(offer)
            rate = step.rate
            if rate > best_rate:
                best, best_rate = size, rate
        return step if best == len(ordered) else self._round(ordered[:best], view)

    def _trial(
        self, left_out: Sequence[_Offer], step: _Round, candidates: Sequence[DraftCandidate]
    ) -> _Offer | None:
        """Return the left-out request whose draft tells most for its cost, if affordable."""
        before = step.seconds
        drafting: dict[str, float] = {}
        for offer in left_out:
            if offer.drafter not in drafting:
                longer = self._round([*step.members, offer._replace(reading=0.0)], step.view)
                drafting[offer.drafter] = max(_LEAST_OVERHEAD_S, longer.seconds - before)

        def cost(offer: _Offer) -> float:
            return drafting[offer.drafter] + offer.reading

        def worth(offer: _Offer) -> float:
            left = candidates[offer.candidate].state.num_remaining_tokens
            return left * self._yields[offer.drafter].information(offer.request_id) / cost(offer)

        best = max(left_out, key=worth)
        if cost(best) > self._for_trials:
            return None
        self._for_trials -= cost(best)
        return best

    def _lengths(
        self, candidates: Sequence[DraftCandidate], members: Iterable[_Offer], view: View
    ) -> dict[int, int]:
        """Return the length by candidate: the longest possible, since drafts end by themselves."""
        longest = [0] * len(candidates)
        for offer in members:
            longest[offer.candidate] = min(candidates[offer.candidate].limit, self.options.k_max)
        lengths = {}
        for group, budget in view.budgets(candidates, longest):
            drafting = [index for index in group if longest[index]]
            for rank, index in enumerate(drafting):
                length = min(longest[index], budget // (len(drafting) - rank))
                if length:
                    lengths[index] = length
                    budget -= length
        return lengths


POLICY = Confident
