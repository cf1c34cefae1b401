"""Rounds without time: allocation policies against clients that draft, round after round.

The policies are the scheduler's own objects; only requests and verdicts are made up here. A round
is GoodSpeed's Algorithm 1: every client drafts what it was granted, all drafts are verified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.core.learn import Estimators
from penstock.core.policies.base import AllocationPolicy, DraftCandidate, Room, View
from penstock.core.state import Outcome, RequestState
from penstock.core.types import Request, Tenant, Verdict

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


class Client(Protocol):
    """A draft server with its user."""

    def num_accepted(self, num_draft_tokens: int) -> int:
        """How many of its draft tokens the target keeps in this round; the next round is another
        one."""
        ...

    def evidence(self, num_draft_tokens: int, num_accepted: int) -> float:
        """Σ min(1, target/draft) of the round that has ended, over all positions."""
        ...


class GeometricClients:
    """Clients whose draft tokens are accepted one by one with probability `rates[round, client]`.

    Every (round, client, position) has a random number of its own, so that all policies meet the
    same luck. overlaps: min(1, target/draft) of a draft token comes from a Beta distribution with
    mean `rates` and four tokens' worth of concentration, and evidence over all positions is its
    sum, as in `ratio` mode; otherwise it is 0 or 1, as in `coupled` mode.
    """

    def __init__(
        self, rates: FloatArray, seed: int, most: int = 32, overlaps: bool = False
    ) -> None:
        self.rates = rates
        rng = np.random.default_rng(seed)
        self._draws = rng.random((*rates.shape, most), dtype=np.float32)
        self._overlaps: FloatArray | None = None
        if overlaps:
            shape = np.broadcast_to(rates[..., None], self._draws.shape)
            self._overlaps = rng.beta(4 * shape, 4 * (1 - shape))

    def clients(self) -> list[Client]:
        return [_GeometricClient(self, i) for i in range(self.rates.shape[1])]

    def accepts(self, round_index: int, client: int) -> list[bool]:
        limit = self.rates[round_index, client]
        if self._overlaps is not None:
            limit = self._overlaps[round_index, client]
        kept: list[bool] = (self._draws[round_index, client] < limit).tolist()
        return kept

    def over_all(self, round_index: int, client: int, num_tokens: int) -> float:
        """Σ min(1, target/draft) of a draft."""
        if self._overlaps is None:
            return float(sum(self.accepts(round_index, client)[:num_tokens]))
        return float(self._overlaps[round_index, client, :num_tokens].sum())


class _GeometricClient:
    def __init__(self, world: GeometricClients, client: int) -> None:
        self._world = world
        self._client = client
        self._round = 0

    def num_accepted(self, num_draft_tokens: int) -> int:
        kept = self._world.accepts(self._round, self._client)[:num_draft_tokens]
        self._round += 1
        return kept.index(False) if False in kept else len(kept)

    def evidence(self, num_draft_tokens: int, num_accepted: int) -> float:
        return self._world.over_all(self._round - 1, self._client, num_draft_tokens)


@dataclass(frozen=True)
class BarrierTimes:
    """What a round takes that waits for every draft: T = max(S_i t_i + rtt_i) + verify(rows), in
    seconds; round_trip and per_token have shape [clients]."""

    round_trip: FloatArray
    per_token: FloatArray
    verify_start: float
    verify_per_row: float

    def drafts(self, lengths: IntArray) -> FloatArray:
        """Seconds until each draft is here; 0 for who has none. lengths: [..., clients]."""
        return np.where(lengths > 0, self.round_trip + self.per_token * lengths, 0.0)

    def verify(self, num_rows: Any) -> Any:
        """Seconds of a verification, or of each, [rounds]."""
        return self.verify_start + self.verify_per_row * num_rows


@dataclass(frozen=True)
class PlayedRounds:
    """Draft lengths and realised goodput (accepted + 1) of rounds, both [rounds, clients]."""

    lengths: IntArray
    tokens: IntArray


def play(
    policy: AllocationPolicy,
    clients: Sequence[Client],
    budget: int,
    rounds: int,
    weights: Mapping[str, float] | None = None,
    watch: Callable[[], None] = lambda: None,
) -> PlayedRounds:
    """Let a policy allocate `budget` draft tokens a round among clients, each a tenant (c0, c1, …)
    with one request that never ends, and drafting beside the target. `watch` is called after every
    round, of which no times are measured."""
    names = [f"c{i}" for i in range(len(clients))]
    tenants = {name: Tenant(name, (weights or {}).get(name, 1.0)) for name in names}
    states = [
        RequestState(Request(name, 8, 1 << 30, tenant=name), i) for i, name in enumerate(names)
    ]
    candidates = [DraftCandidate(s, n, budget) for s, n in zip(states, names, strict=True)]
    estimators = Estimators()
    lengths = np.zeros((rounds, len(clients)), dtype=np.int64)
    tokens = np.zeros_like(lengths)
    for t in range(rounds):
        room = Room(budget, len(clients), len(clients))
        view = View(
            {},
            estimators,
            float(t),
            loads=dict.fromkeys(names, 1),
            tenants=tenants,
            beside=frozenset(names),
            room=room,
        )
        grants = policy.allocate(candidates, view)
        outcomes = []
        for i, (state, grant) in enumerate(zip(states, grants, strict=True)):
            length = grant.num_draft_tokens
            accepted = clients[i].num_accepted(length)
            lengths[t, i], tokens[t, i] = length, accepted + 1
            over_all = clients[i].evidence(length, accepted)
            verdict = _verdict(state, t, length, accepted, over_all)
            estimators.acceptance.on_verdict(verdict)
            outcomes.append(Outcome(state, verdict))
        policy.on_step(outcomes, t + 1.0)
        for state in states:
            state.next_round()
        watch()
    return PlayedRounds(lengths, tokens)


def _verdict(state: RequestState, t: int, length: int, accepted: int, over_all: float) -> Verdict:
    return Verdict(
        state.request.id,
        0,
        t,
        token_ids=(0,) * (accepted + 1),
        drafter=state.request.tenant if length else None,
        num_proposed=length,
        num_accepted=accepted,
        num_decided=min(length, accepted + 1),
        evidence=float(accepted),
        evidence_all=over_all,
    )


class RecordedClient:
    """Plays measured acceptance back: one recorded request after another, in a random order."""

    def __init__(self, rows: Sequence[Sequence[int]], seed: Sequence[int]) -> None:
        self._rows = rows
        self._order = np.random.default_rng(seed).permutation(len(rows))
        self._next_row = 0
        self._position = 0
        self._right_behind = 0

    def most_accepted(self) -> int:
        """How many draft tokens the target would keep in this round, however many there were."""
        return self._row()[self._position] - 1

    def num_accepted(self, num_draft_tokens: int) -> int:
        accepted = min(self.most_accepted(), num_draft_tokens)
        behind = range(self._position + accepted + 1, self._position + num_draft_tokens)
        row = self._row()
        self._right_behind = sum(row[p % len(row)] > 1 for p in behind)
        self._position += accepted + 1
        if self._position >= len(self._row()):
            self._next_row += 1
            self._position = 0
        return accepted

    def evidence(self, num_draft_tokens: int, num_accepted: int) -> float:
        """Behind a rejection a token counts as right where a draft that begins there would be: what
        a wrong prefix makes of it was not recorded."""
        return float(num_accepted + self._right_behind)

    def _row(self) -> Sequence[int]:
        return self._rows[self._order[self._next_row % len(self._order)]]


def jumping_rates(rounds: int, clients: int, dwell: int, seed: int) -> FloatArray:
    """Acceptance that jumps by 0.3 within [0.3, 0.9] every `dwell` rounds, each client at times of
    its own; shape [rounds, clients]."""
    rng = np.random.default_rng((seed, dwell))
    start = rng.uniform(0.3, 0.9, clients)
    up = np.where(start < 0.6, 0.3, -0.3)
    phase = rng.integers(0, dwell, clients)
    jumps = (np.arange(rounds)[:, None] + phase) // dwell
    return np.asarray(start + up * (jumps % 2))
