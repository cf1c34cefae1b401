"""GoodSpeed's gradient scheduling with acceptance learned by tenant and drafter.

Acceptance is learned in `learn/streams.py`, and goodput averaged by `GoodputAverages`."""

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
    """Shares the verification budget fairly, learned while serving."""

    name: ClassVar[str] = "goodspeed_adaptive"

    @dataclass(frozen=True, slots=True)
    class Options:
        fairness: Fairness = 1.0  # exponent a of the utility
        total: NonNegativeInt | None = None  # draft tokens a round (C); None: by step times
        k_max: MaxDraftTokens = 16  # most draft tokens for one request
        # Send a price with every grant, at which a drafter stops by its own confidence. The unused
        # budget is lost: worth it only if verifying a position costs time.
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
        """Return each candidate's probability that its next draft token is accepted."""
        return self._streams.rates(candidates)

    def on_step(self, outcomes: Sequence[Outcome], now: float) -> None:
        self._streams.add_outcomes(outcomes)
        self._averages.add_tokens(tokens_by_tenant(outcomes))


POLICY = GoodSpeedAdaptive
