"""The drafter with the most expected tokens per second, from everything known of a request.

For every drafter a request has a posterior of its acceptance, whether or not it has ever used it
(`learn.prior`): from its prompt's words, from its tenant, from what its own drafts have shown, and
from what is known to go together. Drafters are compared by the seconds that they save the request
to its end: those of a step with their drafts, over the tokens that it yields, against those of a
step without, for all the tokens that are to come, less the reading of the text so far. A step's
seconds are those for which all requests in it wait; no drafter at all saves 0.

Decisions are few: at the start, after rounds that double, and when a replay has said something.
Drafters are evaluated by replay: they read a request's text and say what they would have drafted.
A replay is ordered where what it may say is expected to save the request more than the reading
takes (the value of information), and within a share of the time where little is known of a drafter
for requests like this one, for the sake of those to come. Where a replay can tell nothing (draft
servers, `ratio`), what is not known is explored by drawing from it (Thompson).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.learn import Estimators
from penstock.core.learn.prior import AcceptancePrior, Belief, mean_rate
from penstock.core.learn.times import Times, round_seconds
from penstock.core.policies.options import (
    LONGEST_DRAFT,
    NonNegativeFloat,
    PositiveInt,
    Range,
    Seed,
    Share,
)
from penstock.core.policies.selection import ReplayProposal, SelectionPolicy, usable
from penstock.core.policies.selection.parts.matching import assign
from penstock.core.policies.selection.parts.pace import Pace
from penstock.core.policies.selection.parts.words import words_of
from penstock.core.state import Drafter, Outcome, RequestState
from penstock.core.types import Replayed
from penstock.core.view import View

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
_NOTHING = Belief(np.empty(0), np.empty((0, 0)))

_DECAY = 0.98
_DEMAND_WEIGHT = 0.05
_MIN_REPLAYED_TOKENS = 24
"""Output tokens from which on a replay says enough."""
_EARLY_REQUESTS = 64.0
"""Requests after which the time for replays is not a fixed share any more."""
_MIN_PRIOR_STD = 0.6
"""Standard deviation of a prior's mean that is worth a replay, for requests to come."""
_LEAST_STRENGTH = 2.0
_MOST_STRENGTH = 100.0
"""Tokens that what selection knows may be worth to allocation."""
_BEST_RATE = 0.9
"""Acceptance of a draft token that hardly any drafter exceeds."""
_NODES = np.array([-math.sqrt(3), 0.0, math.sqrt(3)])
_WEIGHTS = (1 / 6, 2 / 3, 1 / 6)
"""Gauss and Hermite's rule, of three points, for a normal variable."""
_LONGEST_GAP = 8
"""Rounds between decisions: what a text is like changes, and evidence of a replay fades."""
_IDLE_GAP = 16
"""Rounds until it is looked again whether any drafter pays."""


@dataclass(slots=True)
class _Known:
    """One running request.

    prior: before anything was seen of it; doubt: [J] the standard deviation of its mean as far as
    it could be learned. counts: [2, J] accepted and rejected tokens, faded by rounds; totals: not
    faded. next_round: when to decide again, `gap` rounds after the last time. evaluated: drafters
    that inside a step have been asked for a replay. has_news: a replay has said something since the
    last decision. posterior: of that decision.
    """

    words: IntArray
    prior: Belief
    doubt: FloatArray
    counts: FloatArray
    totals: FloatArray
    gap: int
    next_round: int
    evaluated: set[str] = field(default_factory=set)
    has_news: bool = False
    posterior: Belief | None = None

    def note(self, column: int, accepted: float, rejected: float) -> None:
        """Draft tokens, really made or imagined, that were decided on."""
        self.counts *= _DECAY
        self.counts[:, column] += accepted, rejected
        self.totals[:, column] += accepted, rejected

    def grow(self, num_models: int) -> None:
        missing = num_models - self.counts.shape[1]
        self.counts = np.pad(self.counts, ((0, 0), (0, missing)))
        self.totals = np.pad(self.totals, ((0, 0), (0, missing)))


class _Rounds(NamedTuple):
    """A request's rounds to come. base: seconds of one without a draft; steps: with 1, 2, … draft
    tokens, without drafting; num_tokens: expected to the end."""

    base: float
    steps: Sequence[float]
    num_tokens: float


class Adaptive(SelectionPolicy):
    """Bayesian choice over requests and drafters together."""

    name: ClassVar[str] = "adaptive"

    @dataclass(frozen=True, slots=True)
    class Options:
        """k_max: most draft tokens that a drafter's worth counts on.
        first_gap: rounds after which a request's first choice is looked at again; the gap doubles,
            up to 8.
        margin: a change must save this share of the time over staying.
        explore: share of the time that replays may take at first; it falls with the number of
            requests. 0 never explores.
        seed: of what is drawn."""

        k_max: Annotated[int, Range(at_least=1, at_most=LONGEST_DRAFT)] = 8
        first_gap: PositiveInt = 2
        margin: NonNegativeFloat = 0.04
        explore: Share = 0.1
        seed: Seed = 0

    def __init__(self, options: Options) -> None:
        self.options = options
        self._rng = np.random.default_rng(options.seed)
        self._prior = AcceptancePrior()
        self._columns: dict[str, int] = {}
        self._models: dict[str, int] = {}
        self._known: dict[str, _Known] = {}
        self._pace = Pace()
        self._demand: dict[str, float] = {}
        self._proposals: dict[tuple[str, str], ReplayProposal] = {}
        self._replayed_s = 0.0
        self._num_ended = 0

    # --- choosing -------------------------------------------------------------------------------

    def select(self, states: Sequence[RequestState], view: View) -> dict[str, str | None]:
        open_to = usable(view.drafters)
        chosen: dict[str, str | None] = {}
        due = []
        for state in states:
            known = self._known.get(state.request.id)
            stays = state.drafter is None or state.drafter in open_to
            is_due = known is None or known.has_news or state.round >= known.next_round
            if stays and not is_due:
                chosen[state.request.id] = state.drafter
            else:
                due.append(state)
        if due:
            self._decide(due, open_to, view, chosen)
        return chosen

    def _decide(
        self,
        states: Sequence[RequestState],
        drafters: Mapping[str, Drafter],
        view: View,
        chosen: dict[str, str | None],
    ) -> None:
        for drafter in drafters.values():
            self._column(drafter)
        self._prior.grow(len(self._models))
        base = self._base(view.learn)
        steps = [base + v for v in self._verification(view.learn)]
        drafters = self._worthwhile(drafters, base, steps, view)
        names = list(drafters)
        columns = [self._columns[n] for n in names]
        values = np.zeros((len(states), len(names)))
        for i, state in enumerate(states):
            before = self._known.get(state.request.id)
            is_review = before is None or state.round >= before.next_round
            known = self._know(state, drafters, view)
            known.has_news = False
            if names:
                rounds = self._rounds(state, base, steps, view)
                rates = self._rates(state, known)[columns].tolist()
                values[i] = self._worth(state, rounds, list(drafters.values()), rates, view)
                if is_review:
                    self._propose(state, known, rounds, drafters, values[i], view)
        room = [
            None if d.max_num_seqs is None else d.max_num_seqs - _others(d, states, view.loads)
            for d in drafters.values()
        ]
        for state, index in zip(states, assign(values, room), strict=True):
            name = None if index is None else names[index]
            chosen[state.request.id] = name
            known = self._known[state.request.id]
            if name is not None:
                self._tell(known, state.request.id, name, view.learn)
            elif not any((state.request.id, n) in self._proposals for n in names):
                # No draft and no replay: nothing will be learned of the request.
                known.next_round = max(known.next_round, state.round + _IDLE_GAP)

    def _worthwhile(
        self, drafters: Mapping[str, Drafter], base: float, steps: Sequence[float], view: View
    ) -> dict[str, Drafter]:
        """Those that would pay if nearly all that they draft were accepted: under load mostly none,
        and then nothing more need be found out. base, steps: as of `_Rounds`."""
        tokens, survival = [], 1.0
        for length in range(1, self.options.k_max + 1):
            survival += _BEST_RATE**length
            tokens.append(survival)
        times, sharing = view.learn.times, self._num_sharing
        most = base / (1 + self.options.margin)
        return {
            n: d
            for n, d in drafters.items()
            if _least_per_token(steps, _token_seconds(d, sharing, times), tokens) < most
        }

    def _rates(self, state: RequestState, known: _Known) -> FloatArray:
        """[J] expected acceptance of a request."""
        known.posterior = known.prior.after(*known.counts)
        return known.posterior.rates()

    def _rounds(
        self, state: RequestState, base: float, steps: Sequence[float], view: View
    ) -> _Rounds:
        left = state.num_remaining_tokens
        expected = view.learn.lengths.remaining(state.num_output_tokens, left)
        return _Rounds(base, steps[: max(1, left - 1)], expected)

    def _worth(
        self,
        state: RequestState,
        rounds: _Rounds,
        drafters: Sequence[Drafter],
        rates: Sequence[float],
        view: View,
    ) -> list[float]:
        """[drafters] seconds that each saves the request to its end, against none."""
        saved, gained = self._savings(state, rounds, drafters, rates, view)
        self._want(drafters, gained)
        return [s - self._reading(state, d, view) for s, d in zip(saved, drafters, strict=True)]

    def _savings(
        self,
        state: RequestState,
        rounds: _Rounds,
        drafters: Sequence[Drafter],
        rates: Sequence[float],
        view: View,
    ) -> tuple[list[float], list[float]]:
        """[drafters] seconds that each saves the request to its end once it has read the text; and
        a token, if everybody shared its time."""
        base, steps, remaining = rounds
        step_times, sharing = view.learn.times, self._num_sharing
        gained, saved = [], []
        for drafter, rate in zip(drafters, rates, strict=True):
            name = drafter.name
            survival = view.learn.acceptance.shape_of(name).survival(rate, len(steps))
            tokens = list(accumulate(survival, initial=1.0))[1:]
            users = view.loads.get(name, 0) + (state.drafter != name)
            users = max(1, users, round(sharing * self._demand.get(name, 0.0)))
            # Inside a step all wait for a drafter; beside it only those that use it.
            share = 1.0 if view.is_beside(drafter) else sharing / users
            drafting = share * _token_seconds(drafter, users, step_times)
            per_token = _least_per_token(steps, drafting, tokens)
            if name != state.drafter:
                per_token *= 1 + self.options.margin
            drafting = _token_seconds(drafter, sharing, step_times)
            gained.append(base - _least_per_token(steps, drafting, tokens))
            saved.append(remaining * (base - per_token))
        return saved, gained

    def _reading(self, state: RequestState, drafter: Drafter, view: View) -> float:
        """Seconds for which all that wait for a drafter wait until it has read the text."""
        waiting = 1 if view.is_beside(drafter) else self._num_sharing
        unread = state.num_known_tokens - self._num_read(state, drafter)
        return waiting * view.learn.times.catch_up_of(drafter.name) * unread

    def _want(self, drafters: Sequence[Drafter], gained: Sequence[float]) -> None:
        """Note which drafter a request would have if everybody shared its time. Of one that none
        uses yet each would have to bear the whole step, and none would ever begin."""
        most = max(gained)
        favourite = drafters[gained.index(most)].name if most > 0 else None
        for drafter in drafters:
            known = self._demand.get(drafter.name, 0.0)
            wanted = float(drafter.name == favourite)
            self._demand[drafter.name] = known + _DEMAND_WEIGHT * (wanted - known)

    def _base(self, estimators: Estimators) -> float:
        """Seconds of a step without any draft."""
        times = estimators.times
        return round_seconds(times.target(self._num_sharing), host=times.overhead)

    def _verification(self, estimators: Estimators) -> list[float]:
        """[k_max] seconds by which so many more rows of the target hold up all requests, and the
        host's work on drafts."""
        pace = self._pace
        rows = 1
        if pace.requests:
            drafted = pace.rows / pace.requests - 1
            rows = max(1, round(pace.rows / pace.steps - drafted))
        target, sharing = estimators.times.target, self._num_sharing
        alone = target(rows)
        host = estimators.times.draft_overhead
        return [
            host + sharing * (target(rows + n) - alone) for n in range(1, self.options.k_max + 1)
        ]

    @property
    def _num_sharing(self) -> int:
        """Requests of a target step."""
        pace = self._pace
        return max(1, round(pace.requests / pace.steps)) if pace.steps else 1

    def _num_read(self, state: RequestState, drafter: Drafter) -> int:
        if drafter.pool is None and not drafter.remote:
            return state.num_known_tokens
        kv = state.kv.get(drafter.name)
        return 0 if kv is None else min(kv.num_computed_tokens, state.num_known_tokens)

    # --- learning -------------------------------------------------------------------------------

    def observe(self, outcomes: Sequence[Outcome], view: View) -> None:
        self._pace.observe(outcomes, view)
        for state, verdict in outcomes:
            column = self._columns.get(verdict.drafter or "")
            known = self._known.get(state.request.id)
            if column is not None and known is not None and verdict.num_decided:
                known.note(column, verdict.evidence, verdict.num_decided - verdict.evidence)

    def replayed(self, state: RequestState, replayed: Replayed) -> None:
        self._proposals.pop((state.request.id, replayed.drafter), None)
        column = self._columns.get(replayed.drafter)
        known = self._known.get(state.request.id)
        if column is not None and known is not None and replayed.num_tokens:
            missed = replayed.num_tokens - replayed.num_matched
            known.note(column, replayed.num_matched, missed)
            known.has_news = True

    def forget(self, request_id: str) -> None:
        known = self._known.pop(request_id, None)
        for key in [k for k in self._proposals if k[0] == request_id]:
            del self._proposals[key]
        self._num_ended += known is not None
        if known is not None and known.totals.any():
            known.grow(len(self._models))
            self._prior.learn(known.words, *known.totals)

    def _know(self, state: RequestState, drafters: Mapping[str, Drafter], view: View) -> _Known:
        """What is known of a request that is about to be decided on."""
        known = self._known.get(state.request.id)
        gap = self.options.first_gap
        if known is None:
            counts, totals = np.zeros((2, 2, 0))
            soon = not view.beside.isdisjoint(drafters)
            # Idle drafters can read as soon as there is anything to read.
            first = 1 if soon else 1 + gap
            known = _Known(
                words_of(state.request), _NOTHING, np.empty(0), counts, totals, max(1, gap // 2), 0
            )
            known.next_round = state.round + first
            self._known[state.request.id] = known
        elif state.round >= known.next_round:
            known.gap = min(2 * known.gap, _LONGEST_GAP)
            known.next_round = state.round + known.gap
        if len(known.doubt) < len(self._models):
            known.grow(len(self._models))
            known.prior, known.doubt = self._prior.belief(known.words)
            untold = [self._columns[n] for n, d in drafters.items() if not _can_replay(d, state)]
            if untold and self.options.explore:
                draws = self._rng.standard_normal(len(untold))
                known.prior.mean[untold] += known.doubt[untold] * draws
        return known

    def _column(self, drafter: Drafter) -> int:
        """Instances of one model share what is known of it."""
        column = self._columns.get(drafter.name)
        if column is None:
            model = drafter.model or drafter.name
            column = self._models.setdefault(model, len(self._models))
            self._columns[drafter.name] = column
        return column

    def _tell(self, known: _Known, request_id: str, drafter: str, estimators: Estimators) -> None:
        """Allocation counts a request's own drafts itself; it is told what the rest says."""
        column = self._columns[drafter]
        rest = known.posterior
        if rest is None or known.counts[:, column].any():
            counts = known.counts.copy()
            counts[:, column] = 0.0
            rest = known.prior.after(*counts)
        rate, variance = float(rest.rates()[column]), float(rest.variance[column])
        strength = 1 / (rate * (1 - rate) * max(variance, 1e-3)) - 1
        strength = min(max(strength, _LEAST_STRENGTH), _MOST_STRENGTH)
        estimators.acceptance.expect(request_id, drafter, rate, strength)

    # --- replays --------------------------------------------------------------------------------

    @property
    def proposes_replays(self) -> bool:
        return bool(self._proposals)

    def replays(self, states: Sequence[RequestState], view: View) -> list[ReplayProposal]:
        return list(self._proposals.values())

    def _propose(
        self,
        state: RequestState,
        known: _Known,
        rounds: _Rounds,
        drafters: Mapping[str, Drafter],
        values: FloatArray,
        view: View,
    ) -> None:
        """Have drafters read the request: those beside the target whenever they are idle, look-up
        always, for it costs nothing, and the others if that is worth its time."""
        if not state.num_output_tokens or not self.options.explore:
            return
        best = max(0.0, float(values.max()))
        for (name, drafter), value in zip(drafters.items(), values.tolist(), strict=True):
            if name == state.drafter or not _can_replay(drafter, state):
                continue
            if not view.is_beside(drafter) and drafter.pool is not None:
                seconds = self._reading(state, drafter, view)
                worth = 0.0
                if value < best:
                    worth = self._improvement(state, known, rounds, drafter, best, view)
                if worth <= seconds:
                    if not self._teaches(state, known, name, seconds):
                        continue
                    self._replayed_s += seconds
                    known.evaluated.add(name)
            self._proposals[state.request.id, name] = ReplayProposal(state, name, evaluate=True)

    def _improvement(
        self,
        state: RequestState,
        known: _Known,
        rounds: _Rounds,
        drafter: Drafter,
        best: float,
        view: View,
    ) -> float:
        """Seconds that the request may be expected to save because a replay changes the choice,
        against `best` (Gauss and Hermite's rule for what the replay may say)."""
        if known.posterior is None:
            return 0.0
        column = self._columns[drafter.name]
        variance = float(known.posterior.variance[column])
        rate = float(known.posterior.rates()[column])
        seen = max(self._num_read(state, drafter), state.request.prompt_len)
        information = max(0, state.num_known_tokens - seen) * rate * (1 - rate)
        told = variance * variance * information / (1 + variance * information)
        means = known.posterior.mean[column] + math.sqrt(told) * _NODES
        rates = mean_rate(means, np.full(len(means), variance - told)).tolist()
        saved, _ = self._savings(state, rounds, [drafter] * len(rates), rates, view)
        return float(sum(w * max(0.0, s - best) for w, s in zip(_WEIGHTS, saved, strict=True)))

    def _teaches(self, state: RequestState, known: _Known, drafter: str, seconds: float) -> bool:
        """Whether a replay says enough for requests to come, and there is time for it."""
        return (
            state.num_output_tokens >= _MIN_REPLAYED_TOKENS
            and drafter not in known.evaluated
            and known.doubt[self._columns[drafter]] >= _MIN_PRIOR_STD
            and self._replayed_s + seconds <= self._exploration_s()
        )

    def _exploration_s(self) -> float:
        """Seconds that replays may have taken by now: at first a share of all decoding, then, as
        there is less to learn, a share that falls with the number of requests."""
        ended = self._num_ended / _EARLY_REQUESTS
        share = math.log1p(ended) / ended if ended else 1.0
        return self.options.explore * share * self._pace.total_s


def _least_per_token(steps: Sequence[float], drafting: float, tokens: Sequence[float]) -> float:
    """Seconds a token with the best draft length. steps: of a step by the draft's length, without
    drafting; drafting: of one draft token; tokens: that a round then yields."""
    return min(
        (s + drafting * n) / t for n, (s, t) in enumerate(zip(steps, tokens, strict=True), 1)
    )


def _token_seconds(drafter: Drafter, batch: int, times: Times) -> float:
    """Of a draft token. A chain's looked-up tokens take no time."""
    seconds = times.curve_of(drafter.name)(batch)
    return seconds * times.steps_of(drafter.name) if drafter.is_chained else seconds


def _can_replay(drafter: Drafter, state: RequestState) -> bool:
    return not drafter.remote and not state.request.sampling.is_ratio


def _others(drafter: Drafter, states: Sequence[RequestState], loads: Mapping[str, int]) -> int:
    """Requests that keep the drafter whatever is decided for `states`."""
    return loads.get(drafter.name, 0) - sum(s.drafter == drafter.name for s in states)


POLICY = Adaptive
