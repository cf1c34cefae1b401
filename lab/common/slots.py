"""Slots of one length: selection policies against requests that never end, as Spin's section IV-B
has them.

The policies are the scheduler's own objects; requests and verdicts are made up here. In a slot
every request is drafted for by whom the policy says, or by nobody, and verified. Each drafter has a
device of its own: in what a slot leaves it, it reads ahead where the policy asks for that.

In `play` each request has a clock of its own, whose round takes as long as its own choice does, as
the paper's goodput presumes. In `tokens_per_s` all wait for all.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lab.common.statistics import FloatArray
from penstock.core.kv import BlockPool, SequenceKV
from penstock.core.learn import Estimators, seed_estimators
from penstock.core.policies.base import SelectionPolicy, View
from penstock.core.state import Drafter, Outcome, RequestState
from penstock.core.types import NO_DRAFTER, TARGET, Request, Status, Verdict
from penstock.fluid.step_profile import StepProfile

_ENDLESS = 10**9


@dataclass(frozen=True)
class Regret:
    """What was lost by the end of some slots, in slots of each request's best drafter, means over
    the requests: [horizons] each.

    goodput: by drafters that are not the best, or by none where that is worse. reading: by those
    who read the text after a switch. if_constant: by reading, if it always took as long as the text
    at the beginning does. switches: their number. best: share of the slots since the horizon before
    in which the best one drafted.
    """

    goodput: FloatArray
    reading: FloatArray
    if_constant: FloatArray
    switches: FloatArray
    best: FloatArray


class Slots:
    """rates: acceptance of a draft token, [requests, drafters of `profile`]. prompts: tokens of
    each request, [requests]. length: draft tokens in a slot. goodput: tokens per second of each
    request, by drafter and by none (None)."""

    def __init__(
        self,
        policy: SelectionPolicy,
        profile: StepProfile,
        rates: FloatArray,
        prompts: npt.NDArray[np.int64],
        length: int,
        seed: int,
    ) -> None:
        self._policy, self._length, self._rates = policy, length, rates
        self._names = [d.name for d in profile.drafters]
        self._drafters = {n: Drafter(n, BlockPool(1, 1), has_lane=True) for n in self._names}
        self._learn = Estimators(profile)
        seed_estimators(self._learn, profile, self._drafters.values())
        self._reading = {d.name: d.per_catch_up_token for d in profile.drafters}
        self._states = [_endless(i, n) for i, n in enumerate(prompts.tolist())]
        num = len(self._states)
        self._drafting = np.array([length * d.seconds(num, 1) for d in profile.drafters])
        self._verifying = profile.linear(num * (1 + length))
        self._rng = np.random.default_rng(seed)
        tokens = (rates[..., None] ** np.arange(length + 1)).sum(axis=-1)
        drafted = tokens / (self._verifying + self._drafting)
        alone = 1 / profile.linear(num)
        self.goodput: list[dict[str | None, float]] = [
            {None: alone, **dict(zip(self._names, own, strict=True))} for own in drafted.tolist()
        ]
        self._best = drafted.max(axis=1).tolist()
        slots = self._verifying + self._drafting
        self._slot_s = slots[drafted.argmax(axis=1)]
        self._round_s: dict[str | None, float] = {
            None: 1 / alone,
            **dict(zip(self._names, slots.tolist(), strict=True)),
        }
        self._lost: defaultdict[str, float] = defaultdict(float)

    def play(self, horizons: Sequence[int], is_timed: bool = False) -> Regret:
        """horizons: numbers of slots, rising. is_timed: the policy goes by the clock, so it learns
        of each request at its own time."""
        now = np.zeros(len(self._states))
        found: dict[str, list[float]] = {name: [] for name in Regret.__dataclass_fields__}
        before, best = 0, 0.0
        for slot in range(1, horizons[-1] + 1):
            outcomes = self._slot()
            now += [self._round_s[s.drafter] for s in self._states]
            if is_timed:
                for outcome, at in zip(outcomes, now.tolist(), strict=True):
                    self._policy.on_step([outcome], self._view(at))
            else:
                self._policy.on_step(outcomes, self._view())
            if slot not in horizons:
                continue
            for name, lost in found.items():
                lost.append(self._lost[name] / len(self._states))
            drafted, best = found["best"][-1] - best, found["best"][-1]
            found["best"][-1] = drafted / (slot - before)
            before = slot
        return Regret(**{name: np.array(lost) for name, lost in found.items()})

    def tokens_per_s(self, num_slots: int, seconds: Callable[[Mapping[str, int]], float]) -> float:
        """Of so many slots, with reading after switches. seconds: of a slot, by the number of
        requests of each drafter and of none."""
        begun, spent = self._num_tokens, 0.0
        for _ in range(num_slots):
            read = self._lost["reading_s"]
            outcomes = self._slot()
            loads = Counter(s.drafter or NO_DRAFTER for s in self._states)
            spent += seconds(loads) + self._lost["reading_s"] - read
            self._policy.on_step(outcomes, self._view(spent))
        return (self._num_tokens - begun) / spent

    @property
    def _num_tokens(self) -> int:
        return sum(s.num_known_tokens for s in self._states)

    def _slot(self) -> list[Outcome]:
        before = {s.request.id: s.drafter for s in self._states}
        chosen = self._policy.select(self._states, self._view())
        for i, state in enumerate(self._states):
            name = state.drafter = chosen[state.request.id]
            worth = min(1.0, self.goodput[i][name] / self._best[i])
            self._lost["goodput"] += 1 - worth
            self._lost["best"] += worth == 1
            if name is not None and before[state.request.id] not in (name, None):
                self._charge(i, state, name)
        self._read_ahead()
        outcomes = [Outcome(s, self._verdict(i, s)) for i, s in enumerate(self._states)]
        for state, verdict in outcomes:
            state.round += 1
            state.append(verdict.token_ids)
            if state.drafter is not None:
                state.kv_of(state.drafter).num_computed_tokens = state.num_known_tokens - 1
        return outcomes

    def _view(self, now: float = 0.0) -> View:
        loads = Counter(s.drafter for s in self._states if s.drafter is not None)
        return View(self._drafters, self._learn, now, loads, beside=frozenset(self._names))

    def _charge(self, i: int, state: RequestState, name: str) -> None:
        """For reading what a drafter lacks of the text."""
        second = self._reading[name] / self._slot_s[i]
        unread = state.num_known_tokens - state.kv_of(name).num_computed_tokens
        self._lost["switches"] += 1
        self._lost["reading"] += unread * second
        self._lost["reading_s"] += unread * self._reading[name]
        self._lost["if_constant"] += state.request.prompt_len * second
        state.kv_of(name).num_computed_tokens = state.num_known_tokens

    def _read_ahead(self) -> None:
        """As far as a drafter's idle time goes: while the target verifies, and while slower ones
        draft."""
        drafting = {self._names.index(s.drafter) for s in self._states if s.drafter is not None}
        slot_s = self._verifying + max((self._drafting[j] for j in drafting), default=0.0)
        idle: Mapping[str, float] = {
            n: slot_s - (self._drafting[j] if j in drafting else 0.0)
            for j, n in enumerate(self._names)
        }
        left = dict(idle)
        for proposal in self._policy.replays([s for s in self._states if s.round], self._view()):
            kv, name = proposal.state.kv_of(proposal.drafter), proposal.drafter
            unread = proposal.state.num_known_tokens - kv.num_computed_tokens
            read = min(unread, int(left[name] / self._reading[name]))
            kv.num_computed_tokens += read
            left[name] -= read * self._reading[name]

    def _verdict(self, i: int, state: RequestState) -> Verdict:
        if state.drafter is None:
            return Verdict(state.request.id, state.epoch, state.round, token_ids=(0,))
        rate = self._rates[i, self._names.index(state.drafter)]
        wrong = self._rng.random(self._length) >= rate
        accepted = int(wrong.argmax()) if wrong.any() else self._length
        return Verdict(
            state.request.id,
            state.epoch,
            state.round,
            token_ids=(0,) * (accepted + 1),
            drafter=state.drafter,
            num_proposed=self._length,
            num_accepted=accepted,
            num_decided=min(accepted + 1, self._length),
        )


def _endless(number: int, prompt_len: int) -> RequestState:
    state = RequestState(Request(str(number), prompt_len, _ENDLESS), number)
    state.status = Status.RUNNING
    state.kv[TARGET] = SequenceKV(prompt_len)
    return state
