"""Linear operators of a step as Vidur measures them, the origin of the shipped GPU profiles."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from penstock.fluid.step_profile import StepProfile
from penstock.sim.traces import numbers, read_table

PROJECTIONS = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
OTHERS = ("mlp_act", "input_layernorm", "post_attention_layernorm", "attn_rope", "add")


def linear_profile(path: Path, num_layers: int, granularity: int = 8) -> StepProfile:
    """Seconds by tokens, in steps of `granularity`, without attention. path: Vidur's CSV."""
    table = read_table(path)
    alone = numbers(table, "num_tensor_parallel_workers") == 1
    each = [numbers(table, f"time_stats.{name}.median") for name in (*PROJECTIONS, *OTHERS)]
    tokens = numbers(table, "num_tokens")[alone]
    seconds = np.sum(each, axis=0)[alone] * num_layers / 1000
    measured = np.unique(tokens)
    means = [seconds[tokens == count].mean() for count in measured]
    counts = np.unique(np.ceil(measured / granularity) * granularity)
    times = np.interp(counts, measured, means)
    return StepProfile(path.stem, 1, tuple(map(int, counts)), tuple(map(float, times)), granularity)
