"""Draft lengths of the greatest value per second: one objective for time, fairness and latency.

A step with draft lengths S lasts T(S) (`learn.times.round_seconds`) and is worth

    V(S) = Σ_i v_i (1 + f_i Σ_{s ≤ S_i} G_i(s)),

with v_i the value of a token of request i (`parts/values.py`), f_i the probability that its drafter
finds a draft, and G_i(s) the survival of its s-th token. The plan maximises V / T. At the maximum
π = V / T is the price of a second: a draft token is bought if v_i f_i G_i(s) is more than π times
the seconds that it adds. Where drafts take no time this is GoodSpeed's eq. 5; with equal values it
maximises tokens per second. Prefill in the step is left out: its time does not depend on drafts.

A draft begins with a_i looked-up tokens of survival S_i and goes on with the drafter's, of survival
S_i(a_i) G_i(s). Two plans are compared: all that is looked up comes first, or as much as is best if
the drafter goes on, at the price of the last plan.

Under given caps the most valuable tokens are best, so all prefixes of that order are compared,
under several caps at once. A cap is the longest draft of a drafter inside the step, or the latest
arrival of drafts made beside it. One group of drafters is solved exactly, if its seconds do not
depend on how many draft and all drafts are found; several groups are solved in turn, each against
the caps of the others. Looked-up tokens are under no cap.

Requests may do better out of step, each waiting for the draft of its own server alone: that plan is
compared, too.

Where drafts might not pay, a step without them is made now and then to measure its time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.core.learn.acceptance import MOST_POSITIONS, survival_of
from penstock.core.learn.times import round_seconds
from penstock.core.policies.allocation.parts.drafters import fade_unused, reading_seconds
from penstock.core.policies.allocation.parts.gradient import Fairness
from penstock.core.policies.allocation.parts.values import TokenValues
from penstock.core.policies.base import AllocationPolicy, DraftCandidate, Gauges, View
from penstock.core.policies.declared import Gauge, LimitOptions
from penstock.core.policies.options import MaxDraftTokens, NonNegativeFloat
from penstock.core.state import NO_DRAFT, Grant, Outcome

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_LEAST_GAIN = 0.01  # of drafts over none: the best of many estimates is too high
_DOUBTFUL_GAIN = 0.05  # below it a step without drafts is measured now and then
_LEAST_OVERHEAD_S = 1e-6  # keeps rates finite before anything is measured
_IDLE_ROUNDS, _HELD_ROUNDS = 8, 4
"""Steps of the same requests that a plan holds for, without drafts and with: estimates hardly
move."""
_FEW = 0.125  # share of those requests that may change meanwhile
_FIRST_GAP, _LONGEST_GAP = 4, 64
"""Steps with doubtful drafts until one without is made: first, and after doubling each time."""
_MOST_ARRIVALS = 32  # latest arrivals that are compared
_TRIAL_TOKENS = 4  # draft tokens of a trial


class Priced(AllocationPolicy):
    """Buys draft tokens that are worth more than the time they take."""

    name: ClassVar[str] = "priced"
    limits = LimitOptions(max_draft_tokens="k_max")
    metrics = (
        Gauge(
            "price_of_second",
            "Value that a second of a step is worth; 1 is a token of the mean request.",
        ),
        Gauge("plain_step_seconds", "Expected seconds of a step without drafts."),
        Gauge(
            "draft_token_seconds", "Seconds that one more draft token adds to a step.", "drafter"
        ),
        Gauge(
            "tenant_token_value", "Value of a token of a tenant's requests, in the mean.", "tenant"
        ),
    )
    weighs_time: ClassVar[bool] = True

    @dataclass(frozen=True, slots=True)
    class Options:
        k_max: MaxDraftTokens = 8  # most draft tokens for one request
        fairness: Fairness = 1.0  # exponent of the tenants' utility
        in_time: NonNegativeFloat = 4.0  # value of a token in time, beyond that of any token

    options: Options

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._values = TokenValues(options.fairness, options.in_time)
        self._plan: dict[tuple[str, str | None], Grant] = {}
        self._offers: _Offers | None = None
        self._is_idle, self._has_looked_up, self._rate = False, False, 0.0
        self._num_rows = self._num_steps = 0
        self._num_doubtful, self._gap = 0, _FIRST_GAP

    def allocate(self, candidates: Sequence[DraftCandidate], view: View) -> list[Grant]:
        if not candidates:
            return []
        keys = [(c.state.request.id, c.drafter) for c in candidates]
        if not any([c.survival for c in candidates]) and self._holds(keys, view):
            self._num_steps += 1
            held = [self._plan.get(key, NO_DRAFT) for key in keys]
            return [g.cut(c.limit) for g, c in zip(held, candidates, strict=True)]
        offers = _Offers(candidates, view, min(self.options.k_max, MOST_POSITIONS), self._values)
        lengths, rate = offers.best(self._rate)
        is_idle = not np.count_nonzero(lengths)
        if not is_idle and offers.is_doubtful(rate) and self._is_plain_step_due():
            return [NO_DRAFT] * len(candidates)
        grants = offers.grants(lengths, rate)
        drafted = [g.num_draft_tokens for g in grants]
        fade_unused(candidates, drafted, view, self._num_steps or 1, offers.trials)
        self._plan, self._offers, self._rate = dict(zip(keys, grants, strict=True)), offers, rate
        self._is_idle, self._num_rows, self._num_steps = is_idle, view.room.num_rows, 1
        self._has_looked_up = bool(np.count_nonzero(lengths[0]))
        return grants

    @property
    def gauges(self) -> Gauges:
        return {} if self._offers is None else self._offers.gauges

    def on_step(self, outcomes: Sequence[Outcome], now: float) -> None:
        self._values.on_step(outcomes, now)

    def _is_plain_step_due(self) -> bool:
        """Return whether a step without drafts is due, measured where drafts are doubtful."""
        self._num_doubtful += 1
        if self._num_doubtful < self._gap:
            return False
        self._num_doubtful, self._gap = 0, min(2 * self._gap, _LONGEST_GAP)
        return True

    def _holds(self, keys: Sequence[tuple[str, str | None]], view: View) -> bool:
        """Return whether the last plan is young enough, and made for nearly this step."""
        if self._num_steps >= (_IDLE_ROUNDS if self._is_idle else _HELD_ROUNDS):
            return False
        if self._has_looked_up:
            return False
        if not self._is_idle:
            is_same = view.room.num_rows == self._num_rows and len(keys) == len(self._plan)
            return (
                is_same
                and view.room.budget >= len(keys) * self.options.k_max
                and all([key in self._plan for key in keys])
            )
        most, now = len(self._plan) * _FEW, set(keys)
        return len(now - self._plan.keys()) <= most and len(self._plan.keys() - now) <= most


class _Group(NamedTuple):
    """Drafters that share one cap: one that drafts inside the step, or all beside it (None)."""

    drafter: str | None
    caps: FloatArray  # to be compared


class _Offers:
    """Draft tokens that could be bought, the most valuable first, and the step that they join."""

    def __init__(
        self, candidates: Sequence[DraftCandidate], view: View, k_max: int, values: TokenValues
    ) -> None:
        self._candidates, self._view, self._times = candidates, view, view.learn.times
        limits = [min(c.limit, c.most, k_max) for c in candidates]
        self._longest = max(limits)
        self._survival = self._drafted(limits)
        self._num_looked_up = np.array([len(c.survival) for c in candidates])
        self._looked_up = np.zeros((len(candidates), max(self._num_looked_up.tolist())))
        for i, candidate in enumerate(candidates if self._looked_up.size else ()):
            self._looked_up[i, : len(candidate.survival)] = candidate.survival
        self._price_step(values)
        self._sort_groups()
        self._reached = np.ones(len(candidates))
        self._reads: FloatArray | None = None
        self._steps: dict[str, FloatArray] = {}

    # --- what is on offer -----------------------------------------------------------------------

    def best(self, rate: float) -> tuple[IntArray, float]:
        """Return the best lengths [requests], and their value a second.

        rate: of the last plan."""
        fronts = [self._num_looked_up]
        if self._looked_up.size and self._survival.size:
            fronts.append(self._fronts(max(rate, self.plain_value / self.plain_s)))
        plans = []
        for front in fronts:
            self._offer(front)
            plans.append((*self._best_plan(), self._reached))
        lengths, rate, self._reached = max(plans, key=lambda plan: plan[1])
        servers = {n for n, d in self._view.drafters.items() if d.is_remote}
        from_servers = np.array([c.drafter in servers for c in self._candidates])
        if from_servers.any():
            apart = self._apart(from_servers)
            lengths, rate = max((lengths, rate), apart, key=lambda plan: plan[1])
        return lengths, rate

    def _apart(self, from_servers: NDArray[np.bool_]) -> tuple[IntArray, float]:
        """Return lengths, and their value a second, if requests wait for their own drafts alone.

        Those of draft servers come after several steps. A draft waits for half a step in the mean,
        and its rows delay the others."""
        num, longest = self._survival.shape
        rows, plain = self._view.room.num_rows, self.plain_value / self.plain_s
        added = self._times.added(rows, rows + np.arange(longest + 1))
        seconds = np.full((num, longest + 1), self.plain_s)
        seconds[:, 1:] += self._ready(np.arange(num)[:, None], np.arange(1, longest + 1)[None])
        seconds[:, 1:] += 0.5 * self.plain_s * (seconds[:, 1:] > self.plain_s)
        expected = np.ones((num, longest + 1))
        expected[:, 1:] += self._survival.cumsum(axis=1)
        rates = (self._worth[:, None] * expected - plain * added) / seconds
        rates[:, 1:][(self._survival == 0) | ~from_servers[:, None]] = -np.inf
        lengths = np.zeros((2, num), dtype=np.int64)
        lengths[1] = rates.argmax(axis=1)
        rate = plain + float((rates.max(axis=1) - rates[:, 0]).sum())
        if lengths.sum() > self._view.room.budget or rate <= (1 + _LEAST_GAIN) * plain:
            return np.zeros_like(lengths), 0.0
        return lengths, rate

    def _drafted(self, limits: Sequence[int]) -> FloatArray:
        """Return f G [requests, positions] of the drafters, 0 beyond a request's limit."""
        acceptance, longest = self._view.learn.acceptance, self._longest
        keys = [(c.state.request.id, c.drafter or "") for c in self._candidates]
        self._found = np.array([acceptance.found(*key) for key in keys])
        rates = np.array([acceptance.mean(*key) for key in keys])
        factors = {d: acceptance.shape_of(d).factors[:longest] for _, d in keys}
        survival = survival_of(rates, np.array([factors[d] for _, d in keys]))
        if min(limits) < longest:
            survival[np.arange(longest) >= np.array(limits)[:, None]] = 0.0
        return self._found[:, None] * survival

    def _fronts(self, rate: float) -> IntArray:
        """Return how many looked-up tokens [requests] to offer before those of the drafters.

        At a price of a second, and as if others paid for the drafters' steps."""
        num, most = self._looked_up.shape
        rows = self._view.room.num_rows
        each = max(1, int(np.count_nonzero(self._looked_up[:, 0])))
        row = self._times.added(rows, rows + each * np.arange(most + 1)) / each
        price = rate * np.maximum.accumulate(row) / np.maximum(self._worth, 1e-9)[:, None]
        survival = np.concatenate([np.ones((num, 1)), self._looked_up], axis=1)
        behind = (self._survival - price[:, 1:2]).cumsum(axis=1).max(axis=1)
        worth = survival.cumsum(axis=1) - price + survival * np.maximum(behind, 0.0)[:, None]
        return np.asarray(worth.argmax(axis=1))

    def _offer(self, fronts: IntArray) -> None:
        """Sort the tokens on offer, if drafts begin with so many looked-up tokens [requests]."""
        most = self._looked_up.shape[1]
        behind, worth = self._survival, self._worth[:, None]
        if most:
            front = np.where(np.arange(most) < fronts[:, None], self._looked_up, 0.0)
            last = np.take_along_axis(self._looked_up, np.maximum(fronts - 1, 0)[:, None], axis=1)
            self._reached = np.where(fronts > 0, last[:, 0], 1.0)
            behind = self._reached[:, None] * behind
            room = np.array([c.most for c in self._candidates]) - fronts
            behind[np.arange(behind.shape[1]) >= room[:, None]] = 0.0
        gains = worth * behind
        if self._reads_text:
            expected = behind.sum(axis=1)
            cost = self._reading * (1 + expected) * self.plain_value / self.plain_s
            gains[self._worth * expected <= cost] = 0.0  # reading takes more than it saves
        if most:
            gains = np.concatenate([worth * front, gains], axis=1)
            behind = np.concatenate([np.zeros(front.shape), behind], axis=1)
        order = np.argsort(-gains, axis=None, kind="stable")[: np.count_nonzero(gains)]
        self.owners, columns = np.divmod(order, max(1, gains.shape[1]))
        self.is_looked_up = columns < most
        self._places = np.where(self.is_looked_up, 0.0, columns - most + 1.0)
        self._gains = gains.ravel()[order]
        self._rows = np.where(self.is_looked_up, 1.0, self._found[self.owners])
        self._reads = None
        if self._reads_text:
            is_first = self._places == 1.0
            reads = self._reading[self.owners] * (is_first + behind.ravel()[order])
            self._reads = reads + is_first * (fronts * self._read)[self.owners]
        self._levels_of()

    def _price_step(self, values: TokenValues) -> None:
        """Work out the step without drafts: its seconds and its value."""
        times, room, candidates = self._times, self._view.room, self._candidates
        self._target_s = times.target(room.num_sampled)
        self._host = max(times.overhead, _LEAST_OVERHEAD_S)
        self.plain_s = round_seconds(self._target_s, host=self._host)
        self._worth = values.of_tokens(candidates, self._view, self._longest_gain, self.plain_s)
        # Requests that do not draft are worth as much as the others, in the mean.
        mean = float(self._worth.sum()) / len(candidates)
        self.plain_value = max(room.num_sampled, len(candidates)) * mean
        # Reading beside the target delays no other request.
        free = (None, *self._view.beside)
        self._unread = [
            0.0 if c.drafter in free else reading_seconds(c, self._view) for c in candidates
        ]
        self._reads_text = self._looked_up.size > 0 or any(self._unread)
        if self._reads_text:
            self._reading = np.array([self._reading_a_token(i) for i in range(len(candidates))])
            names = ["" if c.drafter in free else c.drafter or "" for c in candidates]
            self._read = np.array([times.catch_up_of(name) for name in names])

    def _longest_gain(self) -> FloatArray:
        """Return the tokens [requests] that the longest draft is expected to add to a step."""
        longest = np.maximum(self._survival.sum(axis=1), self._looked_up.sum(axis=1))
        return np.asarray(longest)

    def _reading_a_token(self, index: int) -> float:
        """Return the seconds of reading per token of a request's output, for which it is done once.

        Not only of its rest: who has made much without drafts would else keep the others, who
        share the drafter's steps with it, from ever beginning."""
        if not self._unread[index]:
            return 0.0
        state, lengths = self._candidates[index].state, self._view.learn.lengths
        made = state.num_output_tokens
        left = lengths.remaining(made, state.num_remaining_tokens)
        return self._unread[index] / (made + max(1.0, left))

    def _sort_groups(self) -> None:
        """Sort drafters into groups. Looked-up tokens are behind the last one."""
        beside = self._view.beside
        names = list(dict.fromkeys(c.drafter for c in self._candidates if c.drafter is not None))
        inside = [n for n in names if n not in beside]
        place = {n: inside.index(n) if n in inside else len(inside) for n in names}
        self._group = np.array([place.get(c.drafter or "", 0) for c in self._candidates])
        caps = np.arange(self._longest + 1.0)
        self.groups = [_Group(name, caps) for name in inside]
        if len(inside) < len(names):
            self.groups.append(_Group(None, np.array([-1.0])))

    def _levels_of(self) -> None:
        """Give each token on offer its group, and the least cap under which it can be bought."""
        last = len(self.groups)
        self.group_of = np.where(self.is_looked_up, last, self._group[self.owners])
        self.levels = self._places
        if last and self.groups[-1].drafter is None:
            is_beside = self.group_of == last - 1
            self.levels = np.where(is_beside, self._ready(self.owners, self._places), self._places)
            latest = np.unique(self.levels[is_beside])
            if len(latest) > _MOST_ARRIVALS:
                latest = np.quantile(latest, np.linspace(0, 1, _MOST_ARRIVALS))
            self.groups[-1] = _Group(None, np.append(-1.0, latest))

    def _ready(self, owners: IntArray, places: FloatArray | IntArray) -> FloatArray:
        """Return seconds until a draft up to a token of a request has come; 0 if sent ahead."""
        times, loads = self._times, self._view.loads
        starts, each, at_hand = [], [], []
        for candidate in self._candidates:
            drafter = candidate.drafter or ""
            batch = max(1, loads.get(drafter, 1))
            first, second = (times.draft_seconds(drafter, batch, n) for n in (1, 2))
            starts.append(2 * first - second)
            each.append(second - first)
            at_hand.append(candidate.num_at_hand)
        ready = np.array(starts)[owners] + np.array(each)[owners] * places
        return np.where(places <= np.array(at_hand)[owners], 0.0, ready)

    # --- what a plan is worth -------------------------------------------------------------------

    def rates(self, caps: FloatArray, varied: int) -> tuple[FloatArray, IntArray]:
        """Return V / T [plans, tokens] of prefixes of the tokens under caps [plans, groups].

        With the tokens' places in the order of value: those under no cap are left out. varied: the
        group whose caps differ between the plans."""
        times, view = self._times, self._view
        if self._looked_up.size:
            caps = np.concatenate([caps, np.full((len(caps), 1), np.inf)], axis=1)
        tokens = np.arange(len(self.levels))
        if len(self.groups) > 1:
            tokens = np.flatnonzero(self.levels <= caps.max(axis=0)[self.group_of])
        levels, group_of = self.levels[tokens], self.group_of[tokens]
        bought = levels <= caps[:, group_of]
        is_first = self._places[tokens] == 1
        inside = beside = np.zeros((1, len(tokens)))
        for index, group in enumerate(self.groups):
            own = (bought if index == varied else bought[:1]) & (group_of == index)
            longest = np.maximum.accumulate(np.where(own, levels, 0.0), axis=1)
            if group.drafter is None:
                beside = longest
            else:
                steps = self._steps_of(group.drafter)
                inside = inside + longest * steps[(own & is_first).cumsum(axis=1)]
                if start := times.start_of(group.drafter):
                    inside = inside + start * (longest > 0)
        num_rows = view.room.num_rows
        rows = num_rows + (bought * self._rows[tokens]).cumsum(axis=1)
        if times.draft_overhead:
            inside = inside + np.where(inside > 0, times.draft_overhead, 0.0)
        if self._reads is not None:
            inside = inside + (bought * self._reads[tokens]).cumsum(axis=1)
        verify = self._target_s + times.added(num_rows, rows)
        seconds = round_seconds(verify + inside, beside=beside, host=self._host)
        values = self.plain_value + (bought * self._gains[tokens]).cumsum(axis=1)
        if len(tokens) > view.room.budget:
            bought &= bought.cumsum(axis=1) <= view.room.budget
        return np.where(bought, values / seconds, 0.0), tokens

    def _steps_of(self, drafter: str) -> FloatArray:
        """Return the seconds of a drafter's step by its batch."""
        known = self._steps.get(drafter)
        if known is None:
            batches = np.arange(len(self._candidates) + 1)
            known = self._steps[drafter] = self._times.curve_of(drafter).at(batches)
        return known

    def lengths(self, caps: FloatArray, last: int) -> IntArray:
        """Return tokens [2, requests] of the prefix up to a token under caps [groups].

        Looked-up ones, then the drafters'."""
        bought = self.levels[: last + 1] <= np.append(caps, np.inf)[self.group_of[: last + 1]]
        owners, free = self.owners[: last + 1], self.is_looked_up[: last + 1]
        parts = (owners[bought & free], owners[bought & ~free])
        return np.array([np.bincount(part, minlength=len(self._candidates)) for part in parts])

    def is_doubtful(self, rate: float) -> bool:
        """Return whether a step without drafts, at best, might be worth more a second."""
        if all(g.drafter is None for g in self.groups):
            return False
        least = self._times.target.least(self._view.room.num_sampled)
        return rate < (1 + _DOUBTFUL_GAIN) * self.plain_value / max(least, _LEAST_OVERHEAD_S)

    @property
    def trials(self) -> list[float]:
        """Steps without drafts that a trial of each candidate's drafts would take."""
        drafters = {c.drafter for c in self._candidates if c.drafter is not None}
        drafting = _TRIAL_TOKENS * min([self._times.curve_of(d)(1) for d in drafters], default=0.0)
        return [(seconds + drafting) / self.plain_s for seconds in self._unread]

    def grants(self, lengths: IntArray, rate: float) -> list[Grant]:
        """Return grants; drafters that can end their drafts early get the price of a position.

        At π = `rate` the least survival that pays is π times the seconds of a position over the
        value of its token."""
        self._rate, self._num_rows = rate, self._view.room.num_rows + int(lengths.sum())
        stopping = {n for n, d in self._view.drafters.items() if d.ends_early}
        token_s = self._token_seconds() if stopping else {}
        grants = []
        for i, (num_looked_up, num_drafted) in enumerate(lengths.T.tolist()):
            price, drafter = 0.0, self._candidates[i].drafter
            if num_drafted and drafter in stopping:
                worth = float(self._worth[i])
                reached = float(self._reached[i]) if num_looked_up else 1.0
                price = min(1.0, rate * token_s[drafter] / (worth * reached))
            grants.append(Grant(num_drafted, price, num_looked_up))
        return grants

    def _token_seconds(self) -> dict[str, float]:
        """Return the seconds that one more draft token adds to the step, by drafter."""
        times, num, rows = self._times, len(self._candidates), self._num_rows
        row = float(times.added(rows, np.array([rows + num]))[0]) / num
        names = {c.drafter for c in self._candidates if c.drafter is not None}
        return {n: float(max(0.0, row + times.curve_of(n)(num) / num)) for n in names}

    @property
    def gauges(self) -> Gauges:
        """Gauges of the plan that was granted. token_value: by request id."""
        values = zip(self._candidates, self._worth.tolist(), strict=True)
        owned = [(c.state.request, value) for c, value in values]
        tenants = {r.tenant for r, _ in owned}
        return {
            "price_of_second": float(self._rate),
            "plain_step_seconds": float(self.plain_s),
            "draft_token_seconds": self._token_seconds(),
            "token_value": {r.id: v for r, v in owned},
            "tenant_token_value": {t: fmean(v for r, v in owned if r.tenant == t) for t in tenants},
        }

    def _best_plan(self) -> tuple[IntArray, float]:
        """Return the best tokens [2, requests], and their value a second.

        None where too little is gained."""
        groups, plain = self.groups, self.plain_value / self.plain_s
        none = np.zeros(len(groups))
        best, best_rate = (none, -1), (1 + _LEAST_GAIN) * plain
        # Of several groups, each in turn, twice; first from no caps, then from no drafts.
        starts, sweeps = ((-1,), 1) if len(groups) <= 1 else ((-1, 0), 2)
        # By group and the plans that are compared: a second search would find the same.
        solved: dict[tuple[int, bytes], FloatArray] = {}
        for start in starts if len(self.owners) else ():
            caps = np.array([g.caps[start] for g in groups])
            for index in [*range(len(groups))] * sweeps if groups else [-1]:
                several = caps[None, :]
                if groups:
                    several = caps + np.zeros((len(groups[index].caps), 1))
                    several[:, index] = groups[index].caps
                key = (index, several.tobytes())
                if key not in solved:
                    rates, tokens = self.rates(several, index)
                    plan, last = divmod(int(rates.argmax()), len(tokens)) if len(tokens) else (0, 0)
                    solved[key] = several[plan]
                    if len(tokens) and rates[plan, last] > best_rate:
                        best = several[plan], int(tokens[last])
                        best_rate = float(rates[plan, last])
                caps = solved[key]
        return self.lengths(*best), plain if best[1] < 0 else best_rate


POLICY = Priced
