"""The largest load that a policy sustains, by bisection on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.sim.run import FloatArray, Report, Setup, run
from penstock.sim.workloads import Workload


@dataclass(frozen=True)
class Criterion:
    """What counts as sustained: a backlog under `max_backlog` of the requests when the last one
    arrives, and at least `min_delivered` of the offered tokens delivered by then; where asked for,
    p99 of TTFT, as far as it is known, and of TPOT within targets, in seconds."""

    max_backlog: float = 0.015
    min_delivered: float = 0.96
    ttft_p99: float | None = None
    tpot_p99: float | None = None

    def holds(self, report: Report) -> bool:
        if report.backlog >= self.max_backlog:
            return False
        if _delivered(report) < self.min_delivered:
            return False
        waits = _waits(report)
        within = self.ttft_p99 is None or np.percentile(waits, 99) <= self.ttft_p99
        if within and self.tpot_p99 is not None and len(report.tpot):
            within = np.percentile(report.tpot, 99) <= self.tpot_p99
        return bool(within)


def _waits(report: Report) -> FloatArray:
    """Arrival to first token, or to the last arrival where none has come by then: a policy must not
    look punctual because it never serves those that are late."""
    until = np.where(np.isnan(report.first_token_at), report.arrived_at[-1], report.first_token_at)
    waits: FloatArray = (until - report.arrived_at)[~report.refused]
    return waits


def _delivered(report: Report) -> float:
    """Share of the offered tokens that belong to requests finished when the last one arrives."""
    end = report.arrived_at[-1]
    offered = np.where(report.refused, 0, report.workload.output_len)
    delivered = np.where(report.finished_at <= end, report.workload.output_len, 0)
    return float(delivered.sum() / max(offered.sum(), 1))


def capacity(
    setup: Setup | Callable[[float], Setup | None],
    workload_at: Callable[[float], Workload],
    low: float,
    high: float,
    *,
    criterion: Criterion = Criterion(),
    tolerance: float = 0.005,
    on_try: Callable[[float, bool], None] | None = None,
) -> float:
    """Largest load in requests per second between `low` and `high` that is sustained, to within a
    relative `tolerance`; `workload_at(rate)` must be the same requests at another rate. 0 if not
    even `low` is; the range is widened upwards where `high` still is. A setup that depends on the
    load is a function of it; None: there is none, so the load is not sustained."""

    def holds(rate: float) -> bool:
        workload = workload_at(rate)
        assert workload.arrival_time is not None
        server = setup if isinstance(setup, Setup) else setup(rate)
        end = float(workload.arrival_time[-1])
        sustained = server is not None and criterion.holds(run(server, workload, until=end))
        if on_try is not None:
            on_try(rate, sustained)
        return sustained

    while holds(high):
        low, high = high, 2 * high
    best = 0.0
    while high - low > tolerance * high:
        middle = 0.5 * (low + high)
        if holds(middle):
            best = low = middle
        else:
            high = middle
    if best == 0.0 and holds(low):
        best = low
    return best
