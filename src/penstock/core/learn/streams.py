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
    `decided_only` over those up to the first rejection. A round without a draft changes nothing.
    `step` is η, which its owner may change."""

    def __init__(self, rate: float, step: float, decided_only: bool = False) -> None:
        self.step = step
        self._rate = rate
        self._decided_only = decided_only

    def add_evidence(self, evidence: Evidence) -> None:
        if not evidence.num_proposed:
            return
        observed = evidence.successes_all / evidence.num_proposed
        if self._decided_only and evidence.num_decided:
            observed = evidence.successes / evidence.num_decided
        self._rate += self.step * (observed - self._rate)

    def rate(self) -> float:
        """Return the probability in [0, 1) that a token behind accepted ones is accepted."""
        return min(self._rate, _MAX_ACCEPTANCE)
