"""Fluid capacity bound: requests per second that no scheduler can exceed.

A step is a point (prefill tokens, decodes, KV tokens of the decodes). A stationary schedule runs a
mixture of such steps and must do the prefills, decodes and KV reads of all requests in at most one
second per second. The best mixture is a linear program. It ignores the KV memory of paused
requests, the context under a prompt's later chunks, and the growth of contexts: an upper bound."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from penstock.fluid.step_profile import StepProfile
from penstock.fluid.traffic import NO_SPECULATION, LengthArray, Speculation, decode_len

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class RequestWork:
    """Mean cost of one request over all its steps.

    prefill_tokens: prompt positions. prefill_context: Σ over them of the context they attend to, in
    token pairs. decode_steps: steps after the prefill. kv_token_steps: Σ of the context over them,
    draft tokens not counted. min_context: smallest context of a decode step; max_context: largest
    KV of any request, both in tokens."""

    prefill_tokens: float
    prefill_context: float
    decode_steps: float
    kv_token_steps: float
    min_context: float
    max_context: float
    speculation: Speculation = NO_SPECULATION


def request_work(
    prompt_len: Sequence[int] | LengthArray,
    decode_len: Sequence[int] | LengthArray,
    weights: Sequence[float] | FloatArray | None = None,
    speculation: Speculation = NO_SPECULATION,
) -> RequestWork:
    """Return the weighted mean work of some requests.

    prompt_len, decode_len: (N,) tokens (decode_len: l' of the paper, output tokens − 1 here);
    weights: (N,), equal by default. With speculation a request takes decode_len / tokens_per_step
    steps, the fewest possible on average."""
    prompts = np.asarray(prompt_len, dtype=np.float64)
    decodes = np.asarray(decode_len, dtype=np.float64)
    if prompts.shape != decodes.shape or prompts.ndim != 1 or not len(prompts):
        raise ValueError("prompt and decode lengths come in pairs, at least one of them")
    if prompts.min() < 1 or decodes.min() < 0:
        raise ValueError("prompts have at least 1 token and decode lengths are not negative")
    share = np.ones(len(prompts)) if weights is None else np.asarray(weights, dtype=np.float64)
    if share.shape != prompts.shape or share.min() < 0 or share.sum() <= 0:
        raise ValueError("weights are as many as lengths, none negative, not all zero")
    share = share / share.sum()
    gain = speculation.tokens_per_step
    steps = decodes / gain
    # Σ_{k=1..K} (prompt + 1 + (k − 1) g); for g = 1, Σ (prompt + k).
    contexts = steps * (prompts + 1) + gain * np.maximum(steps * (steps - 1), 0) / 2
    some = decodes > 0
    return RequestWork(
        prefill_tokens=float(share @ prompts),
        prefill_context=float(share @ (prompts**2 / 2)),
        decode_steps=float(share @ steps),
        kv_token_steps=float(share @ contexts),
        min_context=float(prompts[some].min()) + 1 if some.any() else 2.0,
        max_context=float((prompts + decodes).max()),
        speculation=speculation,
    )


def capacity_bound(profile: StepProfile, work: RequestWork, kv_tokens: int) -> float:
    """Return the largest stable load in requests/s on `profile` with `kv_tokens` of KV memory.

    A step has as many decodes at most as recurrent states have room. Raises ValueError where memory
    cannot hold the longest request."""
    rows = 1 + work.speculation.num_draft_tokens
    if work.max_context + rows - 1 > kv_tokens:
        raise ValueError(
            f"KV memory of {kv_tokens} tokens cannot hold the longest request, "
            f"{work.max_context + rows - 1:.0f} tokens"
        )
    columns = _columns(profile, work, kv_tokens)
    seconds, demand = columns[:, 3], columns[:, :3] / _per_request(work)
    # Scaled to one request's work and the time of the fastest step: in seconds and tokens a very
    # fast machine or a very large memory defeats the solver.
    sizes = demand.max(axis=1)
    share = _proportional_seconds(profile, work)
    unit = share + float((seconds / sizes).min())
    time, done = seconds / sizes / unit, demand / sizes[:, None]
    # Rows: time, prefill tokens, decodes, KV tokens. The last variable is requests per unit of
    # time.
    matrix = np.column_stack([np.vstack([time, -done.T]), [share / unit, 1.0, 1.0, 1.0]])
    if not work.decode_steps:
        matrix = matrix[:2]
    objective = np.zeros(len(columns) + 1)
    objective[-1] = -1.0
    limits = [1.0, 0.0, 0.0, 0.0][: len(matrix)]
    found = linprog(objective, A_ub=matrix, b_ub=limits, method="highs")
    if found.x is None:
        raise ValueError(f"no schedule serves these lengths within {kv_tokens} KV tokens")
    return float(found.x[-1] / unit)


def _per_request(work: RequestWork) -> FloatArray:
    """Return (prefill tokens, decodes, KV tokens) of a request; 1 where it has none."""
    return np.array([work.prefill_tokens, work.decode_steps or 1.0, work.kv_token_steps or 1.0])


def output_work(
    prompt_len: LengthArray, output_len: LengthArray, speculation: Speculation = NO_SPECULATION
) -> RequestWork:
    """Return `request_work` of recorded requests: prompt_len, output_len (N,) tokens.

    The prefill step samples the first output token."""
    decodes = np.array([decode_len(int(n)) for n in output_len])
    return request_work(prompt_len, decodes, speculation=speculation)


def _proportional_seconds(profile: StepProfile, work: RequestWork) -> float:
    """Return the seconds per request that do not depend on how its work is spread over steps."""
    return (
        profile.per_prefill_token * work.prefill_tokens
        + profile.per_prefill_context * work.prefill_context
        + profile.per_decode * work.decode_steps
        + profile.per_kv_token * work.kv_token_steps
    )


def _columns(profile: StepProfile, work: RequestWork, kv_tokens: int) -> FloatArray:
    """Return all steps that can be a vertex: (prefill tokens, decodes, KV tokens, seconds), (N, 4).

    For a fixed number of positions the steps within memory are a polygon over (decodes, KV). More
    KV only helps, so its upper corners suffice."""
    extra = work.speculation.num_draft_tokens
    columns = []
    for positions in _position_counts(profile, work, kv_tokens):
        spare = kv_tokens - positions
        most = min(positions / (1 + extra), spare / (work.min_context - 1), profile.most_requests)
        corner = spare / max(work.max_context - 1, 1.0)
        for decodes in {0.0, most, min(corner, most)}:
            # A decode and its draft tokens hold context + extra tokens; its own position is in
            # context.
            held = min(decodes * work.max_context, spare + decodes)
            prefills = positions - decodes * (1 + extra)
            seconds = profile.linear(math.ceil(positions))
            if decodes:
                seconds += profile.decode_fixed
            columns.append((prefills, decodes, held, seconds))
    return np.array(columns)


def _position_counts(profile: StepProfile, work: RequestWork, kv_tokens: int) -> list[float]:
    """Return the positions per step where its time, or the memory left beside it, bends."""
    rows = 1 + work.speculation.num_draft_tokens
    bends = [float(count) for count in profile.token_counts]
    # Decode-only steps of the smallest or largest context that fill the memory.
    for context in (work.min_context, work.max_context):
        bends.append(kv_tokens * rows / (context - 1 + rows))
    bends += [float(kv_tokens), min(rows * profile.most_requests, float(kv_tokens))]
    granule = profile.granularity
    rounded = {b // granule * granule for b in bends} | {-(-b // granule) * granule for b in bends}
    return sorted(b for b in rounded | set(bends) if 0 < b <= kv_tokens)
