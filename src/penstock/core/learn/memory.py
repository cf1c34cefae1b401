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


class FluidKV(NamedTuple):
    """KV tokens of the target that requests would hold which arrive, and end, as they did lately,
    and make tokens as fast as those that run. mean: in the fluid. bound: that Poisson arrivals
    exceed within an hour with probability 0.001 at most. Prompts that share a prefix count in full,
    and memory is taken to be without end."""

    mean: float
    bound: float


def token_seconds(running: Iterable[RequestState], now: float) -> float | None:
    """Seconds of a token after the first, over all running requests; None where none has any."""
    decoding = [s for s in running if s.num_output_tokens > 1]
    if not decoding:
        return None
    seconds = sum(now - s.first_token_at for s in decoding)
    return seconds / sum(s.num_output_tokens - 1 for s in decoding)


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
