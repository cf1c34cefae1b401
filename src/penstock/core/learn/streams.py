"""Acceptance of the next draft token, from one stream of drafts, such as a tenant's (GoodSpeed)."""

from __future__ import annotations

from typing import NamedTuple

_MAX_ACCEPTANCE = 0.99  # keeps expected lengths finite


class Evidence(NamedTuple):
    """Evidence of one round, which may be without a draft.

    Positions behind the first rejection stand on a prefix that the target did not choose."""

    num_proposed: int
    num_decided: int  # the first ones, decided on the target's prefix
    successes: float  # of these: accepted ones, or Σ min(target, draft)
    successes_all: float = 0.0  # among all proposed, on any prefix


class Smoothed:
    """Exponential smoothing (GoodSpeed eq. 3).

    α̂ ← (1 − η) α̂ + η · mean of min(1, target / draft) over the S positions of the draft; with
    `decided_only` over those up to the first rejection. on_empty: acceptance of a round without a
    draft, where eq. 3 divides by S = 0; None keeps α̂. `step` is η, which its owner may change."""

    def __init__(
        self, rate: float, step: float, on_empty: float | None = None, decided_only: bool = False
    ) -> None:
        self.step = step
        self._rate = rate
        self._on_empty = on_empty
        self._decided_only = decided_only

    def add_evidence(self, evidence: Evidence) -> None:
        observed = self._on_empty
        if self._decided_only and evidence.num_decided:
            observed = evidence.successes / evidence.num_decided
        elif evidence.num_proposed:
            observed = evidence.successes_all / evidence.num_proposed
        if observed is not None:
            self._rate += self.step * (observed - self._rate)

    def rate(self) -> float:
        """Return the probability in [0, 1) that a token behind accepted ones is accepted."""
        return min(self._rate, _MAX_ACCEPTANCE)
