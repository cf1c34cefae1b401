"""How far a drafter's own confidence can be believed, learned from what became of its tokens."""

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
"""Between the bins of a confidence: log-odds of -3 to 5. What matters of a long draft is whether a
token is right 98 or 99 times of a hundred."""

_EDGES = EDGES.tolist()
_MIDDLES = 1 / (1 + np.exp(-np.arange(-3.5, 6.0)))
_PRIOR_STRENGTH = 4.0
_PRIOR = (1 + _MIDDLES) / 2 * _PRIOR_STRENGTH
_DISCOUNT = 0.995


class Calibration:
    """P(a token is accepted | the probability its drafter gave it), by bins of that probability.

    A bin is a Beta posterior. It starts halfway between the bin's middle and 1, with the weight of
    a few tokens: what a drafter is too modest about would never be tried. What it has seen fades,
    so that it follows drift.
    """

    def __init__(self) -> None:
        self._accepted = np.zeros(len(_MIDDLES))
        self._seen = np.zeros(len(_MIDDLES))

    def observe(self, confidences: Sequence[float], num_accepted: int) -> None:
        """Tokens drafted one after the other with these confidences (0 to 1) were decided on, and
        the first `num_accepted` were accepted."""
        for index, bin_ in enumerate(np.searchsorted(EDGES, confidences, side="right")):
            self._accepted[bin_] = self._accepted[bin_] * _DISCOUNT + (index < num_accepted)
            self._seen[bin_] = self._seen[bin_] * _DISCOUNT + 1.0

    def acceptance(self, confidence: float) -> float:
        """Probability that a token drafted with this confidence is accepted."""
        bin_ = bisect_right(_EDGES, confidence)
        accepted = self._accepted[bin_] + _PRIOR[bin_]
        return float(accepted / (self._seen[bin_] + _PRIOR_STRENGTH))

    @property
    def mean(self) -> float:
        """Share of all tokens that were accepted; a half before anything is known."""
        return float((self._accepted.sum() + 1) / (self._seen.sum() + 2))

    @property
    def table(self) -> npt.NDArray[np.float64]:
        """That probability in each bin: [len(EDGES) + 1]."""
        table: npt.NDArray[np.float64] = self._accepted + _PRIOR
        return table / (self._seen + _PRIOR_STRENGTH)


class Calibrations:
    """One for each way in which drafts are decided on: confidence means another thing in each."""

    def __init__(self) -> None:
        self._greedy, self._coupled, self._ratio = Calibration(), Calibration(), Calibration()
        self.runner_up = Calibration()
        """Of second choices, where the first one was wrong."""

    def of(self, sampling: SamplingParams, *, is_drawn: bool) -> Calibration:
        """is_drawn: the token was sampled from the drafter's own distribution."""
        if sampling.temperature == 0:
            return self._greedy
        return self._ratio if is_drawn else self._coupled


@dataclass(frozen=True, slots=True)
class Stop:
    """Where drafts end before their limit: with the token that brings their predicted survival
    under `least`, which is not part of them.

    least:      [drafts] float32; 0 never ends one
    acceptance: [drafts, len(EDGES) + 1] float32, by the bin of a token's confidence
    """

    least: Floats
    acceptance: Floats

    def survival(self, survival: Floats, drafts: _Indices, confidences: Floats) -> Floats:
        """Of some drafts with one token more: theirs without it, times that token's acceptance."""
        bins = np.searchsorted(EDGES, confidences, side="right")
        return survival * self.acceptance[drafts, bins]
