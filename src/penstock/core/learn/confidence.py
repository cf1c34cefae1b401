"""Calibration of drafters' confidences by the acceptance of their tokens."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.core.types import SamplingParams

Floats = npt.NDArray[np.float32]
_Indices = npt.NDArray[np.int64]

EDGES = (1 / (1 + np.exp(-np.arange(-3.0, 6.0)))).astype(np.float32)
"""Bin edges of a confidence: log-odds of -3 to 5, fine at the high probabilities that decide the
length of long drafts."""

_EDGES = EDGES.tolist()
_MIDDLES = 1 / (1 + np.exp(-np.arange(-3.5, 6.0)))
# Weight of the prior in tokens, and forgetting per token (a memory of 200): chosen by hand.
_PRIOR_STRENGTH = 4.0
_PRIOR = (1 + _MIDDLES) / 2 * _PRIOR_STRENGTH
_DISCOUNT = 0.995


class Calibration:
    """Acceptance probability of a token given its drafter's confidence, by bins.

    A bin is a Beta posterior with a discount. Its prior mean is halfway between the bin's middle
    and 1, so that underconfident drafters are tried.
    """

    def __init__(self) -> None:
        self._accepted = np.zeros(len(_MIDDLES))
        self._seen = np.zeros(len(_MIDDLES))

    def add_draft(self, confidences: Sequence[float], num_accepted: int) -> None:
        """Learn from decided tokens of a draft, of which the first `num_accepted` were accepted."""
        for index, bin_ in enumerate(np.searchsorted(EDGES, confidences, side="right")):
            self._accepted[bin_] = self._accepted[bin_] * _DISCOUNT + (index < num_accepted)
            self._seen[bin_] = self._seen[bin_] * _DISCOUNT + 1.0

    def acceptance(self, confidence: float) -> float:
        """Return the acceptance probability of a token with this confidence."""
        bin_ = bisect_right(_EDGES, confidence)
        accepted = self._accepted[bin_] + _PRIOR[bin_]
        return float(accepted / (self._seen[bin_] + _PRIOR_STRENGTH))

    @property
    def mean(self) -> float:
        """Share of accepted tokens; a half at first."""
        return float((self._accepted.sum() + 1) / (self._seen.sum() + 2))

    @property
    def table(self) -> npt.NDArray[np.float64]:
        """Acceptance probability of each bin: [len(EDGES) + 1]."""
        table: npt.NDArray[np.float64] = self._accepted + _PRIOR
        return table / (self._seen + _PRIOR_STRENGTH)


class Calibrations:
    """Calibrations by verification mode: greedy, coupled and ratio."""

    def __init__(self) -> None:
        self._greedy, self._coupled, self._ratio = Calibration(), Calibration(), Calibration()
        self.runner_up = Calibration()
        """Calibration of second choices after a wrong first one."""

    def for_sampling(self, sampling: SamplingParams, *, is_drawn: bool) -> Calibration:
        """Select a calibration. is_drawn: sampled from the drafter's own distribution."""
        if sampling.temperature == 0:
            return self._greedy
        return self._ratio if is_drawn else self._coupled


@dataclass(frozen=True, slots=True)
class Stop:
    """Rule that ends drafts before the token whose predicted survival is below `least`.

    least:      [drafts] float32; 0 never ends one
    acceptance: [drafts, len(EDGES) + 1] float32, by the bin of a token's confidence
    """

    least: Floats
    acceptance: Floats

    def survival(self, survival: Floats, drafts: _Indices, confidences: Floats) -> Floats:
        """Return the survival of drafts with one more token."""
        bins = np.searchsorted(EDGES, confidences, side="right")
        return survival * self.acceptance[drafts, bins]
