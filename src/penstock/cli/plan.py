"""`penstock plan`: thresholds, budgets, memory and what to expect of a deployment."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.drafter_options import DrafterTexts
from penstock.cli.figures import print_figures
from penstock.cli.progress import progress
from penstock.cli.simulator import Load, Targets, bad_input, make_server
from penstock.cli.simulator_options import (
    ArrivalsOption,
    JsonOption,
    KvTokensOption,
    ProfileOption,
    RateOption,
    SeedOption,
    TimeScaleOption,
    TpotOption,
    TtftOption,
    WorkloadOption,
)

if TYPE_CHECKING:
    from penstock.sim.planner import DeploymentPlan

DEFAULT_REQUESTS = 5000
_POLICIES = {"admission": "fluid_guided", "allocation": "throughput", "selection": "single"}


def plan(
    workload: WorkloadOption,
    profile: ProfileOption,
    rate: RateOption = None,
    arrivals: ArrivalsOption = None,
    time_scale: TimeScaleOption = 1.0,
    kv_tokens: KvTokensOption = None,
    ttft_p99: TtftOption = None,
    tpot_p99: TpotOption = None,
    delta: Annotated[
        float | None,
        typer.Option(help="Probability that the memory bound is exceeded within an hour. [0.001]"),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=2, help=f"To simulate, at most. [{DEFAULT_REQUESTS}]")
    ] = None,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Plan a deployment for a workload at its rate.

    Thresholds, the limits of a static server and the memory bound are the fluid model's; what to
    expect is a short run of the policy that finds all that by itself, fluid_guided.
    """
    from penstock.sim.planner import DELTA, PlanError, mean_rate, plan_deployment
    from penstock.sim.run import run

    with bad_input():
        if delta is not None and not 0 < delta < 1:
            raise PlanError(f"--delta is a probability between 0 and 1, not {delta:g}")
        server = make_server(
            profile,
            _POLICIES,
            (),
            DrafterTexts(),
            kv_tokens=kv_tokens,
            block_size=1,
            targets=Targets(ttft_p99, tpot_p99),
            seed=seed,
        )
        load = Load(workload, requests, arrivals, time_scale, seed, DEFAULT_REQUESTS)
        made = load.make(rate)
        offered = rate or mean_rate(made)
        planned = plan_deployment(
            server.base.profile, made, offered, server.kv_tokens, delta or DELTA
        )
        shown = made.take(slice(requests or DEFAULT_REQUESTS))
        setup = server.setup(shown)
    with progress(None, "simulating"):
        expected = run(setup, shown).figures(ttft_p99, tpot_p99)
    if as_json:
        print(json.dumps({**_figures(planned, offered), "expected": expected}, allow_nan=False))
        return
    _print(planned, offered)
    print_figures(expected, f"expected of fluid_guided at {offered:.4g} requests/s")


def _figures(planned: DeploymentPlan, rate: float) -> dict[str, Any]:
    return {
        "rate_requests_per_s": rate,
        "thresholds": planned.thresholds,
        "token_budget": planned.static.token_budget,
        "max_num_seqs": planned.static.max_num_seqs,
        "kv_bound_tokens": planned.kv_bound_tokens,
        "kv_tokens": planned.kv_tokens,
        "delta": planned.delta,
        "serve_flags": planned.serve_flags,
    }


def _print(planned: DeploymentPlan, rate: float) -> None:
    thresholds = dict(planned.thresholds)
    algorithm, steps = thresholds.pop("algorithm"), thresholds.pop("stage_steps")
    print(f"{algorithm} at {rate:.4g} requests/s, stages of {steps} steps")
    for name, values in thresholds.items():
        print(f"  {name:13}{', '.join(f'{v:.4g}' for v in values)}")
    chance = f"but for a probability {planned.delta:g} within an hour" if planned.delta else "ever"
    print(f"memory         at most {planned.kv_bound_tokens:,.0f} KV tokens {chance}")
    if planned.kv_bound_tokens > planned.kv_tokens:
        print(
            f"               more than the {planned.kv_tokens:,} there are: preemptions may occur"
        )
    print(f"static server  {planned.static.token_budget} tokens a step, ", end="")
    print(f"{planned.static.max_num_seqs} requests at once")
    flags = planned.serve_flags
    print(f"penstock serve {flags['penstock']}")
    print(f"  or --config FILE with {json.dumps(flags['penstock_config'])}")
    print(f"vllm serve     {flags['vllm']}")
