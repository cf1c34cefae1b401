"""GoodSpeed's gradient scheduling exactly (eqs. 3 to 5, Algorithm 1); a client is a tenant.

A step in which a request could not draft is no round. A round without a grant changes X, but not α̂:
eq. 3 would divide by S = 0. So that the client is tried again, eq. 5 then takes α̂ for higher
(`_Client.hoped`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from penstock.core.policies.allocation.parts.gradient import Fairness, draft_budget, tenant_weight
from penstock.core.policies.base import AllocationPolicy, DraftCandidate, Gauges, View
from penstock.core.policies.declared import Gauge, LimitOptions
from penstock.core.policies.options import MaxDraftTokens, NonNegativeInt, Probability, Range
from penstock.core.state import Grant, Outcome
from penstock.core.types import Verdict
from penstock.fluid.fair import geometric_lengths

_MAX_ACCEPTANCE = 0.99  # Assumption 2: α̂ stays below 1
Decay = Literal[0] | Annotated[float, Range(above=0.5, at_most=1)]  # 0: a constant step size


class GoodSpeed(AllocationPolicy):
    """Maximises the gradient of the utility at smoothed goodput, for smoothed acceptance."""

    name: ClassVar[str] = "goodspeed"
    limits = LimitOptions(max_draft_tokens="k_max")
    metrics = (
        Gauge("acceptance_estimate", "GoodSpeed: smoothed acceptance rate (eq. 3).", "tenant"),
        Gauge("goodput_estimate", "GoodSpeed: smoothed tokens of a round (eq. 4).", "tenant"),
    )

    @dataclass(frozen=True, slots=True)
    class Options:
        beta: Annotated[float, Range(above=0, at_most=1)] = 0.5  # smoothing of goodput (eq. 4)
        eta: Annotated[float, Range(above=0, at_most=1)] = 0.1  # smoothing of acceptance (eq. 3)
        beta_decay: Decay = 0.0  # exponent by which beta falls with rounds
        eta_decay: Decay = 0.0  # likewise; Assumption 3: η/β → 0
        # Positions over which eq. 3 averages min(1, target / draft): `all`, as printed, or only the
        # `decided` ones, up to the first rejection.
        evidence: Literal["all", "decided"] = "all"
        initial_acceptance: Probability = 0.5  # α̂(0), which the paper leaves open
        initial_goodput: Annotated[float, Range(at_least=1e-6, at_most=1e6)] = 1.0  # X(0), likewise
        fairness: Fairness = 1.0  # exponent a of the utility
        total: NonNegativeInt | None = None  # draft tokens a round (C); None: by step times
        k_max: MaxDraftTokens = 16  # most draft tokens for one request

        def __post_init__(self) -> None:
            if self.beta_decay and self.eta_decay <= self.beta_decay:
                raise ValueError(
                    f"eta_decay must exceed beta_decay (Assumption 3: η/β → 0), not "
                    f"{self.eta_decay:g} against {self.beta_decay:g}"
                )

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._clients: dict[str, _Client] = {}
        self._left_out: dict[str, tuple[int, int]] = {}

    def allocate(self, candidates: Sequence[DraftCandidate], view: View) -> list[Grant]:
        options = self.options
        clients = [self._client(c.state.request.tenant) for c in candidates]
        weights = [
            tenant_weight(view.tenants, c.state.request.tenant) / client.goodput**options.fairness
            for c, client in zip(candidates, clients, strict=True)
        ]
        limits = [min(c.longest, options.k_max) for c in candidates]
        lengths, _ = geometric_lengths(
            weights,
            [client.hoped for client in clients],
            draft_budget(options.total, view),
            limits,
        )
        grants = [c.grant(n) for c, n in zip(candidates, lengths.tolist(), strict=True)]
        self._left_out = {
            c.state.request.id: (c.state.epoch, c.state.round)
            for c, limit, grant in zip(candidates, limits, grants, strict=True)
            if limit and not grant.num_tokens
        }
        return grants

    def on_step(self, outcomes: Sequence[Outcome], now: float) -> None:
        rounds: dict[str, list[Verdict]] = {}
        for outcome in outcomes:
            if self._is_round(outcome):
                rounds.setdefault(outcome.state.request.tenant, []).append(outcome.verdict)
        for name, verdicts in rounds.items():
            self._client(name).on_round(verdicts)

    def _is_round(self, outcome: Outcome) -> bool:
        """Return whether the request has drafted, or would have with a grant."""
        state, verdict = outcome
        left_out = self._left_out.get(state.request.id)
        return verdict.num_proposed > 0 or left_out == (verdict.epoch, verdict.round)

    @property
    def gauges(self) -> Gauges:
        return {
            "acceptance_estimate": {n: c.acceptance for n, c in self._clients.items()},
            "goodput_estimate": {n: c.goodput for n, c in self._clients.items()},
        }

    def goodput(self, tenant: str) -> float:
        """Return X of eq. 4, the estimate that figure 2 compares with realised goodput."""
        return self._client(tenant).goodput

    def acceptance(self, tenant: str) -> float:
        """Return α̂ of eq. 3."""
        return self._client(tenant).acceptance

    def _client(self, tenant: str) -> _Client:
        client = self._clients.get(tenant)
        if client is None:
            client = self._clients[tenant] = _Client(self.options)
        return client


class _Client:
    """α̂, X and number of rounds of a tenant."""

    def __init__(self, options: GoodSpeed.Options) -> None:
        self._options = options
        self.acceptance = options.initial_acceptance
        self.goodput = options.initial_goodput
        self._rounds = 0
        self._idle = 0  # rounds without a grant since the last draft

    @property
    def hoped(self) -> float:
        """Return α̂, or what it would be if the idle rounds' drafts had been accepted in full."""
        doubt = (1 - self._options.eta) ** self._idle
        return min(_MAX_ACCEPTANCE, 1 - (1 - self.acceptance) * doubt)

    def on_round(self, verdicts: Sequence[Verdict]) -> None:
        options = self._options
        self._rounds += 1
        self._idle += 1
        if num_proposed := sum(v.num_proposed for v in verdicts):
            self._idle = 0
            observed = sum(v.evidence_all for v in verdicts) / num_proposed
            if options.evidence == "decided":
                num_decided = max(1, sum(v.num_decided for v in verdicts))
                observed = sum(v.evidence for v in verdicts) / num_decided
            eta = options.eta * self._rounds**-options.eta_decay
            self.acceptance += eta * (observed - self.acceptance)
        beta = options.beta * self._rounds**-options.beta_decay
        self.goodput += beta * (sum(len(v.token_ids) for v in verdicts) - self.goodput)


POLICY = GoodSpeed
