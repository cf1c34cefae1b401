"""KV memory that admitted requests will need as they grow, with output lengths unknown."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from penstock.core.state import RequestState
from penstock.core.step import Step

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# Steps ahead that are looked at: so fine that little can grow between two of them.
_AHEAD: IntArray = np.concatenate(
    [np.arange(64), np.arange(64, 128, 2), np.arange(128, 512, 8), 2 ** np.arange(9, 14)]
)


_MORE = 1.1
"""Prompts admitted into short memory, over those that would leave it if it were full."""


class Growth:
    """The KV of some requests as they go on together, and nobody new comes.

    t steps from now whoever still runs holds t tokens more. What has come free by then is a sum of
    independent ends, each known by its probability: a request of age a has ended with probability
    1 − S(a + t) / S(a). Its lower quantile is taken as for a Poisson number of ends: the square
    root of a count is normal with nearly constant deviation, so that, unlike with the normal
    distribution itself, never less than nothing comes free.
    """

    def __init__(self, step: Step, confidence: float) -> None:
        self._step = step
        self._confidence = confidence
        self._num = len(step.running)
        self._known = step.num_known_tokens
        self._added: list[tuple[int, int]] = []
        self._freed: FloatArray = np.zeros(len(_AHEAD))
        self._variance: FloatArray = np.zeros(len(_AHEAD))
        self._survival: FloatArray | None = None

    def add(self, state: RequestState) -> None:
        """Count one request more."""
        self._num += 1
        self._known += state.num_known_tokens
        self._added.append((state.num_known_tokens, state.num_output_tokens))

    def stays_within(self, capacity: int) -> bool:
        """Whether the requests are expected to fit into `capacity` tokens at all times."""
        lengths = self._step.estimators.lengths
        if self._known + 1.5 * self._num * lengths.mean <= capacity:
            # So much would hardly be needed if nobody ended for longer than an output takes.
            return True
        if self._known > capacity:
            return False
        if self._survival is None:
            running = self._step.running_lengths()
            self._survival = lengths.survival(running[:, 1])
            self._count(running)
        if self._added:
            self._count(np.array(self._added, dtype=np.int64))
            self._added.clear()
        # Whole blocks are held, the last of them half full.
        unused = 0.5 * self._num * (self._step.pool.block_size - 1)
        held = self._known + unused + self._num * _AHEAD - self._surely_freed()
        return bool(held.max() <= capacity)

    def _surely_freed(self) -> FloatArray:
        mean = np.maximum(self._freed, 1e-9)
        short = np.maximum(mean - 0.5 * self._confidence * np.sqrt(self._variance), 0.0)
        freed: FloatArray = short**2 / mean
        return freed

    def _count(self, lengths: IntArray) -> None:
        """Add what comes free of requests; lengths: [requests, 2] known and output tokens."""
        assert self._survival is not None
        last = len(self._survival) - 1
        ages = lengths[:, 1]
        now = self._survival[np.minimum(ages, last)]
        later = self._survival[np.minimum(ages[:, None] + _AHEAD, last)]
        ended = 1 - later / np.maximum(now, 1e-12)[:, None]
        freed = (lengths[:, :1] + _AHEAD) * ended
        self._freed += freed.sum(axis=0)
        self._variance += (freed * freed * (1 / np.maximum(ended, 1e-12) - 1)).sum(axis=0)


class Refill:
    """Even admission while memory is short.

    Who is admitted together ends together, and until then memory is kept for the growth of all of
    them. So what comes free is not given out at once, but with the prompt tokens a step that would
    leave a memory full of ordinary requests. A long prompt is admitted on credit.

    credit: prompt tokens that may be admitted; without end while memory is not short.
    is_pausing: whether nobody was admitted only because it is too early.
    """

    def __init__(self) -> None:
        self.credit = math.inf
        self.is_pausing = False
        self._prompt_len = 1.0

    @property
    def is_short(self) -> bool:
        return self.credit < math.inf

    def note(self, is_short: bool) -> bool:
        """Whether memory is short now. Returns whether that has just begun."""
        began = is_short and not self.is_short
        if began or not is_short:
            self.credit = self._prompt_len if is_short else math.inf
        return began

    def earn(self, step: Step) -> bool:
        """What a step adds. Returns whether it is time to admit anybody."""
        lengths, self._prompt_len = step.estimators.lengths, step.estimators.traffic.mean_prompt_len
        if self.is_short:
            full = step.pool.capacity_tokens / (self._prompt_len + lengths.mean_residual)
            earned = _MORE * full / lengths.mean * self._prompt_len
            self.credit = min(self._prompt_len, self.credit + earned)
            self.is_pausing = self.credit <= 0 and bool(step.running)
        return not self.is_pausing

    def spend(self, num_tokens: int) -> None:
        """So many prompt tokens are admitted."""
        self.credit -= num_tokens
