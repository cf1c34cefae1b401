"""KV memory that admitted requests will need as they grow, with output lengths unknown."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.core.state import RequestState
from penstock.core.step import Step

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# Steps ahead that are evaluated; little can grow between two of them.
_AHEAD: IntArray = np.concatenate(
    [np.arange(64), np.arange(64, 128, 2), np.arange(128, 512, 8), 2 ** np.arange(9, 14)]
)

_GROWTH_BATCH = 64
"""Waiting requests whose growth is computed together: mostly the first few decide."""


def num_that_fit(step: Step, waiting: Sequence[RequestState], confidence: float) -> int:
    """Return how many of the first waiting requests should fit into memory at all times.

    A request takes a place, as of a recurrent state, beside KV that grows. They and the running
    requests go on together, and no other requests come. A request of age a has ended t steps from
    now with probability 1 − S(a + t) / S(a), else it holds t tokens more. The freed memory counts
    by its lower quantile, `confidence` deviations down, as for a Poisson number of ends (normal in
    the square root)."""
    capacity, lengths = step.pool.capacity_tokens, step.learn.lengths
    waiting = waiting[: int(min(step.num_places, len(waiting)))]
    if not waiting:
        return 0
    ages = np.array([(s.num_known_tokens, s.num_output_tokens) for s in waiting], dtype=np.int64)
    known = step.num_known_tokens + np.cumsum(ages[:, 0])
    num = len(step.running) + 1 + np.arange(len(ages))
    # More than would be needed if no request ended for longer than an output takes.
    first = int(np.count_nonzero(known + 1.5 * num * lengths.mean <= capacity))
    last = int(np.count_nonzero(known <= capacity))
    if first >= last:
        return last
    running = step.running_lengths()
    survival = lengths.survival(running[:, 1])
    freed, variance = (
        parts.sum(axis=0) for parts in _freed(np.concatenate([running, ages[:first]]), survival)
    )
    for start in range(first, last, _GROWTH_BATCH):
        some = slice(start, min(start + _GROWTH_BATCH, last))
        more_freed, more_variance = _freed(ages[some], survival)
        all_freed = freed + np.cumsum(more_freed, axis=0)
        all_variance = variance + np.cumsum(more_variance, axis=0)
        mean = np.maximum(all_freed, 1e-9)
        surely = np.maximum(mean - 0.5 * confidence * np.sqrt(all_variance), 0.0) ** 2 / mean
        # Whole blocks are held, the last of them half full.
        held = known[some] + 0.5 * num[some] * (step.pool.block_size - 1)
        most = (held[:, None] + num[some, None] * _AHEAD - surely).max(axis=1)
        if (most > capacity).any():
            return start + int((most > capacity).argmax())
        freed, variance = all_freed[-1], all_variance[-1]
    return last


def _freed(lengths: IntArray, survival: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return mean and variance of the freed tokens, [requests, steps ahead], by `lengths`."""
    ages = lengths[:, 1]
    now = np.maximum(survival.take(ages, mode="clip"), 1e-12)
    whole = lengths[:, :1] + _AHEAD
    freed = whole * (1 - survival.take(ages[:, None] + _AHEAD, mode="clip") / now[:, None])
    return freed, freed * (whole - freed)
