"""27 tenants with very different loads on the virtual clock: who waits, and what fairness costs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.fluid.step_profile import StepProfile
from penstock.sim.profiles import load_profile
from penstock.sim.run import Report, Setup, run
from penstock.sim.workloads import Workload, make_workload

NUM_TENANTS = 27
LOADS = (0.9, 1.5)
"""Of the capacity of the policy without fairness."""
CAPACITY = {"vllm_v1": 4.7, "sarathi": 4.7, "fluid_guided": 5.4}
"""Requests a second of this trace: at 1.5 times so many each policy ends so many."""
_PROMPT, _OUTPUT = (6.63, 0.985, 16, 14_000), (5.02, 0.859, 4, 1_000)
"""Mean and deviation of the logarithm, least and most tokens: as in the Azure conversation trace of
2023 (Patel et al., ISCA'24)."""


def shares_of_load() -> npt.NDArray[np.float64]:
    """Zipf: the k-th tenant asks for 1/k of what the first does."""
    shares = 1 / np.arange(1, NUM_TENANTS + 1)
    return np.asarray(shares / shares.sum())


def trace(num_requests: int, rate: float, seed: int) -> Workload:
    """Conversation lengths, Poisson arrivals, tenants `t01` to `t27`."""
    rng = np.random.default_rng([seed, NUM_TENANTS])
    owner = rng.choice(NUM_TENANTS, size=num_requests, p=shares_of_load())
    prompt_len, output_len = (
        np.clip(np.exp(rng.normal(mean, deviation, num_requests)), least, most).astype(np.int64)
        for mean, deviation, least, most in (_PROMPT, _OUTPUT)
    )
    names = np.array([f"t{k + 1:02d}" for k in range(NUM_TENANTS)])[owner]
    lengths = Workload("27 tenants", prompt_len, output_len, tenants=names)
    return make_workload(lengths, rate=rate, seed=seed)


def slower(profile: StepProfile, factor: float) -> StepProfile:
    """The same machine with every time so many times as long."""
    return replace(
        profile,
        token_seconds=tuple(factor * s for s in profile.token_seconds),
        decode_fixed=factor * profile.decode_fixed,
        per_decode=factor * profile.per_decode,
        per_kv_token=factor * profile.per_kv_token,
        per_prefill_token=factor * profile.per_prefill_token,
        per_prefill_context=factor * profile.per_prefill_context,
    )


def ttft_p99(report: Report, chosen: npt.NDArray[np.bool_]) -> float:
    return float(np.percentile((report.first_token_at - report.arrived_at)[chosen], 99))


def delivered(report: Report) -> float:
    """Seconds of ordinary work a second, of the requests that ended while others still came: a
    prompt's token counts for a seventh of a decoded one, as on this profile."""
    done = report.completed & (report.finished_at <= report.arrived_at[-1])
    workload = report.workload
    work = workload.prompt_len[done].sum() / 7 + workload.output_len[done].sum()
    return float(work / report.arrived_at[-1])


def alone(setup: Setup, workload: Workload, name: str) -> float:
    """p99 of TTFT of a tenant's own requests on a server with its share of the speed."""
    rows, times = np.flatnonzero(workload.tenants == name), workload.arrival_time
    assert times is not None
    lengths = replace(workload, arrival_time=None).take(rows)
    own = replace(lengths, arrival_time=times[rows] - times[rows[0]])
    slow = replace(setup, profile=slower(setup.profile, NUM_TENANTS), fairness=False)
    report = run(slow, own)
    return ttft_p99(report, report.completed)


def figures(admission: str, load: float, seed: int, num_requests: int) -> dict[str, Any]:
    """Of tenants that ask for less than their share: their p99 of TTFT over 1.5 times what it is on
    a server of their share and two steps, at the worst; and what all are served."""
    setup = Setup(load_profile("a100-llama2-7b"), admission)
    workload = trace(num_requests, load * CAPACITY[admission], seed)
    fair, unfair = run(replace(setup, fairness=True), workload), run(setup, workload)
    step_s = fair.result.finished_at / fair.result.num_steps
    quiet = [k for k, share in enumerate(shares_of_load()) if load * share < 1 / NUM_TENANTS]
    over: dict[str, list[float]] = {"fair": [], "unfair": []}
    for k in quiet:
        name = f"t{k + 1:02d}"
        bar = 1.5 * alone(setup, workload, name) + 2 * step_s
        for key, report in (("fair", fair), ("unfair", unfair)):
            over[key].append(ttft_p99(report, workload.tenants == name) / bar)
    return {
        "tenants_below_share": len(quiet),
        "worst_ttft_over_bar": max(over["fair"]),
        "median_ttft_over_bar": float(np.median(over["fair"])),
        "worst_ttft_over_bar_without": max(over["unfair"]),
        "throughput_over_without": delivered(fair) / delivered(unfair),
        "makespan_over_without": fair.result.finished_at / unfair.result.finished_at,
        "jain": fair.figures()["jain"],
        "jain_without": unfair.figures()["jain"],
        "preemptions": fair.result.num_preemptions,
        "preemptions_without": unfair.result.num_preemptions,
    }
