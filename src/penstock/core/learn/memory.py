"""KV memory that present traffic would take in the fluid model, for operators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from penstock.core.learn import Estimators
from penstock.core.state import RequestState
from penstock.fluid.memory import poisson_kv_bound

_MAX_STAGES = 256  # output positions that are distinguished; longer outputs group several

_PACE_KEPT = 0.9  # memory of a look at running requests


class FluidKV(NamedTuple):
    """KV tokens of the target in a steady state of present traffic, without sharing.

    mean: in the fluid model. bound: exceeded within an hour with probability 0.001 at most
    (Poisson)."""

    mean: float
    bound: float


class TokenPace:
    """Seconds per token after the first, sampled from running requests; older samples fade."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0.0

    def look(self, running: Iterable[RequestState], now: float) -> None:
        decoding = [s for s in running if s.num_output_tokens > 1]
        if decoding:
            seconds = sum(now - s.first_token_at for s in decoding)
            self._seconds = _PACE_KEPT * self._seconds + seconds
            tokens = sum(s.num_output_tokens - 1 for s in decoding)
            self._tokens = _PACE_KEPT * self._tokens + tokens

    @property
    def seconds(self) -> float | None:
        return self._seconds / self._tokens if self._tokens else None


def fluid_kv(learn: Estimators, now: float, token_s: float) -> FluidKV | None:
    """Return the memory of present traffic, at `token_s` seconds a token; None before any end."""
    traffic, survival = learn.traffic, learn.lengths.survival_of_ended()
    rate = traffic.prompt_tokens_per_s(now) / traffic.mean_prompt_len
    if not survival.size or rate <= 0 or token_s <= 0:
        return None
    stage = -(-survival.size // _MAX_STAGES)
    starts = np.arange(0, survival.size, stage)
    means = rate * token_s * np.add.reduceat(survival, starts)
    kv = np.asarray(traffic.mean_prompt_len + starts + 0.5 * (stage - 1), dtype=np.float64)
    return FluidKV(float(means @ kv), poisson_kv_bound(kv, means, stage * token_s))
