"""`penstock plan`: thresholds, budgets, memory and expected figures of a deployment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import options as cli
from penstock.cli.figures import print_side_by_side
from penstock.cli.simulator import (
    Load,
    Scenario,
    bad_input,
    simulates,
    with_thresholds,
    workers_of,
)
from penstock.cli.terminal import progress
from penstock.json_text import dumps

if TYPE_CHECKING:
    from penstock.config import PolicyConfig
    from penstock.sim.parallel import Workers
    from penstock.sim.planner import DeploymentPlan
    from penstock.sim.run import Setup
    from penstock.sim.workloads import Workload

_REQUESTS = 5000
"""Requests of a mix: short runs."""
_BASES = {
    "stages": "the paper's algorithm with all stages full; the runs below have no stages",
    "queues": "the paper's algorithm with all stages full and every segment's longest queue of an "
    "hour; the runs below do not pause requests between segments",
    "arrivals": "Poisson arrivals at their peak of an hour without waiting; the runs below are "
    "shorter and limited by memory",
}
"""Basis of the memory bound, and the reason why runs have other peaks."""


@simulates
def plan(
    load: Load,
    policy: cli.PolicyOption = None,
    delta: Annotated[
        float | None,
        typer.Option(
            metavar="P",
            help="Probability that the memory bound is exceeded within an hour. [0.001]",
        ),
    ] = None,
) -> None:
    """Plan a deployment for a workload at its rate.

    Thresholds, static limits and the memory bound come from the fluid model, the expected figures
    from a short simulation of each configuration, and of the bundle that `--policy` names.
    """
    from penstock.fluid.memory import DELTA
    from penstock.sim.planner import PlanError, mean_rate, plan_deployment

    with bad_input():
        if delta is not None and not 0 < delta < 1:
            raise PlanError(f"--delta is a probability between 0 and 1, not {delta:g}")
        base = Scenario(**vars(load), admission="fluid_guided").setup()
        made = load.make(load.rate, _REQUESTS)
        offered = load.rate or mean_rate(made)
        planned = plan_deployment(
            base.profile, made, offered, base.num_blocks * base.block_size, delta or DELTA
        )
        shown = made.select(slice(load.requests or _REQUESTS))
        with_thresholds(base, shown)
        configurations = planned.configurations
        if policy is not None:
            bundled = Scenario(**vars(load), policy=policy).setup()
            configurations[f"policy {policy}"] = with_thresholds(bundled, shown).admission
    with workers_of(load.workers, load.ray) as pool:
        expected = _expected(base, configurations, shown, load, pool)
    if load.json:
        figures = _figures(planned, offered)
        figures |= {"expected": expected["penstock"], "expected_by_configuration": expected}
        print(dumps(figures))
        return
    _print(planned, offered, expected)


def _expected(
    base: Setup,
    configurations: Mapping[str, PolicyConfig],
    workload: Workload,
    load: Load,
    workers: Workers,
) -> dict[str, dict[str, Any]]:
    """Return the figures of a run per configuration."""
    expected = {}
    with progress(len(configurations), "simulating") as advance:
        job = partial(_figures_of, base, workload, load)
        for name, figures in zip(
            configurations, workers.map(job, configurations.values()), strict=True
        ):
            expected[name] = figures
            advance(1)
    return expected


def _figures_of(
    base: Setup, workload: Workload, load: Load, chosen: PolicyConfig
) -> dict[str, Any]:
    from penstock.core.policies.registry import option_types
    from penstock.sim.run import run

    known = option_types("admission", chosen.name)
    told = {target: s for target, s in load.targets.items() if target in known}
    admission = chosen.with_defaults(told)
    figures = run(replace(base, admission=admission), workload).figures(
        load.ttft_p99, load.tpot_p99
    )
    return {"admission": admission.name, "options": admission.options, **figures}


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
        "serve_flags": planned.serve_flags,
    }


def _print(planned: DeploymentPlan, rate: float, expected: dict[str, dict[str, Any]]) -> None:
    thresholds = dict(planned.thresholds)
    algorithm, steps = thresholds.pop("algorithm"), thresholds.pop("stage_steps")
    print(f"{algorithm} at {rate:.4g} requests/s, stages of {steps} steps")
    for name, values in thresholds.items():
        print(f"  {name:13}{', '.join(f'{v:.4g}' for v in values)}")
    planned_for = planned.configurations
    labelled = {
        figures["admission"] if name in planned_for else name: figures
        for name, figures in expected.items()
    }
    _print_memory(planned, labelled)
    print(f"static server  {planned.static.token_budget} tokens a step, ", end="")
    print(f"{planned.static.max_num_seqs} requests at once")
    flags = planned.serve_flags
    print(f"penstock serve {flags['penstock']}")
    print(f"  or --config FILE with {dumps(flags['penstock_config'])}")
    print(f"vllm serve     {flags['vllm']}")
    print_side_by_side(labelled, f"expected at {rate:.4g} requests/s, each simulated")


def _print_memory(planned: DeploymentPlan, expected: dict[str, dict[str, Any]]) -> None:
    memory = planned.memory
    peaks = (f"{e['kv_peak_tokens']:,} of {label}" for label, e in expected.items())
    chance = f"but for a probability {memory.delta:g} within an hour" if memory.delta else "ever"
    print(f"KV tokens      {memory.mean:,.0f} in the mean of the fluid model (M*)")
    print(f"               {memory.batch:,.0f} in a full batch (M^π)")
    print(f"               {memory.bound:,.0f} at most, {chance}:")
    print(f"               {_BASES[memory.basis]}")
    print(f"               {', '.join(peaks)}: peaks of the runs below")
    if memory.bound > planned.kv_tokens:
        print(f"               there are {planned.kv_tokens:,}: preemptions may occur")
