"""Automatic selection: the drafter that is expected to save a request the most seconds to its end.

The acceptance to expect comes from ended requests with alike prompts (`learn.prior`), and from the
request's own drafts. A request that accepts less than expected from one drafter is expected to
accept less from all.

In a replay a drafter that is not used reads the text and says what it would have drafted. It is
ordered where its answer should save the request more than the reading takes.

A request's drafter is chosen at its start, after rounds that double, and when a replay has an
answer; none, where that is best to the request's end. Where the host's part of a step is so large
that choosing takes more time than it saves all get the first drafter: the draft lengths decide
whether it drafts (`allocation/priced.py`)."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt

from penstock.core.learn.acceptance import MOST_POSITIONS
from penstock.core.learn.prior import AcceptancePrior, shifts
from penstock.core.policies.base import Gauges, ReplayProposal, SelectionPolicy, View, usable
from penstock.core.policies.options import LONGEST_DRAFT, Range
from penstock.core.policies.selection.parts.places import assign
from penstock.core.policies.selection.parts.savings import Savings
from penstock.core.policies.selection.single import Single
from penstock.core.state import Drafter, Outcome, RequestState
from penstock.core.types import Replayed, Request

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_OWN_DECAY = 0.98  # memory of a request's drafts a round; chosen by hand, like the next ones
_HIGHEST = 0.98  # acceptance that is expected at most
_FIRST_GAP, _LONGEST_GAP = 2, 16
"""Rounds between a request's decisions, first and, after doubling, longest."""
_REVIEW_EVERY = 4
"""Most steps between reviews: those of several requests at once take hardly longer than one."""
_HOST_SHARE = 0.1  # of a step, from which on nothing is chosen
_REVIEW_SHARE = 0.5  # seconds of a review, in the host's part of a step
_NUM_RECENT = 32  # requests for which drafters are compared together; chosen by hand
_STEP_WEIGHT = 0.02  # weight of a step in the mean number of requests
_TAIL, _TAIL_WEIGHT = 3**0.5, 1 / 6
"""Outer node of the three-point Gauss-Hermite rule for a normal variable, and its weight."""


@dataclass(slots=True)
class _Known:
    """Expected acceptance and own drafts of one running request."""

    words: IntArray
    prior: FloatArray  # [J] acceptance to expect
    counts: list[list[float]]  # [2, J] accepted and decided tokens, faded by rounds
    totals: list[list[float]]  # not faded
    next_round: int  # of the next decision
    gap: int = _FIRST_GAP
    looked_up: float = 0.0  # tokens by look-up, faded
    tokens: float = 0.0  # all of them, faded
    has_news: bool = False  # a replay has answered since

    def note(self, column: int, accepted: float, decided: float) -> None:
        """Count draft tokens, drafted or replayed."""
        for counts in (self.counts, self.totals):
            counts[0][column] += accepted
            counts[1][column] += decided

    def fade(self) -> None:
        self.counts = [[_OWN_DECAY * num for num in row] for row in self.counts]


class Auto(SelectionPolicy):
    """Chooses by expected savings, over requests and drafters together."""

    name: ClassVar[str] = "auto"
    weighs_time: ClassVar[bool] = True

    @dataclass(frozen=True, slots=True)
    class Options:
        # Longest draft in the worth of a drafter.
        k_max: Annotated[int, Range(at_least=1, at_most=LONGEST_DRAFT)] = 8

    options: Options

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._first = Single(Single.Options())
        self._prior = AcceptancePrior()
        self._models: dict[str, int] = {}
        self._columns: dict[str, int] = {}
        self._known: dict[str, _Known] = {}
        self._used: set[str] = set()
        self._recent: dict[str, FloatArray] = {}
        self._looked_up, self._tokens = 0.0, 0.0  # as of a request, over all
        self._num_sharing, self._num_steps = 1.0, 0
        self._proposals: dict[tuple[str, str], ReplayProposal] = {}
        self._saved: dict[str, float] = {}

    @property
    def gauges(self) -> Gauges:
        """saved_seconds: by the drafter, to the request's end, by its id."""
        return {"saved_seconds": self._saved}

    # --- choosing -------------------------------------------------------------------------------

    def select(self, states: Sequence[RequestState], view: View) -> dict[str, str | None]:
        drafters, times = usable(view.drafters), view.learn.times
        step = times.target(round(self._num_sharing))
        if times.overhead > _HOST_SHARE * step:
            return self._first.select(states, view)
        chosen: dict[str, str | None] = {}
        due = []
        is_turn = self._num_steps % min(_REVIEW_EVERY, round(self._num_sharing)) == 0
        for state in states:
            known = self._known.get(state.request.id)
            has_left = state.drafter is not None and state.drafter not in drafters
            is_due = known is None or known.has_news or state.round >= known.next_round
            if known is None or has_left or (is_turn and is_due):
                due.append(state)
            else:
                chosen[state.request.id] = state.drafter
        if due and drafters:
            chosen |= self._choose(due, drafters, view)
        return chosen if drafters else {state.request.id: None for state in states}

    def _choose(
        self, states: Sequence[RequestState], drafters: Mapping[str, Drafter], view: View
    ) -> dict[str, str | None]:
        columns = [self._column(d) for d in drafters.values()]
        known = [self._know(state, drafters, view) for state in states]
        expected = self._rates(known)
        sharing = max(round(self._num_sharing), len(states))
        longest = min(self.options.k_max, MOST_POSITIONS)
        savings = Savings(states, drafters, view, sharing, longest, self._looked_up_shares(known))
        names = list(drafters)
        kept = [j for j, name in enumerate(names) if name in self._used]
        used = savings.share(self._recent_rates(states, expected)[:, columns], kept)
        self._used = {names[j] for j in used}
        values = savings.at(expected[:, columns])
        self._propose(states, known, drafters, view, savings, expected[:, columns], values)
        room = [
            None if d.max_num_seqs is None else d.max_num_seqs - _others(d, states, view.loads)
            for d in drafters.values()
        ]
        chosen: dict[str, str | None] = {}
        for i, index in enumerate(assign(values, room)):
            request_id = states[i].request.id
            chosen[request_id] = None if index is None else names[index]
            self._saved[request_id] = 0.0 if index is None else float(values[i, index])
            if index is not None:
                mean = float(known[i].prior[columns[index]])
                view.learn.acceptance.expect(request_id, names[index], mean, self._prior.strength)
        return chosen

    def _know(self, state: RequestState, drafters: Mapping[str, Drafter], view: View) -> _Known:
        """Return what is known of a request, with its next decision and all drafters."""
        known = self._known.get(state.request.id)
        num = len(self._models)
        if known is None:
            counts: list[list[float]] = [[], []]
            known = _Known(_words_of(state.request), np.empty(0), counts, [[], []], 0)
            self._known[state.request.id] = known
        known.next_round = state.round + known.gap
        known.gap = min(2 * known.gap, _LONGEST_GAP)
        if len(known.prior) < num:
            for row in (*known.counts, *known.totals):
                row += [0.0] * (num - len(row))
            self._prior.grow(num)
            by_column = {column: name for name, column in self._columns.items()}
            first = [view.learn.acceptance.mean("", by_column[j]) for j in range(num)]
            known.prior = self._prior.expect(known.words, np.array(first))
        known.has_news = False
        return known

    def _rates(self, known: Sequence[_Known]) -> FloatArray:
        """Return expected acceptance [S, J]."""
        accepted, decided = np.array([k.counts for k in known]).swapaxes(0, 1)
        strength = self._prior.strength
        prior = _clipped(np.array([k.prior for k in known]))
        odds = prior / (1 - prior) * shifts(prior, accepted, decided, strength)
        rates = (accepted + strength * odds / (1 + odds)) / (decided + strength)
        return _clipped(np.asarray(rates))

    def _looked_up_shares(self, known: Sequence[_Known]) -> FloatArray:
        """Return the share of tokens that look-up makes, [1 + S], at first over all requests."""
        mean, strength = self._looked_up / max(1.0, self._tokens), self._prior.strength
        own = np.array([(k.looked_up, k.tokens) for k in known])
        shares = (own[:, 0] + strength * mean) / (own[:, 1] + strength)
        return np.concatenate([[mean], shares])

    def _recent_rates(self, states: Sequence[RequestState], rates: FloatArray) -> FloatArray:
        """Note the rates [S, J] of these requests, and return those of recent ones, [P, J]."""
        recent, num = self._recent, rates.shape[1]
        for state, row in zip(states, rates, strict=True):
            recent.pop(state.request.id, None)
            recent[state.request.id] = row
        for request_id in list(recent)[:-_NUM_RECENT]:
            del recent[request_id]
        return np.array([row for row in recent.values() if len(row) == num])

    def _column(self, drafter: Drafter) -> int:
        """Return the model's column: drafters with one model share what is known of it."""
        column = self._columns.get(drafter.name)
        if column is None:
            model = drafter.model or drafter.name
            column = self._columns[drafter.name] = self._models.setdefault(model, len(self._models))
        return column

    # --- replays --------------------------------------------------------------------------------

    @property
    def proposes_replays(self) -> bool:
        return bool(self._proposals)

    def replays(self, states: Sequence[RequestState], view: View) -> list[ReplayProposal]:
        return list(self._proposals.values())

    def _propose(
        self,
        states: Sequence[RequestState],
        known: Sequence[_Known],
        drafters: Mapping[str, Drafter],
        view: View,
        savings: Savings,
        rates: FloatArray,
        values: FloatArray,
    ) -> None:
        """Propose replays whose answer should save more than their reading takes."""
        columns = [self._columns[n] for n in drafters]
        decided = np.array([k.counts[1] for k in known])[:, columns]
        outputs = np.array([[s.num_output_tokens] for s in states])
        read = np.minimum(savings.unread, outputs)
        # Deviation of the mean that the tokens of a replay will give.
        told = read / (self._prior.strength + decided + read) / (self._prior.strength + decided + 1)
        hopeful = rates + _TAIL * np.sqrt(rates * (1 - rates) * told)
        better = savings.at(np.minimum(hopeful, _HIGHEST), is_read=True)
        best = np.maximum(0.0, values.max(axis=1, keepdims=True))
        gains = _TAIL_WEIGHT * np.maximum(0.0, better - best)
        review = _REVIEW_SHARE * view.learn.times.overhead * self._num_sharing
        named = list(drafters.items())
        for i, j in zip(*np.nonzero(gains), strict=True):
            state = states[i]
            name, drafter = named[j]
            if not state.num_output_tokens or name == state.drafter:
                continue
            is_worth_it = gains[i, j] > float(savings.reading[i, j]) + review
            if is_worth_it and _can_replay(drafter, state):
                key = state.request.id, name
                self._proposals[key] = ReplayProposal(state, name, evaluate=True)

    def replayed(self, state: RequestState, replayed: Replayed) -> None:
        self._proposals.pop((state.request.id, replayed.drafter), None)
        column = self._columns.get(replayed.drafter)
        known = self._known.get(state.request.id)
        if column is not None and known is not None and replayed.num_tokens:
            known.note(column, replayed.num_matched, replayed.num_tokens)
            known.has_news = True

    # --- learning -------------------------------------------------------------------------------

    def on_step(self, outcomes: Sequence[Outcome], view: View) -> None:
        if outcomes:
            self._num_steps += 1
            self._num_sharing += _STEP_WEIGHT * (len(outcomes) - self._num_sharing)
        for state, verdict in outcomes:
            column = self._columns.get(verdict.drafter or "")
            known = self._known.get(state.request.id)
            if known is not None:
                num = len(verdict.token_ids)
                made = min(verdict.num_accepted, verdict.num_looked_up)
                if made and verdict.num_looked_up == verdict.num_proposed:
                    made = num
                known.looked_up = _OWN_DECAY * known.looked_up + made
                known.tokens = _OWN_DECAY * known.tokens + num
                self._looked_up = (1 - _STEP_WEIGHT) * self._looked_up + made
                self._tokens = (1 - _STEP_WEIGHT) * self._tokens + num
            if column is not None and known is not None and verdict.num_decided:
                known.fade()
                known.note(column, verdict.evidence, verdict.num_decided)

    def release_request(self, request_id: str) -> None:
        known = self._known.pop(request_id, None)
        self._saved.pop(request_id, None)
        for key in [k for k in self._proposals if k[0] == request_id]:
            del self._proposals[key]
        if known is not None and any(known.totals[1]):
            self._prior.learn(known.words, known.prior, *np.array(known.totals))


def _clipped(rates: FloatArray) -> FloatArray:
    """Return rates within those that are expected of a drafter."""
    return np.minimum(np.maximum(rates, 1 - _HIGHEST), _HIGHEST)


def _words_of(request: Request) -> IntArray:
    """Return hashable words of prompt and tenant as integers, possibly repeated."""
    tenant = zlib.crc32(request.tenant.encode()) + (1 << 40)
    return np.append(np.asarray(request.prompt_token_ids or (), dtype=np.int64), tenant)


def _can_replay(drafter: Drafter, state: RequestState) -> bool:
    return drafter.can_replay and not state.request.sampling.is_ratio


def _others(drafter: Drafter, states: Sequence[RequestState], loads: Mapping[str, int]) -> int:
    """Return the number of requests outside `states` that keep the drafter."""
    return loads.get(drafter.name, 0) - sum(s.drafter == drafter.name for s in states)


POLICY = Auto
