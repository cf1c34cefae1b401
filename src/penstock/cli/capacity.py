"""`penstock capacity`: the largest load that a policy sustains, and the fluid bound."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli import options as cli
from penstock.cli.simulator import (
    Load,
    Scenario,
    bad_input,
    describe,
    simulates,
    with_thresholds,
    workers_of,
)
from penstock.cli.terminal import one_line, progress, with_progress
from penstock.json_text import dumps

if TYPE_CHECKING:
    from penstock.sim.capacity import MeasuredCapacity
    from penstock.sim.parallel import Workers
    from penstock.sim.plots import LoadPoint
    from penstock.sim.run import Setup
    from penstock.sim.workloads import Workload

# Requests of a mix; the search's range as a share of its top; how often it moves below its range;
# plotted loads as shares of it, or of the bound.
_REQUESTS = 60_000
_LEAST = 0.05
_DESCENTS = 3
PLOTTED = (0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0, 1.1)


@simulates
def capacity(scenario: Scenario, seeds: cli.SeedsOption = 1, plot: cli.PlotOption = None) -> None:
    """Find the largest stable load by bisection, and compare it with the fluid bound.

    Stable: the backlog does not grow over the second half of the arrivals (95% interval), and the
    p99 of TTFT and TPOT meet their targets. Too short traces are rejected. With generated arrivals
    the requests of a trace come in random order.
    """
    from penstock.sim.planner import load_bound
    from penstock.sim.plots import check_target

    with bad_input():
        base = scenario.setup()
        lengths = LoadedWorkload.from_scenario(scenario)
        kv_tokens = base.num_blocks * base.block_size
        bound = load_bound(
            base.profile, lengths.workload, kv_tokens, base.acceptance, base.drafters
        )
        highest = bound if scenario.rate is None else scenario.rate
        # Check the setup before the search.
        with_thresholds(base, lengths.at(highest * _LEAST))
        if plot is not None:
            check_target(plot)
    numbers = range(scenario.seed, scenario.seed + seeds)
    loads = [replace(scenario, seed=number) for number in numbers]
    with workers_of(scenario.workers, scenario.ray) as pool:
        found = _search_each(base, loads, highest, pool)
        if plot is not None:
            largest = _mean(found)
            rates = [share * largest for share in PLOTTED if largest > 0]
            marks = {"capacity": largest, "fluid bound": bound}
            plot_loads(base, lengths, rates, marks, plot, pool)
    figures = _figures(found, bound)
    if scenario.json:
        print(dumps({**describe(base, lengths.workload), **figures}))
        return
    _print(figures)


@dataclass(frozen=True, slots=True)
class LoadedWorkload:
    """A workload at any rate."""

    load: Load
    workload: Workload
    recorded_rate: float | None
    """Requests per second of recorded arrivals; None if arrivals are generated."""

    @classmethod
    def from_scenario(cls, load: Load, requests: int = _REQUESTS) -> LoadedWorkload:
        """Load the requests of `load`, of a mix so many. Raises: WorkloadError, PlanError.

        Recorded arrivals are scaled. Generated ones come with the requests in random order: a
        trace's second half, by which a load is judged, may be lighter than its first.
        """
        from penstock.sim.arrivals import parse_arrivals
        from penstock.sim.planner import mean_rate
        from penstock.sim.workloads import MIXES, load_workload

        generated = load.arrivals is not None and parse_arrivals(load.arrivals) is not None
        if load.arrivals is None:
            generated = load.workload in MIXES or (
                Path(load.workload).exists() and load_workload(load.workload).arrival_time is None
            )
        made = load.make(1.0 if generated else None, requests)
        return cls(load, made, None if generated else mean_rate(made))

    def at(self, rate: float) -> Workload:
        from penstock.sim.arrivals import check_positive

        check_positive("rate", rate)
        times = self.workload.arrival_time
        if self.recorded_rate is None or times is None:
            return self.load.make(rate, len(self.workload)).shuffled(self.load.seed)
        return replace(self.workload, arrival_time=times * (self.recorded_rate / rate))


def _search_each(
    base: Setup,
    loads: list[Scenario],
    highest: float,
    workers: Workers,
) -> list[MeasuredCapacity]:
    from penstock.sim.capacity import TooShort

    # One worker per load, but all workers for a last load that would run alone.
    num_each = 0 if workers.num == 1 else len(loads) - (len(loads) % workers.num == 1)
    job = partial(search, base, highest)
    found = []
    with one_line(TooShort), progress(None, "searching") as advance:
        for capacity in workers.map(job, loads[:num_each]):
            found.append(capacity)
            advance(1)
        for load in loads[num_each:]:
            found.append(job(load, workers, lambda *_: advance(1)))
    return found


def search(
    base: Setup,
    highest: float,
    load: Scenario,
    workers: Workers | None = None,
    on_try: Callable[[float, bool], None] | None = None,
) -> MeasuredCapacity:
    """Return the capacity for a load; 0 if none is found after _DESCENTS ranges. Raises: TooShort.

    Thresholds are planned for every rate; a rate without feasible thresholds is not sustained."""
    from penstock.sim import capacity as bisection
    from penstock.sim.parallel import HERE

    workload_at = LoadedWorkload.from_scenario(load).at
    for descent in range(_DESCENTS):
        found = bisection.capacity(
            partial(_setup_at, base, workload_at),
            workload_at,
            highest * _LEAST ** (descent + 1),
            highest * _LEAST**descent,
            criterion=bisection.Criterion(**load.targets),
            on_try=on_try,
            workers=workers or HERE,
        )
        if found.requests_per_s > 0:
            break
    return found


def _setup_at(base: Setup, workload_at: Callable[[float], Workload], rate: float) -> Setup | None:
    """Return the setup at a rate; None if no thresholds are feasible."""
    from penstock.sim.planner import PlanError

    try:
        return with_thresholds(base, workload_at(rate))
    except PlanError:
        return None


def measure(base: Setup, workload_at: Callable[[float], Workload], rate: float) -> LoadPoint | None:
    """Measure a whole run at a rate; None if no thresholds are feasible."""
    from penstock.sim.plots import LoadPoint
    from penstock.sim.run import run

    setup = _setup_at(base, workload_at, rate)
    if setup is None:
        return None
    figures = run(setup, workload_at(rate)).figures()
    mean = figures["latency_s"]["mean"]
    return LoadPoint(rate, figures["throughput_requests_per_s"], math.nan if mean is None else mean)


def plot_loads(
    base: Setup,
    lengths: LoadedWorkload,
    rates: Sequence[float],
    marks: Mapping[str, float],
    path: Path,
    workers: Workers,
) -> None:
    """Measure runs at these rates, and plot them. Exit with code 2 if that fails."""
    from penstock.sim.plots import plot_load

    found = workers.map(partial(measure, base, lengths.at), rates)
    points = [p for p in with_progress(found, len(rates), "measuring") if p is not None]
    title = f"{lengths.workload.name}, {base.admission.name}, {base.profile.name}"
    with bad_input():
        plot_load(points, marks, path, title)


def _mean(found: Sequence[MeasuredCapacity]) -> float:
    return statistics.fmean(capacity.requests_per_s for capacity in found)


def _figures(found: list[MeasuredCapacity], bound: float) -> dict[str, Any]:
    """Return the mean over seeds with its interval; for one seed, the interval of its run."""
    from penstock.sim.capacity import Estimate

    by_seed = [capacity.requests_per_s for capacity in found]
    if len(found) > 1:
        mean = Estimate.from_values(by_seed)
        interval = [mean.low, mean.high]
    else:
        interval = [found[0].low, found[0].high]
    return {
        "capacity_requests_per_s": _mean(found),
        "bound_requests_per_s": bound,
        "fraction": _mean(found) / bound,
        "interval_95": interval,
        "by_seed": by_seed,
    }


def _print(figures: dict[str, Any]) -> None:
    low, high = figures["interval_95"]
    seeds = f", {len(figures['by_seed'])} seeds" if len(figures["by_seed"]) > 1 else ""
    print(f"capacity     {figures['capacity_requests_per_s']:.4g} requests/s")
    print(f"95% interval {low:.4g} to {high:.4g}{seeds}")
    print(f"fluid bound  {figures['bound_requests_per_s']:.4g} requests/s")
    print(f"fraction     {figures['fraction']:.1%}")
