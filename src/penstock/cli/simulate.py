"""`penstock simulate`: one run on the virtual clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import options as cli
from penstock.cli.figures import print_figures
from penstock.cli.simulator import (
    LatencyTargets,
    LoadOptions,
    SimulatedDrafters,
    bad_input,
    describe,
    make_server,
)
from penstock.cli.terminal import FinishedRequests, progress

if TYPE_CHECKING:
    from penstock.sim.plots import Sampler
    from penstock.sim.run import Setup
    from penstock.sim.workloads import Workload

DEFAULT_REQUESTS = 10_000
_SAMPLES = 1000


def simulate(
    workload: cli.WorkloadOption,
    profile: cli.ProfileOption,
    admission: cli.AdmissionOption,
    allocation: cli.AllocationOption = "throughput",
    selection: cli.SelectionOption = "single",
    rate: cli.RateOption = None,
    arrivals: cli.ArrivalsOption = None,
    time_scale: cli.TimeScaleOption = 1.0,
    kv_tokens: cli.KvTokensOption = None,
    block_size: cli.BlockSizeOption = 1,
    settings: cli.SetOption = None,
    fairness: cli.FairnessOption = False,
    tenant_weight: cli.TenantWeightOption = None,
    drafter: cli.SimulatedDrafterOption = None,
    acceptance: cli.AcceptanceOption = None,
    drafter_seconds: cli.DrafterSecondsOption = None,
    drafter_capacity: cli.DrafterCapacityOption = None,
    draft_servers: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.yaml",
            help="Speculate across a network: draft servers, their links and their acceptance.",
        ),
    ] = None,
    pipeline: Annotated[
        str, typer.Option(metavar="off|N|auto|async", help=cli.PIPELINE_HELP)
    ] = "off",
    ttft_p99: cli.TtftOption = None,
    tpot_p99: cli.TpotOption = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help=f"Default: the whole trace, or {DEFAULT_REQUESTS}."),
    ] = None,
    seed: cli.SeedOption = 0,
    plot: cli.PlotOption = None,
    as_json: cli.JsonOption = False,
) -> None:
    """One run of a workload through the scheduler, on the virtual clock."""
    from penstock.sim.plots import check_target, plot_run
    from penstock.sim.servers import deal_to_tenants

    targets = LatencyTargets(ttft_p99, tpot_p99)
    load = LoadOptions(workload, requests, arrivals, time_scale, seed, DEFAULT_REQUESTS)
    with bad_input():
        server = make_server(
            profile,
            {"admission": admission, "allocation": allocation, "selection": selection},
            settings or (),
            SimulatedDrafters(drafter, acceptance, drafter_seconds, drafter_capacity),
            kv_tokens=kv_tokens,
            block_size=block_size,
            targets=targets,
            seed=seed,
            fairness=fairness,
            tenant_weights=tenant_weight or (),
            draft_servers=draft_servers,
            pipeline=pipeline,
        )
        made = deal_to_tenants(load.make(rate), server.base.draft_servers)
        setup = server.setup(made)
        if plot is not None:
            check_target(plot)
    figures, sampler = _run(setup, made, targets, is_sampled=plot is not None)
    title = f"{made.name}, {admission}, {setup.profile.name}"
    if plot is not None and sampler is not None:
        with bad_input():
            plot_run(sampler, plot, title)
    if as_json:
        print(json.dumps({**describe(setup, made), **figures}, allow_nan=False))
        return
    print_figures(figures, title)


def _run(
    setup: Setup, workload: Workload, targets: LatencyTargets, *, is_sampled: bool
) -> tuple[dict[str, Any], Sampler | None]:
    """Figures of a run, and what was seen on the way if it is to be drawn."""
    from penstock.sim.drafters import DrafterCounts
    from penstock.sim.planner import length_classes
    from penstock.sim.plots import Sampler
    from penstock.sim.run import run

    samplers: list[Sampler] = []
    drafting = DrafterCounts()

    def watch(scheduler: Any) -> Sampler:
        assert workload.arrival_time is not None
        every = float(workload.arrival_time[-1]) / _SAMPLES
        classes = length_classes(setup.admission.options, workload)
        samplers.append(Sampler(scheduler, every, classes))
        return samplers[0]

    with progress(len(workload), "simulating") as advance:
        instruments = (FinishedRequests(advance), drafting)
        report = run(setup, workload, instruments=instruments, watch=watch if is_sampled else None)
    figures = report.figures(targets.ttft_p99, targets.tpot_p99)
    if setup.drafters or setup.draft_servers:
        records = report.result.records.values()
        figures["draft_tokens_proposed"] = sum(r.num_proposed for r in records)
        figures["draft_tokens_accepted"] = sum(r.num_accepted for r in records)
        figures |= drafting.figures(len(records))
    return figures, samplers[0] if samplers else None
