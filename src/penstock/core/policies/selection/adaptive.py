"""Adaptive selection: the drafter with the most expected tokens per second.

Each request has a posterior of its acceptance by every drafter, used or not (`learn.prior`).
Drafters are compared by the seconds that they save the request to its end (`parts/savings.py`).
Decisions come at the start, after rounds that double, and when a replay has an answer.

In a replay a drafter reads the text and says what it would have drafted. It is ordered where the
answer should save the request more than the reading takes (value of information), and within a
share of the time for the sake of later requests. Where replays tell nothing (draft servers,
`ratio`), the choice is by Thompson sampling.

Deciding takes the host's time, for which all requests of a step wait. It is measured, and reviews,
replays and first choices must be expected to save more."""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt

from penstock.core.learn import Estimators
from penstock.core.learn.acceptance import MOST_POSITIONS
from penstock.core.learn.prior import AcceptancePrior, Belief, mean_rate
from penstock.core.policies.base import ReplayProposal, SelectionPolicy, View, usable
from penstock.core.policies.options import LONGEST_DRAFT, Range, Seed, Share
from penstock.core.policies.selection.parts.pace import Favourite, Pace, ReviewTime
from penstock.core.policies.selection.parts.places import assign
from penstock.core.policies.selection.parts.savings import WEIGHTS, Prices, Savings
from penstock.core.state import Drafter, Outcome, RequestState
from penstock.core.types import Replayed, Request

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
_NOTHING = Belief(np.empty(0), np.empty((0, 0)))

_DECAY = 0.98  # memory of evidence a round
_DEMAND_WEIGHT = 0.05  # weight of a request in the demand for drafters
_MIN_REPLAYED_TOKENS = 24  # output tokens from which on a replay says enough
_EARLY_REQUESTS = 64.0  # ended requests up to which the share for replays is nearly constant
_MIN_PRIOR_STD = 0.6
"""Least standard deviation of a prior's mean for a replay for the sake of later requests."""
_LEAST_STRENGTH = 2.0  # least tokens that it may count for
_MOST_STRENGTH = 100.0
"""Most tokens that selection's evidence may count for in allocation's estimate."""
_FIRST_GAP, _LONGEST_GAP = 2, 8
"""Rounds between a request's decisions, first and, after doubling, longest: texts change, and
evidence of a replay fades."""
_MARGIN = 0.04  # share of the time that a change must save over staying
_LONGER = 2.0 ** np.arange(5)
"""Factors of the gap after which a review may be due that does not pay at once."""
_LITTLE = 0.005  # largest share of a step that a review may use without a cost check
_CHOICE = 2.0  # cost of a first choice, and learning at the request's end, in reviews
_IDLE_GAP = 16  # rounds until drafters are reconsidered if none pays


@dataclass(slots=True)
class _Known:
    """Belief about each drafter's acceptance on one running request, and its next decision."""

    words: IntArray
    prior: Belief  # before any evidence
    doubt: FloatArray  # [J] standard deviation of its mean
    counts: FloatArray  # [2, J] accepted and rejected tokens, faded by rounds
    totals: FloatArray  # not faded
    gap: int  # rounds between decisions
    next_round: int  # of the next decision
    evaluated: set[str] = field(default_factory=set)  # drafters asked for a replay inside a step
    has_news: bool = False  # a replay has answered since
    posterior: Belief | None = None  # of the last decision

    def note(self, column: int, accepted: float, rejected: float) -> None:
        """Count decided draft tokens, drafted or replayed."""
        self.counts *= _DECAY
        self.counts[:, column] += accepted, rejected
        self.totals[:, column] += accepted, rejected

    def grow(self, num_models: int) -> None:
        missing = num_models - self.counts.shape[1]
        self.counts = np.pad(self.counts, ((0, 0), (0, missing)))
        self.totals = np.pad(self.totals, ((0, 0), (0, missing)))


class Adaptive(SelectionPolicy):
    """Bayesian choice over requests and drafters together."""

    name: ClassVar[str] = "adaptive"
    weighs_time: ClassVar[bool] = True

    @dataclass(frozen=True, slots=True)
    class Options:
        # Longest draft in the worth of a drafter.
        k_max: Annotated[int, Range(at_least=1, at_most=LONGEST_DRAFT)] = 8
        explore: Share = 0.1  # share of the time for replays at first; falls with requests; 0: none
        seed: Seed = 0

    options: Options

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._rng = np.random.default_rng(options.seed)
        self._prior = AcceptancePrior()
        self._columns: dict[str, int] = {}
        self._models: dict[str, int] = {}
        self._known: dict[str, _Known] = {}
        self._pace = Pace()
        self._review_time = ReviewTime()
        self._review_s = 0.0
        self._favourite = Favourite()
        self._unasked: dict[str, str | None] = {}
        self._demand: dict[str, float] = {}
        self._num_wanted = 0
        self._proposals: dict[tuple[str, str], ReplayProposal] = {}
        self._replayed_s = 0.0
        self._num_ended = 0

    # --- choosing -------------------------------------------------------------------------------

    def select(self, states: Sequence[RequestState], view: View) -> dict[str, str | None]:
        open_to = usable(view.drafters)
        chosen: dict[str, str | None] = {}
        due = []
        # With new requests there will be more in a step than there were.
        num_sharing = max(self._pace.num_sharing, len(states))
        for state in states:
            known = self._known.get(state.request.id)
            if known is None and self._goes_unasked(state, open_to, num_sharing, view):
                chosen[state.request.id] = self._unasked[state.request.id]
                continue
            stays = state.drafter is None or state.drafter in open_to
            is_due = known is None or known.has_news or state.round >= known.next_round
            if stays and not is_due:
                chosen[state.request.id] = state.drafter
            else:
                due.append(state)
        if due:
            self._decide(due, open_to, num_sharing, view, chosen)
        return chosen

    def _decide(
        self,
        states: Sequence[RequestState],
        drafters: Mapping[str, Drafter],
        num_sharing: int,
        view: View,
        chosen: dict[str, str | None],
    ) -> None:
        for drafter in drafters.values():
            self._column(drafter)
        self._prior.grow(len(self._models))
        longest = min(self.options.k_max, MOST_POSITIONS)
        prices = Prices(drafters, self._pace, num_sharing, view, longest, _MARGIN)
        drafters = prices.drafters
        self._review_s = self._reviewing(prices)
        reviewed = [not self._has_time(s) for s in states]
        self._review_time.reviewed(len(states))
        is_new = [s.request.id not in self._known for s in states]
        known = [self._know(state, drafters, view) for state in states]
        values = per_token = np.zeros((len(states), len(drafters)))
        if drafters:
            savings = Savings(prices, states)
            columns = [self._columns[n] for n in drafters]
            rates = np.stack([self._rates(*each) for each in zip(states, known, strict=True)])
            self._want(drafters, savings.shared(rates[:, columns]))
            savings.share(self._demand)
            values = savings.at(rates[:, columns]) - savings.reading
            per_token = values / savings.remaining
            self._propose(known, reviewed, savings, values)
            if self._review_s:
                self._postpone(known, savings, values)
        for row in per_token[is_new].tolist():
            self._favourite.add_saved(dict(zip(drafters, row, strict=True)), prices.num_sharing)
        room = [
            None if d.max_num_seqs is None else d.max_num_seqs - _others(d, states, view.loads)
            for d in drafters.values()
        ]
        names = list(drafters)
        for state, own, index in zip(states, known, assign(values, room), strict=True):
            own.has_news = False
            name = None if index is None else names[index]
            chosen[state.request.id] = name
            if name is not None:
                self._tell(own, state.request.id, name, view.learn)
            elif not any((state.request.id, n) in self._proposals for n in names):
                # No draft and no replay: nothing will be learned of the request.
                own.next_round = max(own.next_round, state.round + _IDLE_GAP)

    def _goes_unasked(
        self, state: RequestState, drafters: Mapping[str, Drafter], num_sharing: int, view: View
    ) -> bool:
        """Return whether to use the favourite: choosing would cost more than it saves."""
        request_id = state.request.id
        if request_id not in self._unasked:
            self._review_time.began()
            if not self._review_s or self._num_ended < _EARLY_REQUESTS:
                return False
            gain = self._favourite.gain(num_sharing)
            left = state.num_remaining_tokens
            remaining = view.learn.lengths.remaining(state.num_output_tokens, left)
            if gain is None or gain * remaining > _CHOICE * self._review_s:
                return False
            self._unasked[request_id] = self._favourite.name
        name = self._unasked[request_id]
        drafter = drafters.get(name or "")
        if name is not None and (drafter is None or drafter.max_num_seqs is not None):
            del self._unasked[request_id]
        return request_id in self._unasked

    def _has_time(self, state: RequestState) -> bool:
        known = self._known.get(state.request.id)
        return known is not None and state.round < known.next_round

    def _rates(self, state: RequestState, known: _Known) -> FloatArray:
        """Return the expected acceptance [J] of a request."""
        known.posterior = known.prior.after(*known.counts)
        return known.posterior.rates()

    def _want(self, names: Collection[str], gained: FloatArray) -> None:
        """Note the drafter each request would have if all shared it; `gained` [S, J] per token."""
        best = np.where(gained.max(axis=1) > 0, gained.argmax(axis=1), -1)
        for favourite in best.tolist():
            self._num_wanted += 1
            weight = max(_DEMAND_WEIGHT, 1 / self._num_wanted)
            for j, name in enumerate(names):
                known = self._demand.get(name, 0.0)
                self._demand[name] = known + weight * ((j == favourite) - known)

    # --- learning -------------------------------------------------------------------------------

    def on_step(self, outcomes: Sequence[Outcome], view: View) -> None:
        self._pace.on_step(outcomes, view)
        if not view.beside:
            self._review_time.add_pause(view.learn.times.pause)
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

    def release_request(self, request_id: str) -> None:
        known = self._known.pop(request_id, None)
        self._unasked.pop(request_id, None)
        for key in [k for k in self._proposals if k[0] == request_id]:
            del self._proposals[key]
        self._num_ended += known is not None
        self._review_time.ended()
        if known is not None and known.totals.any():
            known.grow(len(self._models))
            self._prior.learn(known.words, *known.totals)

    def _know(self, state: RequestState, drafters: Mapping[str, Drafter], view: View) -> _Known:
        """Return the state of a request that is to be decided on."""
        known = self._known.get(state.request.id)
        gap = _FIRST_GAP
        if known is None:
            counts, totals = np.zeros((2, 2, 0))
            soon = not view.beside.isdisjoint(drafters)
            # Idle drafters can read as soon as there is text.
            first = 1 if soon else 1 + gap
            known = _Known(
                _words_of(state.request), _NOTHING, np.empty(0), counts, totals, max(1, gap // 2), 0
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
        """Return the model's column: drafters with one model share what is known of it."""
        column = self._columns.get(drafter.name)
        if column is None:
            model = drafter.model or drafter.name
            column = self._models.setdefault(model, len(self._models))
            self._columns[drafter.name] = column
        return column

    def _tell(self, known: _Known, request_id: str, drafter: str, estimators: Estimators) -> None:
        """Tell allocation the acceptance expected by all but the request's own drafts."""
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
        known: Sequence[_Known],
        reviewed: Sequence[bool],
        savings: Savings,
        values: FloatArray,
    ) -> None:
        """Propose replays: free ones always, others if they pay."""
        asking = [i for i, s in enumerate(savings.states) if reviewed[i] and s.num_output_tokens]
        if not asking or not self.options.explore:
            return
        view, drafters = savings.view, savings.drafters
        worth = self._worth_of_replays(known, savings, values)
        for i in asking:
            state = savings.states[i]
            for j, (name, drafter) in enumerate(drafters.items()):
                if name == state.drafter or not _can_replay(drafter, state):
                    continue
                seconds = float(savings.reading[i, j]) + self._review_s
                is_free = view.is_beside(drafter) or (drafter.pool is None and not self._review_s)
                if not is_free and worth[i, j] <= seconds:
                    if not self._teaches(state, known[i], name, seconds):
                        continue
                    self._replayed_s += seconds
                    known[i].evaluated.add(name)
                self._proposals[state.request.id, name] = ReplayProposal(state, name, evaluate=True)

    def _worth_of_replays(
        self, known: Sequence[_Known], savings: Savings, values: FloatArray
    ) -> FloatArray:
        """Return the expected seconds [S, J] saved because a replay changes the choice."""
        belief = self._beliefs(known, savings.drafters)
        if belief is None:
            return np.zeros_like(values)
        mean, variance = belief
        rates = mean_rate(mean, variance)
        outputs = np.array(
            [[float(s.num_known_tokens - s.request.prompt_len)] for s in savings.states]
        )
        information = np.minimum(savings.unread, outputs) * rates * (1 - rates)
        best = np.maximum(0.0, values.max(axis=1, keepdims=True))
        gains = np.maximum(0.0, savings.told(mean, variance, information) - best)
        return np.where(values < best, np.tensordot(WEIGHTS, gains, 1), 0.0)

    def _beliefs(
        self, known: Sequence[_Known], drafters: Collection[str]
    ) -> tuple[FloatArray, FloatArray] | None:
        """Return mean and variance [S, J] of the log-odds; None unless known of all requests."""
        beliefs = [k.posterior for k in known if k.posterior is not None]
        if len(beliefs) < len(known):
            return None
        columns = [self._columns[n] for n in drafters]
        means = np.stack([b.mean for b in beliefs])[:, columns]
        return means, np.stack([b.variance for b in beliefs])[:, columns]

    def _postpone(self, known: Sequence[_Known], savings: Savings, values: FloatArray) -> None:
        """Postpone reviews until a change is expected to save more than the review takes."""
        belief = self._beliefs(known, savings.drafters)
        if belief is None:
            return
        mean, variance = belief
        rates = mean_rate(mean, variance)
        gaps = np.multiply.outer(_LONGER, np.array([[float(k.gap)] for k in known]))
        tokens = gaps * savings.view.learn.lengths.per_step
        told = savings.told(mean, variance, tokens * rates * (1 - rates))
        best = values.argmax(axis=1)[:, None]
        others = values.copy()
        np.put_along_axis(others, best, 0.0, axis=1)
        second = np.maximum(0.0, others.max(axis=1, keepdims=True))
        gains = np.tensordot(WEIGHTS, np.maximum(0.0, second - told), 1)
        gains *= np.maximum(0.0, 1 - tokens / savings.remaining)
        pays = np.take_along_axis(gains, best[None], axis=2)[..., 0] > self._review_s
        for i, (state, own) in enumerate(zip(savings.states, known, strict=True)):
            rounds = gaps[pays[:, i], i, 0]
            wait = int(rounds[0]) if len(rounds) else state.num_remaining_tokens
            own.next_round = max(own.next_round, state.round + wait)

    def _reviewing(self, prices: Prices) -> float:
        """Return the seconds that all requests of a step wait for a review; 0 if negligible."""
        seconds = self._review_time.seconds
        return 0.0 if seconds < _LITTLE * prices.base else seconds * prices.num_sharing

    def _teaches(self, state: RequestState, known: _Known, drafter: str, seconds: float) -> bool:
        """Return whether a replay tells enough for later requests, and there is time for it."""
        return (
            state.num_output_tokens >= _MIN_REPLAYED_TOKENS
            and drafter not in known.evaluated
            and known.doubt[self._columns[drafter]] >= _MIN_PRIOR_STD
            and self._replayed_s + seconds <= self._exploration_s()
        )

    def _exploration_s(self) -> float:
        """Return the seconds allowed for replays by now: a share that falls with ended requests."""
        ended = self._num_ended / _EARLY_REQUESTS
        share = math.log1p(ended) / ended if ended else 1.0
        return self.options.explore * share * self._pace.total_s


def _words_of(request: Request) -> IntArray:
    """Return hashable words of prompt and tenant as integers, possibly repeated."""
    tenant = zlib.crc32(request.tenant.encode()) + (1 << 40)
    return np.append(np.asarray(request.prompt_token_ids or (), dtype=np.int64), tenant)


def _can_replay(drafter: Drafter, state: RequestState) -> bool:
    return not drafter.remote and not state.request.sampling.is_ratio


def _others(drafter: Drafter, states: Sequence[RequestState], loads: Mapping[str, int]) -> int:
    """Return the number of requests outside `states` that keep the drafter."""
    return loads.get(drafter.name, 0) - sum(s.drafter == drafter.name for s in states)


POLICY = Adaptive
