"""Slowdown of requests: latency over the latency alone on the server."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.fluid.step_profile import StepProfile, StepWork

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

_GROUPS = 10


def seconds_alone(profile: StepProfile, prompt_len: IntArray, num_tokens: IntArray) -> FloatArray:
    """Return each request's latency alone on the server: a prefill step, then a step a token."""
    lengths, which = np.unique(prompt_len, return_inverse=True)
    prompts = [profile.seconds(StepWork(n, n * n / 2)) for n in lengths.tolist()]
    step, per_kv_token = profile.decoding(1)
    later = np.maximum(num_tokens - 1, 0)
    # The k-th of these steps reads the prompt and k tokens of output.
    context = prompt_len + 0.5 * (later + 1)
    decoding: FloatArray = later * (step + per_kv_token * context)
    return np.array(prompts)[which] + decoding


def by_prompt_len(
    prompt_len: IntArray, ttft: FloatArray, latency: FloatArray, slowdown: FloatArray
) -> list[dict[str, Any]]:
    """Return means by tenth of prompt lengths, the short first. Equal lengths share a group."""
    if not len(prompt_len):
        return []
    inner = np.arange(1, _GROUPS) / _GROUPS
    edges = np.unique(np.quantile(prompt_len, inner, method="inverted_cdf"))
    group_of = np.searchsorted(edges, prompt_len)
    groups = []
    for group in np.unique(group_of):
        chosen = group_of == group
        groups.append(
            {
                "prompt_len": [int(prompt_len[chosen].min()), int(prompt_len[chosen].max())],
                "requests": int(chosen.sum()),
                "latency_s": float(latency[chosen].mean()),
                "ttft_s": float(ttft[chosen].mean()),
                "slowdown": float(slowdown[chosen].mean()),
            }
        )
    return groups
