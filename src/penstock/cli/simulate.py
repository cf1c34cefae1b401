"""`penstock simulate`: one run on the virtual clock."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import options as cli
from penstock.cli.figures import over_seeds, print_figures, print_over_seeds
from penstock.cli.simulator import (
    LatencyTargets,
    LoadOptions,
    SimulatedDrafters,
    bad_input,
    describe,
    make_server,
    workers_of,
)
from penstock.cli.terminal import FinishedRequests, progress
from penstock.json_text import dumps

if TYPE_CHECKING:
    from penstock.sim.parallel import Workers
    from penstock.sim.plots import Sampler
    from penstock.sim.run import Setup
    from penstock.sim.workloads import Workload

DEFAULT_REQUESTS = 10_000
_SAMPLES = 1000


def simulate(
    workload: cli.WorkloadOption,
    profile: cli.ProfileOption,
    admission: cli.AdmissionOption,
    allocation: Annotated[str | None, cli.allocation_option("--draft-servers")] = None,
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
    seeds: cli.SeedsOption = 1,
    workers: cli.WorkersOption = None,
    ray: cli.RayOption = None,
    plot: cli.PlotOption = None,
    as_json: cli.JsonOption = False,
) -> None:
    """One run of a workload through the scheduler, on the virtual clock; or one for each seed."""
    from penstock.sim.plots import PlotError, check_target, plot_run
    from penstock.sim.servers import deal_to_tenants

    targets = LatencyTargets(ttft_p99, tpot_p99)
    if allocation is None:
        allocation = cli.DRAFT_SERVERS_ALLOCATION if draft_servers else cli.DEFAULT_ALLOCATION
    policies = {"admission": admission, "allocation": allocation, "selection": selection}

    def prepared(seed: int) -> tuple[Setup, Workload]:
        load = LoadOptions(workload, requests, arrivals, time_scale, seed, DEFAULT_REQUESTS)
        server = make_server(
            profile,
            policies,
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
        return server.setup(made), made

    with bad_input():
        runs = [prepared(number) for number in range(seed, seed + seeds)]
        if plot is not None:
            if seeds > 1:
                raise PlotError("--plot draws one run: take it without --seeds")
            check_target(plot)
    setup, made = runs[0]
    title = f"{made.name}, {admission}, {setup.profile.name}"
    if seeds > 1:
        with workers_of(workers, ray) as pool:
            by_seed = _run_each(runs, targets, pool)
        if as_json:
            figures = {"over_seeds": over_seeds(by_seed), "by_seed": by_seed}
            print(dumps({**describe(setup, made), **figures}))
            return
        print_over_seeds(by_seed, f"{title}, {seeds} seeds")
        return
    figures, sampler = _run(setup, made, targets, is_sampled=plot is not None)
    if plot is not None and sampler is not None:
        with bad_input():
            plot_run(sampler, plot, title)
    if as_json:
        print(dumps({**describe(setup, made), **figures}))
        return
    print_figures(figures, title)


def _run_each(
    runs: list[tuple[Setup, Workload]], targets: LatencyTargets, workers: Workers
) -> list[dict[str, Any]]:
    """Figures of every run."""
    found = []
    with progress(len(runs), "simulating") as advance:
        for figures in workers.map(partial(_figures, targets), runs):
            found.append(figures)
            advance(1)
    return found


def _figures(targets: LatencyTargets, run: tuple[Setup, Workload]) -> dict[str, Any]:
    return _run(*run, targets)[0]


def _run(
    setup: Setup, workload: Workload, targets: LatencyTargets, *, is_sampled: bool = False
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
