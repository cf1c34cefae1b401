"""GoodSpeed's gradient scheduling exactly (eqs. 3 to 5, Algorithm 1); a client is a tenant.

The paper leaves open what a round without a draft does to α̂ (eq. 3 divides by 0): see `on_empty`.
A step in which a request could not draft is no round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from penstock.core.learn.streams import Evidence, Smoothed
from penstock.core.policies.allocation.parts.gradient import (
    Fairness,
    draft_budget,
    tenant_weight,
    tokens_by_tenant,
)
from penstock.core.policies.base import AllocationPolicy, DraftCandidate, Gauges, View
from penstock.core.policies.options import MaxDraftTokens, NonNegativeInt, Probability, Range
from penstock.core.state import Grant, Outcome
from penstock.fluid.fair import geometric_lengths

_ON_EMPTY = {"hold": None, "zero": 0.0, "full": 1.0}


Decay = Literal[0] | Annotated[float, Range(above=0.5, at_most=1)]  # 0: a constant step size


class GoodSpeed(AllocationPolicy):
    """Maximises the gradient of the utility at smoothed goodput, for smoothed acceptance."""

    name: ClassVar[str] = "goodspeed"

    @dataclass(frozen=True, slots=True)
    class Options:
        beta: Annotated[float, Range(above=0, at_most=1)] = 0.5  # smoothing of goodput (eq. 4)
        eta: Annotated[float, Range(above=0, at_most=1)] = 0.1  # smoothing of acceptance (eq. 3)
        beta_decay: Decay = 0.0  # exponent by which beta falls with rounds
        eta_decay: Decay = 0.0  # likewise; Assumption 3: η/β → 0
        # Positions over which eq. 3 averages min(1, target / draft): `all`, as printed, or only the
        # `decided` ones, up to the first rejection.
        evidence: Literal["all", "decided"] = "all"
        # Acceptance of a round without a grant in eq. 3: `full`, so that α̂ rises until the client
        # is tried again, `zero`, or `hold` α̂, which may never try it again.
        on_empty: Literal["hold", "zero", "full"] = "full"
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
        limits = [min(c.limit, options.k_max) for c in candidates]
        lengths, _ = geometric_lengths(
            weights,
            [client.acceptance.rate() for client in clients],
            draft_budget(options.total, view),
            limits,
        )
        grants = [Grant(n) for n in lengths.tolist()]
        self._left_out = {
            c.state.request.id: (c.state.epoch, c.state.round)
            for c, limit, grant in zip(candidates, limits, grants, strict=True)
            if limit and not grant.num_draft_tokens
        }
        return grants

    def on_step(self, outcomes: Sequence[Outcome], now: float) -> None:
        rounds = [o for o in outcomes if self._is_round(o)]
        tokens = tokens_by_tenant(rounds)
        proposed = dict.fromkeys(tokens, 0)
        decided = dict.fromkeys(tokens, 0)
        successes = dict.fromkeys(tokens, 0.0)
        over_all = dict.fromkeys(tokens, 0.0)
        for state, verdict in rounds:
            proposed[state.request.tenant] += verdict.num_proposed
            decided[state.request.tenant] += verdict.num_decided
            successes[state.request.tenant] += verdict.evidence
            over_all[state.request.tenant] += verdict.evidence_all
        for name, realised in tokens.items():
            evidence = Evidence(
                proposed[name], decided[name], successes[name], successes_all=over_all[name]
            )
            self._client(name).on_round(evidence, realised)

    def _is_round(self, outcome: Outcome) -> bool:
        """Return whether the request has drafted, or would have with a grant."""
        state, verdict = outcome
        left_out = self._left_out.get(state.request.id)
        return verdict.num_proposed > 0 or left_out == (verdict.epoch, verdict.round)

    @property
    def gauges(self) -> Gauges:
        return {
            "acceptance_estimate": {n: c.acceptance.rate() for n, c in self._clients.items()},
            "goodput_estimate": {n: c.goodput for n, c in self._clients.items()},
        }

    def goodput(self, tenant: str) -> float:
        """Return X of eq. 4, the estimate that figure 2 compares with realised goodput."""
        return self._client(tenant).goodput

    def acceptance(self, tenant: str) -> float:
        """Return α̂ of eq. 3."""
        return self._client(tenant).acceptance.rate()

    def _client(self, tenant: str) -> _Client:
        client = self._clients.get(tenant)
        if client is None:
            client = self._clients[tenant] = _Client(self.options)
        return client


class _Client:
    """α̂, X and number of rounds of a tenant."""

    def __init__(self, options: GoodSpeed.Options) -> None:
        self._options = options
        self.acceptance = Smoothed(
            options.initial_acceptance,
            options.eta,
            _ON_EMPTY[options.on_empty],
            decided_only=options.evidence == "decided",
        )
        self.goodput = options.initial_goodput
        self._rounds = 0

    def on_round(self, evidence: Evidence, realised: float) -> None:
        options = self._options
        self._rounds += 1
        self.acceptance.step = options.eta * self._rounds**-options.eta_decay
        self.acceptance.add_evidence(evidence)
        beta = options.beta * self._rounds**-options.beta_decay
        self.goodput += beta * (realised - self.goodput)


POLICY = GoodSpeed
