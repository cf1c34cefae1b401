"""Requests, drafters and a clock for selection policies alone: no models, no scheduler."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.core.kv import BlockPool, SequenceKV
from penstock.core.learn import Estimators
from penstock.core.policies.base import SelectionPolicy, View
from penstock.core.state import Drafter, Outcome, RequestState
from penstock.core.types import TARGET, Replayed, Request, SamplingParams, Status, Verdict

Rates = Callable[[int], Mapping[str, float]]
"""Acceptance of a draft token by model, of the request with this number."""


@dataclass(frozen=True)
class Machine:
    """Seconds of everything. drafters: name to a step's, for any batch. beside: they have lanes of
    their own, and the slowest is waited for; else they work inside the step one after the other."""

    drafters: Mapping[str, float]
    verify: float = 10e-3
    per_row: float = 0.05e-3
    per_catch_up_token: float = 0.02e-3
    capacity: int | None = None
    beside: bool = False
    models: Mapping[str, str] = field(default_factory=dict)

    def make_drafters(self) -> dict[str, Drafter]:
        return {
            name: Drafter(
                name,
                BlockPool(4, 16),
                has_lane=self.beside,
                model=self.models.get(name),
                max_num_seqs=self.capacity,
            )
            for name in self.drafters
        }

    def estimators(self) -> Estimators:
        estimators = Estimators()
        for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
            estimators.times.target.add_measurement(rows, self.verify + rows * self.per_row)
        for name, seconds in self.drafters.items():
            for batch in (1, 2, 4, 8, 16, 32):
                estimators.times.curve_of(name).add_measurement(batch, seconds)
            estimators.times.note_catch_up(name, self.per_catch_up_token)
        return estimators


class Rounds:
    """So many live requests in rounds; one that ends makes way for the next."""

    def __init__(
        self,
        policy: SelectionPolicy,
        machine: Machine,
        rates: Rates,
        *,
        live: int = 8,
        prompt_len: int | Callable[[int], int] = 100,
        max_tokens: int = 100,
        draft_len: int = 4,
        seed: int = 0,
        sampling: SamplingParams | None = None,
        tenant: Callable[[int], str] = lambda _: "default",
    ) -> None:
        self.policy = policy
        self.machine = machine
        self.drafters = machine.make_drafters()
        self.estimators = machine.estimators()
        self.states: list[RequestState] = []
        self.now = 0.0
        self.num_tokens = 0
        self.num_switches = 0
        self.num_replayed = 0
        self.switched_len: list[int] = []
        """Context of each switch, in tokens."""
        self.finished: list[RequestState] = []
        self.played: list[dict[str, str | None]] = []
        """By round: each request's drafter."""
        self.rates = rates
        self._live = live
        self._prompt_len = prompt_len if callable(prompt_len) else lambda _: prompt_len
        self.max_tokens = max_tokens
        self._draft_len = draft_len
        self._sampling = sampling or SamplingParams()
        self._tenant = tenant
        self._rng = np.random.default_rng(seed)
        self._num_requests = 0

    @property
    def goodput(self) -> float:
        return self.num_tokens / self.now

    def work(self) -> View:
        loads = Counter(s.drafter for s in self.states if s.drafter is not None)
        beside = frozenset(n for n, d in self.drafters.items() if d.has_lane)
        return View(self.drafters, self.estimators, self.now, loads, beside=beside)

    def run(self, num_rounds: int) -> Rounds:
        for _ in range(num_rounds):
            self.round()
        return self

    def round(self) -> None:
        while len(self.states) < self._live:
            self._arrive()
        before = {s.request.id: s.drafter for s in self.states}
        chosen = self.policy.select(self.states, self.work())
        assert chosen.keys() == before.keys()
        self._check(chosen)
        self.played.append(chosen)
        seconds: Counter[str] = Counter()
        for state in self.states:
            name = state.drafter = chosen[state.request.id]
            if name is None or state.round == 0:
                continue
            if before[state.request.id] not in (name, None):
                self.num_switches += 1
                self.switched_len.append(state.num_known_tokens)
            seconds[name] += self._read(state, name) * self.machine.per_catch_up_token
        rows = self._replay(seconds)
        outcomes = []
        drafting = {s.drafter for s in self.states if s.drafter is not None and s.round}
        for name in drafting:
            seconds[name] += self._draft_len * self.machine.drafters[name]
        for state in self.states:
            outcomes.append(Outcome(state, self._verdict(state)))
            rows += 1 + outcomes[-1].verdict.num_proposed
        waited = seconds.values()
        self.now += max(waited, default=0.0) if self.machine.beside else sum(waited)
        self.now += self.machine.verify + rows * self.machine.per_row
        for outcome in outcomes:
            self._advance(outcome)
        self.policy.on_step(outcomes, self.work())

    def _arrive(self) -> None:
        n = self._num_requests
        prompt_len = self._prompt_len(n)
        request = Request(
            str(n), prompt_len, self.max_tokens, tenant=self._tenant(n), sampling=self._sampling
        )
        state = RequestState(request, n)
        state.status = Status.RUNNING
        state.kv[TARGET] = SequenceKV(prompt_len)
        self.states.append(state)
        self._num_requests += 1

    def _check(self, chosen: Mapping[str, str | None]) -> None:
        for name, load in Counter(chosen.values()).items():
            if name is None:
                continue
            drafter = self.drafters[name]
            assert drafter.is_up, f"{name} is {drafter.status}"
            assert load <= (drafter.max_num_seqs or load), f"{name} has {load} requests"

    def _read(self, state: RequestState, name: str) -> int:
        """Tokens that the drafter had to read."""
        kv = state.kv_of(name)
        unread = state.num_known_tokens - kv.num_computed_tokens
        kv.num_computed_tokens = state.num_known_tokens
        return unread

    def _replay(self, seconds: Counter[str]) -> int:
        """Lanes read in idle time; inside the step it takes time like everything else."""
        decoding = [s for s in self.states if s.round]
        for state, name, evaluate in (
            (w.state, w.drafter, w.evaluate) for w in self.policy.replays(decoding, self.work())
        ):
            drafter = self.drafters[name]
            if name == state.drafter or not drafter.is_up:
                continue
            self.num_replayed += 1
            unread = self._read(state, name)
            if not self.machine.beside:
                seconds[name] += unread * self.machine.per_catch_up_token
            tokens = min(unread, state.num_output_tokens) if evaluate else 0
            if state.request.sampling.verification == "ratio":
                tokens = 0
            matched = int(self._rng.binomial(tokens, self._rate(state, drafter)))
            answer = Replayed(state.request.id, state.epoch, name, tokens, matched)
            self.policy.replayed(state, answer)
        return 0

    def _rate(self, state: RequestState, drafter: Drafter) -> float:
        return self.rates(int(state.request.id))[drafter.model or drafter.name]

    def _verdict(self, state: RequestState) -> Verdict:
        key = (state.request.id, state.epoch, state.round)
        draft_len = min(self._draft_len, state.num_remaining_tokens - 1)
        if state.drafter is None or not state.round or draft_len < 1:
            return Verdict(*key, token_ids=(0,))
        rate = self._rate(state, self.drafters[state.drafter])
        wrong = self._rng.random(draft_len) >= rate
        accepted = int(wrong.argmax()) if wrong.any() else draft_len
        return Verdict(
            *key,
            token_ids=(0,) * (accepted + 1),
            drafter=state.drafter,
            num_proposed=draft_len,
            num_accepted=accepted,
            num_decided=min(accepted + 1, draft_len),
            evidence=float(accepted),
        )

    def _advance(self, outcome: Outcome) -> None:
        state, verdict = outcome
        state.round += 1
        tokens = verdict.token_ids[: state.num_remaining_tokens]
        state.append(tokens)
        self.num_tokens += len(tokens)
        if state.drafter is not None and state.round > 1:
            state.kv_of(state.drafter).num_computed_tokens = state.num_known_tokens - 1
        if not state.num_remaining_tokens:
            state.status = Status.FINISHED
            self.policy.release_request(state.request.id)
            self.states.remove(state)
            self.finished.append(state)


def mixed_rates(models: Sequence[str], seed: int = 0, spread: float = 1.0) -> Rates:
    """Logit-normal acceptance that grows with size, and a specialist here and there."""

    def rates(number: int) -> dict[str, float]:
        rng = np.random.default_rng([seed, number])
        ability = rng.normal(0.0, 0.7 * spread)
        own = rng.normal(0.0, 0.8 * spread, len(models))
        odds = 0.3 + 0.35 * np.arange(len(models)) + ability + own
        return dict(zip(models, (1 / (1 + np.exp(-odds))).tolist(), strict=True))

    return rates
