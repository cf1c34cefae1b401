"""`penstock simulate`: one run on the virtual clock."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import options as cli
from penstock.cli.figures import over_seeds, print_explanation, print_figures, print_over_seeds
from penstock.cli.simulator import (
    Load,
    Scenario,
    bad_input,
    describe,
    simulates,
    with_thresholds,
    workers_of,
)
from penstock.cli.terminal import progress, with_progress
from penstock.json_text import dumps

if TYPE_CHECKING:
    from penstock.sim.plots import Sampler
    from penstock.sim.run import Setup
    from penstock.sim.workloads import Workload

# Requests of a mix, and samples of a plotted run.
_REQUESTS = 10_000
_SAMPLES = 1000


@simulates
def simulate(
    scenario: Scenario,
    draft_servers: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.yaml",
            help="Draft servers, their links and their acceptance.",
        ),
    ] = None,
    pipeline: Annotated[
        str | None, typer.Option(metavar="off|N|auto|async", help=cli.PIPELINE_HELP)
    ] = None,
    seeds: cli.SeedsOption = 1,
    plot: cli.PlotOption = None,
    explain: Annotated[
        str | None,
        typer.Option(metavar="REQUEST", help="What request 0, 1, … got in each round, and why."),
    ] = None,
) -> None:
    """Simulate a workload on the virtual clock, once or with several seeds."""
    from penstock.sim.explain import check_request
    from penstock.sim.plots import PlotError, check_target, plot_run
    from penstock.sim.profiles import paces
    from penstock.sim.servers import deal_to_tenants

    def prepared(number: int) -> tuple[Setup, Workload]:
        own = replace(scenario, seed=scenario.seed + number)
        base = own.setup(draft_servers, pipeline)
        pace = paces(base.profile.spread, seeds)[number]
        base = replace(base, profile=base.profile.served(pace))
        made = deal_to_tenants(own.make(own.rate, _REQUESTS), base.draft_servers)
        return with_thresholds(base, made), made

    with bad_input():
        runs = [prepared(number) for number in range(seeds)]
        if plot is not None:
            if seeds > 1:
                raise PlotError("--plot draws one run: take it without --seeds")
            check_target(plot)
        if explain is not None:
            check_request(explain, len(runs[0][1]), seeds)
    setup, made = runs[0]
    title = f"{made.name}, {setup.admission.name}, {setup.profile.name}"
    if seeds > 1:
        with workers_of(scenario.workers, scenario.ray) as pool:
            found = pool.map(partial(_figures, scenario), runs)
            by_seed = list(with_progress(found, len(runs), "simulating"))
        if scenario.json:
            both = {"over_seeds": over_seeds(by_seed), "by_seed": by_seed}
            print(dumps({**describe(setup, made), **both}))
            return
        print_over_seeds(by_seed, f"{title}, {seeds} seeds")
        return
    figures, sampler = _run(setup, made, scenario, is_sampled=plot is not None, explain=explain)
    if plot is not None and sampler is not None:
        with bad_input():
            plot_run(sampler, plot, title)
    if scenario.json:
        print(dumps({**describe(setup, made), **figures}))
        return
    print_figures(figures, title)
    if explain is not None:
        print_explanation(figures["explain"], f"request {explain}")


def _figures(load: Load, run: tuple[Setup, Workload]) -> dict[str, Any]:
    return _run(*run, load)[0]


def _run(
    setup: Setup,
    workload: Workload,
    load: Load,
    *,
    is_sampled: bool = False,
    explain: str | None = None,
) -> tuple[dict[str, Any], Sampler | None]:
    """Return the figures of a run, `explain` of a request among them, and samples for a plot."""
    from penstock.sim.drafters import DrafterCounts
    from penstock.sim.driver import FinishedRequests
    from penstock.sim.explain import Explanation
    from penstock.sim.planner import length_classes
    from penstock.sim.plots import Sampler
    from penstock.sim.run import run

    samplers: list[Sampler] = []
    explained: list[Explanation] = []
    drafting = DrafterCounts()

    def watch(scheduler: Any) -> list[Any]:
        if explain is not None:
            explained.append(Explanation(scheduler, explain))
        if is_sampled:
            assert workload.arrival_time is not None
            every = float(workload.arrival_time[-1]) / _SAMPLES
            classes = length_classes(setup.admission, workload)
            samplers.append(Sampler(scheduler, every, classes))
        return [*explained, *samplers]

    with progress(len(workload), "simulating") as advance:
        instruments = (FinishedRequests(advance), drafting)
        # A request that is counted in a group is in no plan by itself.
        own = setup if explain is None else replace(setup, counted=False)
        report = run(own, workload, instruments=instruments, watch=watch)
    figures = report.figures(load.ttft_p99, load.tpot_p99)
    if setup.drafters or setup.draft_servers:
        records = report.result.records.values()
        figures["draft_tokens_proposed"] = sum(r.num_proposed for r in records)
        figures["draft_tokens_accepted"] = sum(r.num_accepted for r in records)
        figures |= drafting.figures(len(records))
    if explained:
        figures["explain"] = explained[0].rows
    return figures, samplers[0] if samplers else None
