"""`penstock plan`: what to start for a load, and what to expect of it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import options as cli
from penstock.cli.capacity import PLOTTED, LoadedWorkload, plot_loads
from penstock.cli.figures import print_side_by_side
from penstock.cli.simulator import (
    Load,
    Scenario,
    bad_input,
    simulates,
    with_thresholds,
    workers_of,
)
from penstock.cli.terminal import with_progress
from penstock.json_text import dumps

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.config import PolicyConfig
    from penstock.sim.parallel import Workers
    from penstock.sim.planner import DeploymentPlan
    from penstock.sim.run import FloatArray, Setup
    from penstock.sim.workloads import Workload

_REQUESTS = 5000
"""Requests of a mix: short runs."""
_MARGIN = 1.25
"""Advised memory over the most that a run held: blocks are not full, other hours are busier."""


@simulates
def plan(
    load: Load,
    policy: cli.PolicyOption = None,
    delta: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            help="Of `--json`: probability that `kv_bound_tokens` is exceeded in an hour. [0.001]",
        ),
    ] = None,
    plot: cli.PlotOption = None,
) -> None:
    """Say what to start for a workload at its rate, what to expect, and how sure that is.

    Limits come from a model of mean rates (in `--json` with its thresholds and memory bound),
    memory and figures from a simulation of each configuration, and of the bundle that `--policy`
    names. `--plot` draws throughput and latency of what is advised against the load, beyond what
    any policy serves.
    """
    from penstock.fluid.memory import DELTA
    from penstock.sim.planner import PlanError, fitting, load_bound, mean_rate, plan_deployment
    from penstock.sim.plots import check_target

    with bad_input():
        if plot is not None:
            check_target(plot)
        if delta is not None and not 0 < delta < 1:
            raise PlanError(f"--delta is a probability between 0 and 1, not {delta:g}")
        base = Scenario(**vars(load)).setup()
        made = load.make(load.rate, _REQUESTS)
        offered = load.rate or mean_rate(made)
        most = base.num_blocks * base.block_size
        planned = plan_deployment(base.profile, made, offered, most, delta or DELTA)
        served = fitting(made, most)
        least = int((served.prompt_len + served.output_len).max())
        shown = made.select(slice(load.requests or _REQUESTS))
        with_thresholds(base, shown)
        configurations = planned.configurations
        if policy is not None:
            bundled = Scenario(**vars(load), policy=policy).setup()
            configurations[f"policy {policy}"] = with_thresholds(bundled, shown).admission
    with workers_of(load.workers, load.ray) as pool:
        job = partial(_figures_of, base, shown, load, least)
        found = pool.map(job, configurations.values())
        each = with_progress(found, len(configurations), "simulating")
        expected = dict(zip(configurations, each, strict=True))
        advised = expected["penstock"]
        memory = advised["kv_tokens"]
        bound = load_bound(base.profile, made, memory, base.acceptance, base.drafters)
        if plot is not None:
            chosen = configurations["penstock"].from_name(
                advised["admission"], **advised["options"]
            )
            setup = replace(base, admission=chosen, kv_tokens=memory)
            _plot(setup, load, offered, bound, plot, pool)
    flags = planned.serve_flags({name: figures["kv_tokens"] for name, figures in expected.items()})
    if load.json:
        figures = {**_figures(planned, offered), "state_slots": base.profile.state_slots}
        figures |= {"bound_requests_per_s": bound, "serve_flags": flags}
        figures |= {"expected": advised, "expected_by_configuration": expected}
        print(dumps(figures))
        return
    print(f"for {offered:.4g} requests/s of {load.workload} on {load.profile}, start")
    print(f"  penstock serve MODEL {flags['penstock']}")
    missed = [name.upper() for name, is_met in advised.get("slo_met", {}).items() if not is_met]
    if missed:
        print(f"which misses the target of {' and of '.join(missed)}: see p99 below")
    _print_expected(expected, flags)
    _print_how_sure(planned, offered, bound, advised, base.profile.spread)
    if base.profile.state_slots is not None:
        print(f"  requests at once: {base.profile.state_slots:,} recurrent states have room")


def _figures_of(
    base: Setup, workload: Workload, load: Load, least: int, chosen: PolicyConfig
) -> dict[str, Any]:
    """Return the figures of a run with the memory that it needs, `least` or more, among them."""
    from penstock.core.policies.registry import policy_class
    from penstock.sim.run import run

    limits = policy_class("admission", chosen.name).limits
    admission = chosen.with_defaults(limits.given(**load.targets))

    def played(kv_tokens: int) -> dict[str, Any]:
        setup = replace(base, admission=admission, kv_tokens=kv_tokens)
        report = run(setup, workload)
        interval = _interval(report.latency)
        figures = report.figures(load.ttft_p99, load.tpot_p99)
        return {"kv_tokens": kv_tokens, "latency_mean_interval_95": interval, **figures}

    most = base.num_blocks * base.block_size
    found = played(most)
    kv_tokens = max(least, math.ceil(_MARGIN * found["kv_peak_tokens"]))
    while kv_tokens < most:
        less = played(kv_tokens)
        if _serves_as_well(less, found):
            found = less
            break
        kv_tokens *= 2
    return {"admission": admission.name, "options": admission.options, **found}


def _plot(
    setup: Setup, load: Load, offered: float, bound: float, path: Path, workers: Workers
) -> None:
    lengths = LoadedWorkload.from_scenario(load, _REQUESTS)
    rates = sorted({offered, *(share * bound for share in PLOTTED)})
    marks = {"this load": offered, "most of any policy": bound}
    plot_loads(setup, lengths, rates, marks, path, workers)


def _interval(latency: FloatArray) -> list[float] | None:
    """Return the 95% interval of a run's mean, by the means of ten parts."""
    from penstock.sim.capacity import Estimate

    if len(latency) < 10:
        return None
    ends = [len(latency) * i // 10 for i in range(11)]
    mean = Estimate.from_values([latency[a:b].mean() for a, b in pairwise(ends)])
    return [mean.low, mean.high]


def _serves_as_well(less: dict[str, Any], plenty: dict[str, Any]) -> bool:
    """Return whether a run with less memory serves the load as one with plenty does."""
    interval = plenty["latency_mean_interval_95"]
    counts = ("requests_refused", "requests_unfinished", "preemptions")
    is_slower = interval is not None and less["latency_s"]["mean"] > interval[1]
    return not is_slower and all(less[name] <= plenty[name] for name in counts)


def _figures(planned: DeploymentPlan, rate: float) -> dict[str, Any]:
    memory = planned.memory
    return {
        "rate_requests_per_s": rate,
        "thresholds": planned.thresholds,
        "token_budget": planned.static.token_budget,
        "max_num_seqs": planned.static.max_num_seqs,
        "kv_mean_tokens": memory.mean,
        "kv_batch_tokens": memory.batch,
        "kv_bound_tokens": memory.bound,
        "kv_bound_basis": memory.basis,
        "kv_tokens": planned.kv_tokens,
        "delta": memory.delta,
    }


def _print_expected(expected: dict[str, dict[str, Any]], flags: dict[str, Any]) -> None:
    names = {"penstock": "penstock", "penstock_config": "with FILE", "vllm": "vllm"}
    labelled = {names.get(name, name): figures for name, figures in expected.items()}
    requests = expected["penstock"]["requests_completed"]
    print_side_by_side(labelled, f"expected: simulations of {requests:,} requests")
    print(f"with FILE: penstock serve MODEL --config FILE, {dumps(flags['penstock_config'])}")
    print(f"vllm: vllm serve MODEL {flags['vllm']}")


def _print_how_sure(
    planned: DeploymentPlan, rate: float, bound: float, advised: dict[str, Any], spread: float
) -> None:
    print("how sure")
    if advised["latency_mean_interval_95"] is not None:
        low, high = advised["latency_mean_interval_95"]
        print(f"  mean latency: {low:.4g} to {high:.4g} s (95% interval)")
    print(f"  load: {rate / bound:.0%} of the {bound:.4g} requests/s that no policy exceeds")
    print("  memory: a quarter above the peak, or more where that is slower; ", end="")
    print(f"there are {planned.kv_tokens:,} tokens; a request larger than --kv-tokens is refused")
    if spread:
        print(f"  times: the profile's, which varied by {spread:.1%} while it was measured")
    else:
        print("  times: the profile's; `penstock profile measure` takes those of your machine")
