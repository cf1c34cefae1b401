"""Arrival rates that change with time (WAIT, B.1 and appendix E)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.fluid.nested import Segments
from penstock.fluid.traffic import NO_SPECULATION, Speculation

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RateCurve:
    """Piecewise constant rates: from `times[i]` to `times[i + 1]` type j arrives at
    `rates[i][j]` (1/s). times: (N + 1,) seconds, rising; rates: (N, m)."""

    times: FloatArray
    rates: FloatArray

    def __post_init__(self) -> None:
        if self.rates.ndim != 2 or len(self.times) != len(self.rates) + 1:
            raise ValueError("a rate curve has one row of rates between every two times")
        if (np.diff(self.times) <= 0).any() or (self.rates < 0).any() or not self.rates.any():
            raise ValueError("times rise; rates are not negative, and not all zero")

    def most_arrivals(self, seconds: float) -> float:
        """Λ^π: the most expected arrivals in any window of `seconds`. The window that has them
        begins or ends where a rate changes."""
        totals = self.rates.sum(axis=1)
        arrived = np.concatenate([[0.0], np.cumsum(totals * np.diff(self.times))])
        starts = np.concatenate([self.times, self.times - seconds])
        ends = np.interp(starts + seconds, self.times, arrived)
        return float((ends - np.interp(starts, self.times, arrived)).max())

    def worst_survival(self, first_beyond: Sequence[int]) -> tuple[float, ...]:
        """p*_k: the largest share, over time, of a segment's requests that go on.

        first_beyond: for segments 2 to L the index of the first type that enters it; types are
        ordered by decode length. The share over a window is a mean of the shares at its moments,
        so the worst window of eq. 10 is the worst moment. (Appendix E's arg min over n_j is this
        maximum over time.)
        """
        entering = np.stack(
            [self.rates[:, start:].sum(axis=1) for start in (0, *first_beyond)], axis=1
        )
        before, here = entering[:, :-1], entering[:, 1:]
        share = np.divide(here, before, out=np.zeros_like(here), where=before > 0)
        return tuple(float(p) for p in share.max(axis=0))


def time_varying_segments(
    prompt_len: int,
    decode_lens: Sequence[int],
    curve: RateCurve,
    speculation: Speculation = NO_SPECULATION,
) -> Segments:
    """Segments, one for each type, that hold at every moment: `nested_thresholds` of them satisfy
    eq. 10, and their memory bound is theorem B.1's with eq. 14.

    decode_lens: (m,) rising, as the columns of the curve's rates.
    """
    if curve.rates.shape[1] != len(decode_lens):
        raise ValueError("a rate curve has one column for each decode length")
    return Segments(
        prompt_lens=(prompt_len,) * len(decode_lens),
        ends=tuple(speculation.num_steps(n) for n in decode_lens),
        survival=curve.worst_survival(range(1, len(decode_lens))),
        arrivals=curve.most_arrivals,
        speculation=speculation,
    )
