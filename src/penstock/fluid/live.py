"""Segments of Nested WAIT in a running system: who is in which, and plans for measured traffic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from penstock.fluid.nested import fluid_segments
from penstock.fluid.step_profile import StepProfile
from penstock.fluid.traffic import traffic_from_lengths

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# Chosen by hand.
_DRIFT = 0.2  # share by which a rate or a mean length changes before thresholds are planned anew
_TRIES = 8  # rates that are tried under overload
_SLACK = 1.5  # factor of its threshold that a segment may hold
_NUM_LENGTHS = 32  # quantiles that stand for the measured output lengths


class LiveSegments:
    """Segments, by rising output tokens at their `ends`, and their thresholds a stage.

    lengths: known and output tokens of every running request, [running, 2]."""

    def __init__(self, ends: Sequence[int], thresholds: Sequence[float]) -> None:
        self.ends = tuple(ends)
        self.thresholds = tuple(thresholds)
        self._planned = (0.0, 0.0, 0.0)

    def end_of(self, num_output_tokens: int) -> int:
        """Return the output tokens at which a request leaves its segment."""
        return next((end for end in self.ends if end > num_output_tokens), self.ends[-1])

    def held(self, lengths: IntArray) -> IntArray:
        """Return the requests in each segment; the last has no upper end."""
        found = np.searchsorted(self.ends, lengths[:, 1], side="right")
        inside = np.minimum(found, len(self.ends) - 1)
        return np.bincount(inside, minlength=len(self.ends))

    def is_over(self, lengths: IntArray) -> bool:
        """Return whether a segment holds more than 1.5 times its threshold a stage."""
        num_stages = np.diff(self.ends, prepend=0)
        most = _SLACK * np.array(self.thresholds) * num_stages + 1
        return bool((self.held(lengths) > most).any())

    def gauges(self, lengths: IntArray) -> dict[str, dict[str, float]]:
        """Return the requests, threshold and end of each segment, by its number from 1."""
        columns = {
            "segment_requests": self.held(lengths).tolist(),
            "segment_threshold": self.thresholds,
            "segment_end": self.ends,
        }
        return {
            name: {str(i): float(x) for i, x in enumerate(column, 1)}
            for name, column in columns.items()
        }

    def follow(
        self,
        profile: StepProfile,
        survival: FloatArray,
        prompt_len: float,
        rate: float,
        kv_tokens: int,
        most_requests: float = math.inf,
    ) -> None:
        """Plan anew (eq. 11, by `fluid_segments`) if the traffic has drifted since the last plan.

        As in the paper n_1 is 1 or more; the others keep their ratio to it. Under overload it is
        the plan of a rate that can be served. survival: P(output > n) for n = 0, 1, …"""
        measured = (rate, prompt_len, float(survival.sum()))
        pairs = zip(measured, self._planned, strict=True)
        if rate <= 0 or all(abs(now - then) <= _DRIFT * then for now, then in pairs):
            return
        self._planned = measured
        if most_requests < math.inf:
            profile = replace(profile, state_slots=int(most_requests))
        ranks = (np.arange(_NUM_LENGTHS) + 0.5) / _NUM_LENGTHS
        lengths = np.maximum(1, np.searchsorted(-survival, ranks - 1))
        prompts = np.full(_NUM_LENGTHS, max(1, round(prompt_len)))
        served, too_high, tried = 0.0, rate, rate
        for _ in range(_TRIES):
            try:
                traffic = traffic_from_lengths(prompts, lengths, tried)
                self.ends, found = fluid_segments(profile, traffic, kv_tokens)
            except ValueError:
                too_high = tried
            else:
                scale = max(1.0, 1 / found[0])
                self.thresholds = tuple(scale * n for n in found)
                served = tried
            if served == rate:
                return
            tried = (served + too_high) / 2
