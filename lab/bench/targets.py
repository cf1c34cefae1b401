"""Loads on which targets for TTFT and TPOT are put to the test: `python -m lab.bench.admission
targets` runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.fluid.step_profile import StepProfile
from penstock.sim.run import Report
from penstock.sim.workloads import Workload, load_workload

_NUM_LONG = 200
_NUM_BURSTY = 1200
_NUM_TENANTS = 8


class Case(NamedTuple):
    """A load with targets in seconds; kv_tokens: memory in which its prompts fit, None is the
    profile's."""

    name: str
    workload: Workload
    ttft_p99: float
    tpot_p99: float
    kv_tokens: int | None


def cases(conversation: Path, profile: StepProfile, seed: int) -> Iterator[Case]:
    """Long prompts with the arrivals and outputs of a recorded conversation, and light bursts of
    several tenants with tight targets; each at shares of the server's capacity."""
    for share in (0.3, 0.6, 0.9):
        workload = at_load(share, long_prompts(conversation, seed, _log_uniform), profile)
        yield Case(f"10,000 to 100,000 at {share}", workload, 30.0, 0.1, 2_000_000)
    for share in (0.6, 0.9):
        workload = at_load(share, long_prompts(conversation, seed, _log_normal), profile)
        yield Case(f"mean 12,000 at {share}", workload, 10.0, 0.1, 1_000_000)
    for share in (0.1, 0.3):
        yield Case(f"bursts at {share}", at_load(share, bursts(seed), profile), 0.2, 0.05, None)


def _log_uniform(rng: np.random.Generator, num: int) -> NDArray[np.int64]:
    return np.exp(rng.uniform(np.log(1e4), np.log(1e5), num)).astype(np.int64)


def _log_normal(rng: np.random.Generator, num: int) -> NDArray[np.int64]:
    return np.clip(np.exp(rng.normal(np.log(12_000) - 0.5, 1.0, num)), 16, 120_000).astype(np.int64)


def long_prompts(
    conversation: Path, seed: int, draw: Callable[[np.random.Generator, int], NDArray[np.int64]]
) -> Workload:
    """A stretch of the conversation, each with prompts drawn anew."""
    recorded, rng = load_workload(conversation), np.random.default_rng(seed)
    first = int(rng.integers(len(recorded) - _NUM_LONG))
    rows = slice(first, first + _NUM_LONG)
    times = recorded.arrival_time
    assert times is not None
    return Workload(
        "long", draw(rng, _NUM_LONG), recorded.output_len[rows], times[rows] - times[first]
    )


def bursts(seed: int) -> Workload:
    """Tenants of very different rates, each with gamma gaps (coefficient of variation 4), short
    prompts and outputs."""
    rng = np.random.default_rng(seed)
    gaps = [
        rng.gamma(1 / 16, 16 / rate, max(1, round(_NUM_BURSTY * rate)))
        for rate in rng.dirichlet(np.full(_NUM_TENANTS, 0.5))
    ]
    times = np.concatenate([np.cumsum(g) for g in gaps])
    tenants = np.repeat([f"tenant-{i}" for i in range(_NUM_TENANTS)], [len(g) for g in gaps])
    order = np.argsort(times)
    num = len(order)
    prompts = np.clip(rng.lognormal(np.log(400), 0.8, num), 8, 4000).astype(np.int64)
    outputs = np.clip(rng.lognormal(np.log(120), 0.7, num), 2, 800).astype(np.int64)
    times = times[order]
    return Workload("bursts", prompts, outputs, times - times[0], tenants[order])


def at_load(share: float, workload: Workload, profile: StepProfile) -> Workload:
    """With its arrivals scaled so that its work, in steps of 512 positions, is this share of the
    time."""
    prompts, outputs = workload.prompt_len.astype(float), workload.output_len
    position = profile.linear(512) / 512
    prefill = prompts * (
        position + profile.per_prefill_token + profile.per_prefill_context / 2 * prompts
    )
    context = prompts + outputs / 2
    decode = outputs * (position + profile.per_decode + profile.per_kv_token * context)
    times = workload.arrival_time
    assert times is not None
    return replace(workload, arrival_time=times * ((prefill + decode).sum() / times[-1] / share))


def share_within(report: Report, ttft_p99: float, tpot_p99: float) -> float:
    """Share of the requests that were within both targets themselves."""
    goodput = report.figures(ttft_p99, tpot_p99)["slo_goodput"]
    return float(goodput * report.result.finished_at / len(report.arrived_at))
