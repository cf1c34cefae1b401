"""WAIT paper, theorems 5.1, B.1 and B.2: with memory above their bound, Nested WAIT exceeds it with
probability δ at most, its throughput gap is O(1/(ζT)) and its latency O(1).

Theorem 5.1 has a segment for each type, B.2 four types in each. Thousands of paths tell what
happens with probability δ, so both are Algorithm 2 by counts (`lab.common.wait_paths`), in memory
that never ends, on a small machine with the paper's step times. Rates of theorem B.1 change over
time, and a request's chance to go on depends on when it came: the scheduler itself plays that.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.stats import beta

from lab.common.claims import ClaimVerdict, Measurement, check
from lab.common.experiment import Experiment, Trial
from lab.common.report import Plot, draw, write_table
from lab.common.statistics import FloatArray, Interval, interval
from lab.common.wait_paths import NestedRuns, nested_runs
from penstock.config import PolicyConfig
from penstock.fluid.nested import (
    NestedThresholds,
    Segments,
    nested_policy,
    nested_thresholds,
    segments_of,
)
from penstock.fluid.step_profile import StepProfile
from penstock.fluid.traffic import Traffic, TrafficType
from penstock.sim.run import Setup
from penstock.sim.run import run as simulate
from penstock.sim.workloads import Workload

NAME = "wait_nested_theorems"

MACHINE = StepProfile("small", 10**6, (0,), (0.05,), per_kv_token=2e-4, per_prefill_token=2e-4)
"""d0 + d1 × tokens, with d0 and d1 for small models; its memory does not end."""
_PROMPT = 10
_THREE: Traffic = tuple(TrafficType(8.0, _PROMPT, n) for n in (3, 6, 12))
_TWELVE: Traffic = tuple(TrafficType(2.0, _PROMPT, n) for n in range(1, 13))
_SEGMENTS = 3
_DELTAS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
_HORIZONS_S = (10.0, 20.0, 40.0, 80.0, 160.0)
_SLOPE, _SLACK, _STEADY = -1.0, 0.25, 1.25
_PERIOD_S, _SWING = 40.0, 0.5
_VARYING_DELTA = 0.1
THEOREMS = {"theorem 5.1": _THREE, "theorem B.2": _TWELVE}


@dataclass(frozen=True)
class Exceedance:
    """runs: paths up to one horizon. peaks: KV tokens, [runs]. bounds: KV tokens by δ."""

    peaks: FloatArray
    bounds: Mapping[float, float]

    def share(self, delta: float) -> Interval:
        """Of paths that exceed the bound, with an exact interval of 95%."""
        hits, runs = int((self.peaks > self.bounds[delta]).sum()), len(self.peaks)
        low = float(beta.ppf(0.025, hits, runs - hits + 1)) if hits else 0.0
        high = float(beta.ppf(0.975, hits + 1, runs - hits)) if hits < runs else 1.0
        return Interval(hits / runs, low, high)


@dataclass(frozen=True)
class Growth:
    """gaps: tokens/s, and latencies in seconds, by horizon: [groups of runs, horizons]."""

    horizons_s: Sequence[float]
    gaps: FloatArray
    latencies: FloatArray

    @classmethod
    def from_runs(cls, found: NestedRuns, groups: int = 5) -> Growth:
        parts = [
            np.stack([part.mean(axis=0) for part in np.array_split(values, groups)])
            for values in (found.gap, found.latency_s)
        ]
        return cls(found.horizons_s.tolist(), *parts)

    def slope(self) -> Interval:
        """The power of T that the gap goes with."""
        x = np.log(self.horizons_s)
        return interval([np.polyfit(x, np.log(np.maximum(g, 1e-9)), 1)[0] for g in self.gaps])


def run(job: Trial) -> list[ClaimVerdict]:
    paths = 250 * job.effort.seeds
    horizons = _HORIZONS_S[: 2 + min(job.effort.seeds, 3)]
    rows: list[tuple[object, ...]] = []
    exceeded, growths = {}, {}
    for name, traffic in THEOREMS.items():
        job.tell(f"{NAME}: {name}")
        policy = policy_of(traffic, horizons[-1], 0.1)
        found = nested_runs(policy, traffic, MACHINE, horizons, paths, seed=0)
        low = nested_runs(starved(policy), traffic, MACHINE, horizons, paths // 5, seed=1)
        exceeded[name] = exceedances(policy, found, horizons[-1])
        growths[name] = Growth.from_runs(found), Growth.from_runs(low)
        rows += _rows(name, exceeded[name][0], growths[name][0])
    varying = [*job.each(_varying, _varying_jobs(job), lambda *_: f"{NAME}: theorem B.1")]
    half = len(varying) // 2
    write_table(job.out / f"{NAME}.csv", ("theorem", "what", "at", "value", "low", "high"), rows)
    _draw(job, {n: e[0] for n, e in exceeded.items()}, growths)
    return [
        *(exceedance_verdict(name, *found) for name, found in exceeded.items()),
        *(v for name, found in growths.items() for v in growth_verdicts(name, *found)),
        *varying_verdicts(varying[:half], varying[half:]),
    ]


# --- theorems 5.1 and B.2 -------------------------------------------------------------------------


def policy_of(traffic: Traffic, horizon_s: float, delta: float) -> NestedThresholds:
    """The fluid's thresholds with the bound for a horizon: an iteration takes d0 at least."""
    iterations = int(horizon_s / MACHINE.token_seconds[0])
    segments = segments_of(traffic, _SEGMENTS)
    return nested_thresholds(MACHINE, segments, MACHINE.kv_tokens, delta, iterations)


def starved(policy: NestedThresholds) -> NestedThresholds:
    """Eq. 11 broken: a second segment whose threshold is below what goes on into it."""
    first, second, *rest = policy.thresholds
    fewer = max(1, int(0.8 * first * policy.segments.survival[0]))
    return replace(policy, thresholds=(first, min(second, fewer), *rest))


def exceedances(
    policy: NestedThresholds, found: NestedRuns, horizon_s: float
) -> tuple[Exceedance, Exceedance]:
    """Against the bound by δ, and against its first term alone, which is the same for every δ."""
    iterations = int(horizon_s / MACHINE.token_seconds[0])
    bounds = {
        delta: nested_policy(
            MACHINE, policy.segments, policy.thresholds, delta, iterations
        ).kv_bound_tokens
        for delta in _DELTAS
    }
    first = dict.fromkeys(_DELTAS, policy.batch_kv_tokens)
    peaks = found.peak_kv[:, -1].astype(np.float64)
    return Exceedance(peaks, bounds), Exceedance(peaks, first)


def exceedance_verdict(name: str, found: Exceedance, first: Exceedance) -> ClaimVerdict:
    return check(
        f"{name}: memory is exceeded with probability δ at most, for δ from {_DELTAS[0]:g} to "
        f"{_DELTAS[-1]:g}",
        _within,
        found,
        "M^π alone",
        first,
    )


def _within(found: Exceedance) -> Measurement:
    shares = {delta: found.share(delta) for delta in _DELTAS}
    told = ", ".join(f"{share.mean:.1%} at δ = {delta:g}" for delta, share in shares.items())
    most = float(found.peaks.max())
    return Measurement(
        f"{told} ({len(found.peaks):,} paths; the highest peak is {most:,.0f} KV tokens, the bound "
        f"{found.bounds[_DELTAS[0]]:,.0f} to {found.bounds[_DELTAS[-1]]:,.0f})",
        (all(share.high <= max(delta, 5 / len(found.peaks)) for delta, share in shares.items()),),
    )


def growth_verdicts(name: str, found: Growth, low: Growth) -> list[ClaimVerdict]:
    control = "a threshold that breaks eq. 11"
    return [
        check(f"{name}: the throughput gap is O(1/T)", falls, found, control, low),
        check(f"{name}: mean latency is O(1)", steady, found, control, low),
    ]


def falls(found: Growth) -> Measurement:
    power = found.slope()
    return Measurement(
        f"gap ∝ T^{power}: {found.gaps[:, 0].mean():,.1f} tokens/s at T = "
        f"{found.horizons_s[0]:g} s, {found.gaps[:, -1].mean():,.1f} at {found.horizons_s[-1]:g} s",
        (power.high <= _SLOPE + _SLACK,),
    )


def steady(found: Growth) -> Measurement:
    """Latency over the second half of the horizons."""
    first = (len(found.horizons_s) - 1) // 2
    growth = float(found.latencies[:, -1].mean() / found.latencies[:, first].mean())
    return Measurement(
        f"×{growth:.2f} from T = {found.horizons_s[first]:g} to {found.horizons_s[-1]:g} s "
        f"({found.latencies[:, -1].mean():.2f} s)",
        (growth <= _STEADY,),
    )


# --- theorem B.1 ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Varying:
    """One run at rates that change. gap: tokens/s at the horizon."""

    horizon_s: float
    gap: float
    latency_s: float
    peak_kv: int
    bound_kv: float


def rates_at(times: FloatArray) -> FloatArray:
    """λ_j^t, [types, times]: waves that come one after the other, so that the mix changes too."""
    base = np.array([kind.rate for kind in _THREE])
    phase = 2 * np.pi * np.arange(len(base)) / len(base)
    return np.asarray(
        base[:, None] * (1 + _SWING * np.sin(2 * np.pi * times / _PERIOD_S - phase[:, None]))
    )


def worst_segments() -> Segments:
    """Eq. 10: rate and shares that go on at their worst over time."""
    rates = rates_at(np.linspace(0, _PERIOD_S, 400))
    entering = rates[::-1].cumsum(axis=0)[::-1]
    survival = (entering[1:] / entering[:-1]).max(axis=1)
    mean = segments_of(_THREE, _SEGMENTS)
    return replace(mean, rate=float(entering[0].max()), survival=tuple(map(float, survival)))


def _varying_jobs(job: Trial) -> list[tuple[float, bool, int]]:
    """Horizon, whether thresholds are for the worst time or for the mean, and seed."""
    horizons = (_PERIOD_S, 2 * _PERIOD_S, 4 * _PERIOD_S)[: 2 + (job.effort.seeds > 4)]
    seeds = range(5 * job.effort.seeds)
    return [
        *itertools.product(horizons, (True,), seeds),
        *itertools.product(horizons, (False,), seeds),
    ]


def _varying(horizon_s: float, worst: bool, seed: int) -> Varying:
    iterations = int(horizon_s / MACHINE.token_seconds[0])
    planned = worst_segments()
    policy = nested_thresholds(MACHINE, planned, MACHINE.kv_tokens, _VARYING_DELTA, iterations)
    bound = policy.kv_bound_tokens
    served = policy if worst else starved(policy)
    workload = arrivals(horizon_s, seed)
    options = {
        "segment_ends": tuple(end + 1 for end in planned.ends),
        "thresholds": served.thresholds,
    }
    setup = Setup(MACHINE, PolicyConfig.from_name("nested_wait", **options), counted=False)
    report = simulate(setup, workload, until=horizon_s)
    assert workload.arrival_time is not None
    offered = workload.output_len[workload.arrival_time <= horizon_s].sum()
    gap = float((offered - report.num_tokens.sum()) / horizon_s)
    latency = float(report.latency.mean()) if len(report.latency) else np.inf
    return Varying(horizon_s, gap, latency, report.result.kv_peak_tokens, bound)


def arrivals(horizon_s: float, seed: int) -> Workload:
    """Poisson arrivals at rates that change, a little beyond the horizon."""
    rng = np.random.default_rng((3, seed))
    end = horizon_s + 10
    most = (1 + _SWING) * np.array([kind.rate for kind in _THREE])
    times, outputs = [], []
    for j, kind in enumerate(_THREE):
        drawn = np.sort(rng.uniform(0, end, rng.poisson(most[j] * end)))
        kept = drawn[rng.uniform(0, most[j], len(drawn)) < rates_at(drawn)[j]]
        times.append(kept)
        outputs.append(np.full(len(kept), kind.output_len))
    at = np.concatenate(times)
    order = np.argsort(at)
    at, output = at[order], np.concatenate(outputs)[order]
    return Workload("waves", np.full(len(at), _PROMPT), output, at - at[0])


def varying_verdicts(found: Sequence[Varying], low: Sequence[Varying]) -> list[ClaimVerdict]:
    control = "a threshold that breaks eq. 10"
    where = (
        f"theorem B.1 (rates ±{_SWING:.0%} in waves of {_PERIOD_S:g} s, thresholds for the worst)"
    )
    return [
        check(
            f"{where}: the throughput gap is O(1/T)", falls, _growth(found), control, _growth(low)
        ),
        check(f"{where}: mean latency is O(1)", steady, _growth(found), control, _growth(low)),
        check(
            f"{where}: memory is exceeded with probability δ at most", _kept, found, control, low
        ),
    ]


def _growth(runs: Sequence[Varying]) -> Growth:
    """A seed is a group."""
    horizons = sorted({r.horizon_s for r in runs})
    by_horizon = [[r for r in runs if r.horizon_s == h] for h in horizons]
    gaps = np.array([[r.gap for r in mine] for mine in by_horizon]).T
    return Growth(horizons, gaps, np.array([[r.latency_s for r in mine] for mine in by_horizon]).T)


def _kept(runs: Sequence[Varying]) -> Measurement:
    above = sum(r.peak_kv > r.bound_kv for r in runs)
    fullest = max(r.peak_kv / r.bound_kv for r in runs)
    return Measurement(
        f"exceeded in {above} of {len(runs)} runs at δ = {_VARYING_DELTA:g}; the highest peak is "
        f"{fullest:.0%} of the bound",
        (above <= _VARYING_DELTA * len(runs),),
    )


# --- files ----------------------------------------------------------------------------------------


def _rows(name: str, found: Exceedance, growth: Growth) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for delta in _DELTAS:
        share = found.share(delta)
        rows.append((name, "exceedance by δ", delta, share.mean, share.low, share.high))
    for what, values in (("gap, tokens/s", growth.gaps), ("latency, s", growth.latencies)):
        for h, horizon in enumerate(growth.horizons_s):
            one = interval(values[:, h])
            rows.append((name, what, horizon, one.mean, one.low, one.high))
    return rows


def _draw(
    job: Trial, exceeded: Mapping[str, Exceedance], growths: Mapping[str, tuple[Growth, Growth]]
) -> None:
    lines: dict[str, tuple[Any, Any]] = {}
    for name, found in exceeded.items():
        peaks = np.sort(found.peaks)
        lines[name] = peaks, np.arange(len(peaks), 0, -1) / len(peaks)
    marks = {f"{n}: the bound at δ": list(e.bounds.values()) for n, e in exceeded.items()}
    lines |= {name: (bounds, _DELTAS) for name, bounds in marks.items()}
    scales = {"xscale": "log", "yscale": "log"}
    axes = {"xlabel": "KV tokens", "ylabel": "share of paths that hold more; δ", "title": "memory"}
    left = Plot(lines, axes | {"yscale": "log"}, "-", dict.fromkeys(marks, "o"))
    gaps, spread = {}, {}
    for name, (kept, low) in growths.items():
        for label, growth in ((name, kept), (f"{name}, eq. 11 broken", low)):
            gaps[label] = growth.horizons_s, growth.gaps.mean(axis=0)
            spread[label] = growth.gaps.min(axis=0), growth.gaps.max(axis=0)
    over_t = {"xlabel": "T, s", "ylabel": "gap, tokens/s", "title": "throughput"}
    right = Plot(gaps, scales | over_t, "o-", {}, spread)
    draw(job.out / f"{NAME}.png", "Nested WAIT (WAIT paper, theorems 5.1, B.2)", [[left, right]])


EXPERIMENT = Experiment(
    NAME, "WAIT, theorems 5.1, B.1, B.2: gap, latency and memory of Nested WAIT", run
)
