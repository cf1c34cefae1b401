"""Draft lengths for a target that verifies whatever is ready: tokens a second, fairly.

A target that starts a step every P seconds, taking T for it, serves request i every k P seconds: k
is the number of periods until its draft of S tokens is here, d_i(S) seconds after a step has ended,
so k = ceil((T + d_i(S)) / P), and 1 without a draft. Its rate is then μ_i(S) / (k P), and the plan
is the one with the largest Σ U_i(rate). P = T is a target that never waits, P = T + max d_i the
barrier, and S = 0 for all is decoding without drafters; the plan is sought among all of them. For
each P every request takes the length that is worth most at a common price of a position, which
keeps the budget.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.core.policies.allocation import AllocationPolicy, Grant
from penstock.core.policies.allocation.parts.gradient import (
    Fairness,
    Streams,
    draft_budget,
    tenant_weight,
)
from penstock.core.policies.options import MaxDraftTokens, NonNegativeInt, PositiveInt, Probability
from penstock.core.state import Outcome, RequestState
from penstock.core.view import DraftCandidate, View
from penstock.fluid.step_profile import StepWork

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

_NUM_PERIODS = 24
_USUAL_TOKENS = 8
_PRICE_STEPS = 16
_LEAST_SECONDS = 1e-4
_PROBE_TOKENS = 3


class Renewal(AllocationPolicy):
    """Lengths and the target's rhythm together."""

    name: ClassVar[str] = "renewal"
    weighs_time: ClassVar[bool] = True

    @dataclass(frozen=True, slots=True)
    class Options:
        """fairness: exponent a of the utility, U' = weight · x^(−a): 0 total, 1 proportional.
        total: draft tokens that are out, or in a step, at most (C). None: by the profile.
        k_max: most draft tokens for one request in a round.
        probe_every: rounds after which a request that does not draft tries it again; fewer at
            first, each time twice as many.
        prior_mean: acceptance expected before anything is known, worth one token."""

        fairness: Fairness = 1.0
        total: NonNegativeInt | None = None
        k_max: MaxDraftTokens = 16
        probe_every: PositiveInt = 256
        prior_mean: Probability = 0.5

    def __init__(self, options: Options) -> None:
        self.options = options
        self._streams = Streams(options.prior_mean)
        self._plan: dict[str, int] = {}
        self._tried: dict[str, tuple[int, int]] = {}
        """By request: the round of its last draft, and how many it has made."""

    def reserve(self, state: RequestState) -> int:
        return self.options.k_max

    def observe(self, outcomes: Sequence[Outcome], now: float) -> None:
        self._streams.observe(outcomes)
        self._plan = {}
        for state, verdict in outcomes:
            if verdict.num_proposed:
                _, times = self._tried.get(state.request.id, (0, 0))
                self._tried[state.request.id] = verdict.round, times + 1

    def allocate(self, candidates: Sequence[DraftCandidate], view: View) -> list[Grant]:
        """The plan is made once a target step; whoever comes new makes it be made anew."""
        if not self.options.k_max:
            return [Grant(0) for _ in candidates]
        if any(c.state.request.id not in self._plan for c in candidates):
            lengths = self._best_plan(candidates, view)
            ids = (c.state.request.id for c in candidates)
            self._plan = dict(zip(ids, lengths, strict=True))
        left = draft_budget(self.options.total, view)
        grants = []
        for candidate in candidates:
            num = min(self._plan[candidate.state.request.id], candidate.limit, left)
            left -= num
            grants.append(Grant(num))
        return grants

    def _best_plan(self, candidates: Sequence[DraftCandidate], view: View) -> list[int]:
        budget = draft_budget(self.options.total, view)
        num = len(candidates)
        bare = view.learn.times.step_seconds(StepWork(num_decodes=num))
        step = max(bare, _LEAST_SECONDS)
        tokens, delays = self._tokens(candidates), self._delays(candidates, view)
        weights = self._weights(candidates, view)
        best, best_value = np.zeros(num, dtype=np.int64), -np.inf
        # A period is worth trying where it lets one more draft in.
        waits = np.quantile(delays[:, 1 : _USUAL_TOKENS + 1], np.linspace(0, 1, _NUM_PERIODS))
        for period in step + np.append(waits, 0.0):
            cycles = np.ceil((step + delays) / period - 1e-9).clip(min=1)
            utility = self._utility(tokens / (cycles * period), weights)
            lengths = _within_budget(utility, budget)
            value = float(utility[np.arange(num), lengths].sum())
            if value > best_value:
                best, best_value = lengths, value
        return self._with_probes(candidates, best, budget)

    def _tokens(self, candidates: Sequence[DraftCandidate]) -> FloatArray:
        """[candidates, k_max + 1]: expected tokens of a round; 0 beyond a candidate's limit, so
        that nobody wants it."""
        rates = np.array(self._streams.rates(candidates))[:, None]
        lengths = np.arange(self.options.k_max + 1)[None, :]
        tokens = np.asarray((1 - rates ** (lengths + 1)) / (1 - rates), dtype=np.float64)
        tokens[lengths > np.array([c.limit for c in candidates])[:, None]] = 1e-9
        return tokens

    def _delays(self, candidates: Sequence[DraftCandidate], view: View) -> FloatArray:
        """[candidates, k_max + 1]: seconds from the end of a step until the draft is here."""
        links = view.learn.links
        trips = np.array([links.round_trip(c.drafter) for c in candidates])
        each = np.array([links.per_token(c.drafter) for c in candidates])
        spread = np.array([links.spread(c.drafter) for c in candidates])
        lengths = np.arange(self.options.k_max + 1)
        delays: FloatArray = (trips + spread)[:, None] + each[:, None] * lengths
        at_hand = np.array([c.num_at_hand for c in candidates])
        delays[lengths <= at_hand[:, None]] = 0.0
        return delays

    def _weights(self, candidates: Sequence[DraftCandidate], view: View) -> FloatArray:
        """A tenant's weight is shared by its requests."""
        shares = Counter(c.state.request.tenant for c in candidates)
        tenants = [c.state.request.tenant for c in candidates]
        return np.array([tenant_weight(view.tenants, t) / shares[t] for t in tenants])

    def _utility(self, rates: FloatArray, weights: FloatArray) -> FloatArray:
        a = self.options.fairness
        utility: FloatArray = np.log(rates) if a == 1 else rates ** (1 - a) / (1 - a)
        utility *= weights[:, None]
        return utility

    def _with_probes(
        self, candidates: Sequence[DraftCandidate], lengths: IntArray, budget: int
    ) -> list[int]:
        """What drafts nothing shows nothing: now and then it must be tried."""
        probed = [int(n) for n in lengths]
        left = budget - sum(probed)
        ids = [c.state.request.id for c in candidates]
        self._tried = {i: self._tried[i] for i in ids if i in self._tried}
        for index, (state, _, limit, _) in enumerate(candidates):
            since, times = self._tried.get(state.request.id, (0, 0))
            patience = min(self.options.probe_every, 2**times)
            if not probed[index] and state.round - since >= patience:
                probed[index] = min(_PROBE_TOKENS, limit, max(0, left))
                left -= probed[index]
        return probed


def _within_budget(utility: FloatArray, budget: int) -> IntArray:
    """The length with the largest utility in each row, at the lowest price of a position at which
    all lengths together are within the budget; what that leaves goes to the first rows that would
    take more at a slightly lower price."""
    positions = np.arange(utility.shape[1])
    wanted: IntArray = np.argmax(utility, axis=1)
    if wanted.sum() <= budget:
        return wanted
    low, high = 0.0, float((utility.max(axis=1) - utility[:, 0]).max())
    lengths = np.zeros_like(wanted)
    for _ in range(_PRICE_STEPS):
        price = (low + high) / 2
        found = np.argmax(utility - price * positions, axis=1)
        if found.sum() <= budget:
            high, lengths = price, found
        else:
            low, wanted = price, found
    left = budget - int(lengths.sum())
    for row in np.flatnonzero(wanted > lengths):
        most = min(int(wanted[row]), int(lengths[row]) + left)
        better = int(lengths[row] + np.argmax(utility[row, lengths[row] : most + 1]))
        left -= better - int(lengths[row])
        lengths[row] = better
    return lengths


POLICY = Renewal
