"""KV memory that the traffic seen so far takes in the fluid, for operators to hold against what
there is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from penstock.core.learn import Estimators
from penstock.core.state import RequestState
from penstock.fluid.memory import poisson_kv_bound

_MAX_STAGES = 256
"""Output positions that are told apart; of longer outputs several count as one."""

_PACE_KEPT = 0.9


class FluidKV(NamedTuple):
    """KV tokens of the target that requests would hold which arrive, and end, as they did lately,
    and make tokens as fast as those that run. mean: in the fluid. bound: that Poisson arrivals
    exceed within an hour with probability 0.001 at most. Prompts that share a prefix count in full,
    and memory is taken to be without end."""

    mean: float
    bound: float


class TokenPace:
    """Seconds of a token after the first, of requests that are looked at now and then while they
    run. Earlier looks fade."""

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
        """None before any was seen."""
        return self._seconds / self._tokens if self._tokens else None


def fluid_kv(learn: Estimators, now: float, token_s: float) -> FluidKV | None:
    """None before a request has come and another has ended. token_s: seconds of a token."""
    traffic, survival = learn.traffic, learn.lengths.survival_of_ended()
    rate = traffic.prompt_tokens_per_s(now) / traffic.mean_prompt_len
    if not survival.size or rate <= 0 or token_s <= 0:
        return None
    stage = -(-survival.size // _MAX_STAGES)
    starts = np.arange(0, survival.size, stage)
    means = rate * token_s * np.add.reduceat(survival, starts)
    kv = np.asarray(traffic.mean_prompt_len + starts + 0.5 * (stage - 1), dtype=np.float64)
    return FluidKV(float(means @ kv), poisson_kv_bound(kv, means, stage * token_s))
