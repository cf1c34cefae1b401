"""How far a drafter's own confidence can be believed, learned from what became of its tokens."""

from __future__ import annotations

_NUM_BINS = 10
_PRIOR_STRENGTH = 4.0
_DISCOUNT = 0.995


class Calibration:
    """P(a token is accepted | the probability its drafter gave it), by bins of that probability.

    A bin is a Beta posterior. It starts halfway between the bin's middle and 1, with the weight of
    a few tokens: what a drafter is too modest about would never be tried. What it has seen fades,
    so that it follows drift.
    """

    def __init__(self) -> None:
        self._accepted = [0.0] * _NUM_BINS
        self._seen = [0.0] * _NUM_BINS

    def observe(self, confidence: float, accepted: bool) -> None:
        """A token drafted with this confidence (0 to 1) was decided on."""
        bin_ = _bin_of(confidence)
        self._accepted[bin_] = self._accepted[bin_] * _DISCOUNT + accepted
        self._seen[bin_] = self._seen[bin_] * _DISCOUNT + 1.0

    def acceptance(self, confidence: float) -> float:
        """Probability that a token drafted with this confidence is accepted."""
        bin_ = _bin_of(confidence)
        prior = (1 + (bin_ + 0.5) / _NUM_BINS) / 2 * _PRIOR_STRENGTH
        return (self._accepted[bin_] + prior) / (self._seen[bin_] + _PRIOR_STRENGTH)


def _bin_of(confidence: float) -> int:
    return min(int(confidence * _NUM_BINS), _NUM_BINS - 1)
