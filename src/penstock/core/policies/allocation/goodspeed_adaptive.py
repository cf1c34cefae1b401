"""GoodSpeed's gradient scheduling with acceptance learned for each tenant and drafter
(`learn/streams.py`) and goodput averaged over all that is known (`GoodputAverages`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from penstock.core.policies.allocation.parts.gradient import (
    Fairness,
    GoodputAverages,
    Streams,
    draft_budget,
    tokens_by_tenant,
)
from penstock.core.policies.base import AllocationPolicy, DraftCandidate, View
from penstock.core.policies.options import MaxDraftTokens, NonNegativeInt
from penstock.core.state import Grant, Outcome
from penstock.fluid.fair import geometric_lengths


class GoodSpeedAdaptive(AllocationPolicy):
    """Fair shares of the verification budget, learned while serving."""

    name: ClassVar[str] = "goodspeed_adaptive"

    @dataclass(frozen=True, slots=True)
    class Options:
        """fairness: exponent a of the utility, U' = weight · x^(−a): 0 total, 1 proportional.
        total: draft tokens a round at most (C). None: by the profile of step times.
        k_max: most draft tokens for one request in a round.
        prices: send the price of a position with every grant, so that a drafter stops where its own
            confidence puts a token below it. What it leaves goes to nobody in that round: worth it
            only where verifying a position costs time."""

        fairness: Fairness = 1.0
        total: NonNegativeInt | None = None
        k_max: MaxDraftTokens = 16
        prices: bool = False

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._averages = GoodputAverages()
        self._streams = Streams()

    def allocate(self, candidates: Sequence[DraftCandidate], view: View) -> list[Grant]:
        options = self.options
        slopes = self._averages.slopes(candidates, view, options.fairness)
        each = [slopes[c.state.request.tenant] for c in candidates]
        lengths, price = geometric_lengths(
            each,
            self.rates(candidates),
            draft_budget(options.total, view),
            [min(c.limit, options.k_max) for c in candidates],
        )
        if not options.prices:
            price = 0.0
        return [
            Grant(n, min(1.0, price / slope))
            for n, slope in zip(lengths.tolist(), each, strict=True)
        ]

    def rates(self, candidates: Sequence[DraftCandidate]) -> Sequence[float]:
        """Probability for each candidate that its next draft token is accepted."""
        return self._streams.rates(candidates)

    def observe(self, outcomes: Sequence[Outcome], now: float) -> None:
        self._streams.observe(outcomes)
        self._averages.observe(tokens_by_tenant(outcomes))


POLICY = GoodSpeedAdaptive
