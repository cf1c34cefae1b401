"""WAIT paper, theorem 4.1: the throughput gap is O(1/(ζT)), latency is O(1), memory above M*
suffices.

Rates stay as they are and T grows; then T stays and ζ grows. The gap is what arrived in [0, T] less
what was made, in tokens over T: its mean is Throughput* less the mean throughput, without the noise
of arrivals. At equality in eq. 7 (the paper's π = [n_j* / (l'_j + 1)], whose M^π is M*) no
threshold has slack. Powers are fitted seed by seed; O(·) is tested by the upper end of their
interval. No policy owes less than `least_gap`.

Rates ζλ are too much for the same machine. So ζ is read as appendix C has it, where S becomes ζS:
every step takes a ζ-th of its time. It is measured as well where the machine stays as it is, and
where it holds and computes ζ times as much at once, as in the regime of many servers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lab.common.claims import ClaimVerdict, Measurement, check
from lab.common.experiment import Experiment, Trial
from lab.common.loads import setup_of
from lab.common.report import Plot, draw, write_table
from lab.common.statistics import Interval, interval
from lab.common.thresholds import planned_thresholds, unit_traffic
from penstock.config import PolicyConfig
from penstock.fluid.equilibrium import equilibrium
from penstock.fluid.step_profile import PAPER_LINEAR, StepProfile
from penstock.fluid.traffic import Traffic, scaled
from penstock.fluid.wait import WaitThresholds, wait_thresholds
from penstock.sim.run import Setup
from penstock.sim.run import run as simulate
from penstock.sim.workloads import make_workload

NAME = "wait_theorems"

_WORKLOAD = "low"
_RATE = 200.0
_HORIZONS_S = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
_SLOPE, _ROOT_SLOPE, _SLACK = -1.0, -0.5, 0.25
_STEADY = 1.25
_ABOVE = 1.02
"""Times M*, for whole thresholds. M^π is 1.94, 1.21, 1.03 and 1.001 times M* at `_MEMORY_ZETAS`."""
_MEMORY_ZETAS = (1, 4, 16, 64)
_BELOW = 0.8
_OVERLOAD = 1.3
"""Times the rate at equality: control of what holds of a stable load only."""
_LEAST_SEEDS = 8
_ZETAS = (1, 2, 4)
_ZETA_HORIZON_S = 2.0
_OTHER = "vllm_v1"
"""A rule without thresholds, whose gap is looked at beside."""
_STRICT, _TIGHT = "slack in eq. 7", "equality in eq. 7"
_ABOVE_TIGHT = f"{_OVERLOAD:g} times the rate at equality"
_ROOMY = "thresholds with slack for that rate"
_AT, _UNDER = "equality, C = M*", "equality, C below M*"
_FASTER, _FASTER_ABOVE = "a machine ζ times as fast", f"ζ times as fast, {_ABOVE_TIGHT}"
_SAME, _WIDER = "the machine as it is", "a machine ζ times as wide, thresholds ζn"
_READINGS = (_FASTER, _FASTER_ABOVE, _SAME, _WIDER)


@dataclass(frozen=True)
class AtHorizon:
    """Runs up to one horizon: the gap in tokens/s by seed, the mean latency in seconds of what was
    finished, and the largest KV peak of any seed in tokens. offered: tokens/s."""

    horizon_s: float
    gaps: tuple[float, ...]
    latency_s: float
    kv_peak: int
    offered: float = math.nan

    @property
    def gap(self) -> float:
        return float(np.mean(self.gaps))


def run(job: Trial) -> list[ClaimVerdict]:
    unit = unit_traffic(_WORKLOAD)
    strict = wait_thresholds(PAPER_LINEAR, scaled(unit, _RATE), PAPER_LINEAR.kv_tokens)
    tight = scaled(unit, _equality_rate(unit, strict))
    full = sum(t.rate for t in tight)
    horizons = _HORIZONS_S[: 3 + min(job.effort.seeds // 4, 3)]
    setup = _wait(strict)
    exact = int(strict.kv_tokens)
    curves = {
        name: _samples(job, name, server, rate, horizons)
        for name, server, rate in (
            (_STRICT, setup, _RATE),
            (_TIGHT, setup, full),
            (_ABOVE_TIGHT, setup, _OVERLOAD * full),
            (_ROOMY, _wait(wait_thresholds(PAPER_LINEAR, tight, PAPER_LINEAR.kv_tokens)), full),
            (_OTHER, replace(setup_of(_OTHER), counted=False), _RATE),
        )
    }
    limited = {
        name: _samples(job, name, replace(setup, kv_tokens=tokens), full, horizons[-1:])
        for name, tokens in ((_AT, exact), (_UNDER, int(_BELOW * exact)))
    }
    zetas = {name: _in_zeta(job, setup, name, full) for name in _READINGS}
    write_table(
        job.out / f"{NAME}.csv",
        (
            *("thresholds", "zeta", "horizon_s", "gap_tokens_per_s", "offered_tokens_per_s"),
            *("bound_tokens_per_s", "mean_latency_s"),
        ),
        [
            (name, zeta, s.horizon_s, s.gap, s.offered, bound, s.latency_s)
            for name, zeta, s, bound in _rows(curves | limited, zetas, strict, tight)
        ],
    )
    _draw(job, curves, zetas)
    return [
        *verdicts(*(curves[name] for name in (_STRICT, _TIGHT, _ABOVE_TIGHT, _ROOMY, _OTHER))),
        *zeta_verdicts(zetas),
        _constant_verdict(curves[_STRICT], curves[_ABOVE_TIGHT], strict),
        exact_memory_verdict(curves[_TIGHT][-1], limited[_AT][0], limited[_UNDER][0], exact),
        _memory_verdict(job),
    ]


Rows = Iterator[tuple[str, int, AtHorizon, float]]


def _rows(
    curves: dict[str, list[AtHorizon]],
    zetas: dict[str, list[AtHorizon]],
    strict: WaitThresholds,
    tight: Traffic,
) -> Rows:
    """Name, ζ, sample and bound in tokens/s, NaN where there is none."""
    bounds = {_STRICT: strict, _TIGHT: replace(strict, traffic=tight)}
    for name, curve in curves.items():
        for sample_ in curve:
            found = bounds.get(name)
            bound = found.throughput_gap(sample_.horizon_s) if found else math.nan
            yield name, 1, sample_, bound
    for name, curve in zetas.items():
        for zeta, sample_ in zip(_ZETAS, curve, strict=True):
            yield name, zeta, sample_, math.nan


def _equality_rate(unit: Traffic, strict: WaitThresholds) -> float:
    """Requests/s at which λ_j ΔT is n_j for the type that has the least room."""
    return min(
        n / (t.rate * strict.iteration_s) for n, t in zip(strict.thresholds, unit, strict=True)
    )


def _wait(found: WaitThresholds) -> Setup:
    """Request by request: what is counted together announces its tokens only when it ends."""
    setup = setup_of(
        "wait",
        output_lens=tuple(t.output_len for t in found.traffic),
        thresholds=tuple(int(n) for n in found.thresholds),
    )
    return replace(setup, counted=False)


def _seeds(job: Trial) -> int:
    """A power needs an interval, also in a quick run."""
    return max(_LEAST_SEEDS, job.effort.seeds) if job.effort.seeds > 1 else 2


def _samples(
    job: Trial, name: str, setup: Setup, rate: float, horizons: Sequence[float]
) -> list[AtHorizon]:
    samples = []
    for horizon in horizons:
        job.tell(f"{NAME}: {name}, {horizon:g} s")
        samples.append(sample(job, setup, rate, horizon, range(_seeds(job))))
    return samples


def sample(
    job: Trial, setup: Setup, rate: float, horizon_s: float, seeds: Sequence[int]
) -> AtHorizon:
    """Runs that are cut off at a horizon, one for each seed."""
    runs = [*job.each(_cut_off, ((setup, rate, horizon_s, seed) for seed in seeds))]
    gaps, latencies, peaks = zip(*runs, strict=True)
    known = [latency for latency in latencies if latency is not None]
    latency = float(np.mean(known)) if known else float("nan")
    offered = rate * float(np.mean([t.output_len for t in unit_traffic(_WORKLOAD)]))
    return AtHorizon(horizon_s, gaps, latency, max(peaks), offered)


def _cut_off(
    setup: Setup, rate: float, horizon_s: float, seed: int
) -> tuple[float, float | None, int]:
    """The gap, the mean latency, if anything was finished, and the peak of KV tokens."""
    # Arrivals must outlast the horizon, or the end of the run would be served in a drained
    # system: six standard deviations more of them than are expected.
    count = int(rate * horizon_s + 6 * (rate * horizon_s) ** 0.5) + 2
    workload = make_workload(_WORKLOAD, num_requests=count, rate=rate, seed=seed)
    report = simulate(setup, workload, until=horizon_s)
    assert workload.arrival_time is not None
    offered = workload.output_len[workload.arrival_time <= horizon_s].sum()
    latency = float(report.latency.mean()) if len(report.latency) else None
    gap = float((offered - report.num_tokens.sum()) / horizon_s)
    return gap, latency, report.result.kv_peak_tokens


def faster(profile: StepProfile, factor: float, wider: float = 1.0) -> StepProfile:
    """Every step in a `factor`-th of its time; per token in a `wider`-th of that, with as many
    times the memory."""
    return replace(
        profile,
        name=f"{profile.name}, changed",
        token_seconds=tuple(s / factor for s in profile.token_seconds),
        per_kv_token=profile.per_kv_token / factor / wider,
        per_prefill_token=profile.per_prefill_token / factor / wider,
        kv_tokens=int(profile.kv_tokens * wider),
    )


def _in_zeta(job: Trial, setup: Setup, name: str, full: float) -> list[AtHorizon]:
    """One reading of ζ, with T as it is. The same machine has new thresholds for every rate, as
    long as any fit."""
    samples = []
    server = setup
    for zeta in _ZETAS:
        rate = _RATE
        if name == _SAME:
            planned = planned_thresholds(unit_traffic(_WORKLOAD), zeta * rate)
            server = _with(setup, planned) if planned else server
        elif name in (_FASTER, _FASTER_ABOVE):
            server = replace(setup, profile=faster(setup.profile, zeta))
            rate = _OVERLOAD * full if name == _FASTER_ABOVE else rate
        elif name == _WIDER:
            wide = tuple(zeta * n for n in setup.admission.options["thresholds"])
            server = replace(_with(setup, wide), profile=faster(setup.profile, 1, zeta))
        job.tell(f"{NAME}: ζ = {zeta}, {name}")
        seeds = range(job.effort.repetitions)
        samples.append(sample(job, server, zeta * rate, _ZETA_HORIZON_S, seeds))
    return samples


def _with(setup: Setup, thresholds: tuple[int, ...]) -> Setup:
    """The same server with other thresholds."""
    options = {**setup.admission.options, "thresholds": thresholds}
    return replace(setup, admission=PolicyConfig.from_name("wait", **options))


def slopes(
    samples: Sequence[AtHorizon], over: Sequence[float] | None = None, *, share: bool = False
) -> Interval:
    """The power of T, or of what is `over`, that the gap goes with, fitted seed by seed; of the gap
    as a share of what is offered, if asked for."""
    x = np.log([s.horizon_s for s in samples] if over is None else over)
    by_seed = zip(*(s.gaps for s in samples), strict=True)
    scale = np.log([s.offered for s in samples]) if share else 0.0
    return interval(
        [np.polyfit(x, np.log(np.maximum(gaps, 1e-9)) - scale, 1)[0] for gaps in by_seed]
    )


def least_gap(horizon_s: float, rate: float = _RATE, step_s: float | None = None) -> float:
    """Tokens/s that no policy can owe less of: what is in service if every request begins at once
    and a step takes d0, whatever is in it."""
    step = PAPER_LINEAR.token_seconds[0] if step_s is None else step_s
    owed = sum(t.rate * t.output_len * (t.output_len + 1) / 2 for t in unit_traffic(_WORKLOAD))
    return rate * step * owed / horizon_s


def verdicts(
    strict: Sequence[AtHorizon],
    tight: Sequence[AtHorizon],
    overload: Sequence[AtHorizon],
    roomy: Sequence[AtHorizon],
    other: Sequence[AtHorizon],
) -> list[ClaimVerdict]:
    """Decay of the gap and growth of the latency, with slack and without. roomy: thresholds for the
    rate that leaves the others none. other: of a policy without thresholds."""
    squared = [replace(s, gaps=tuple(g / s.horizon_s for g in s.gaps)) for s in strict]
    return [
        check(
            "the throughput gap is O(1/T) (eq. 8; thresholds with slack)",
            _falls_as(_SLOPE),
            strict,
            "equality in eq. 7",
            tight,
        ),
        check(
            "O(1/T) is the best rate, 'matching theoretical lower bounds' (section 4)",
            _matches_bound(other),
            strict,
            "a gap of 1/T²",
            squared,
        ),
        check(
            "at equality in eq. 7 it is O(1/√T) (appendix C, case 1)",
            _falls_as(_ROOT_SLOPE),
            tight,
            _ABOVE_TIGHT,
            overload,
            (_ROOMY, roomy),
        ),
        check("mean latency is O(1) (eq. 9)", _steady, strict, _ABOVE_TIGHT, overload),
        check(
            "and at equality (appendix C, case 1)",
            _steady,
            tight,
            _ABOVE_TIGHT,
            overload,
            (_ROOMY, roomy),
        ),
    ]


def _falls_as(power: float) -> Callable[[Sequence[AtHorizon]], Measurement]:
    """No slower than a power of T."""

    def test(samples: Sequence[AtHorizon]) -> Measurement:
        found = slopes(samples)
        return Measurement(f"gap ∝ T^{found}: {_gaps(samples)}", (found.high <= power + _SLACK,))

    return test


def _matches_bound(other: Sequence[AtHorizon]) -> Callable[[Sequence[AtHorizon]], Measurement]:
    """Falls no faster than 1/T, and neither it nor another policy's gap below `least_gap`."""

    def test(samples: Sequence[AtHorizon]) -> Measurement:
        last, found = samples[-1], slopes(samples)
        least = least_gap(last.horizon_s)
        return Measurement(
            f"no bound is printed; what every policy has in service is ∝ 1/T, {least:,.0f} "
            f"tokens/s at T = {last.horizon_s:g} s; the gap is {last.gap:,.0f}, ∝ T^{found}, "
            f"{_OTHER}'s {other[-1].gap:,.0f}, ∝ T^{slopes(other)}",
            (
                found.low >= _SLOPE - _SLACK,
                all(s.gap >= least_gap(s.horizon_s) for s in (*samples, *other)),
            ),
        )

    return test


def zeta_verdicts(zetas: dict[str, list[AtHorizon]]) -> list[ClaimVerdict]:
    """By reading. The oracle has the gap that no policy is below."""

    def falls(share: bool) -> Callable[[Sequence[AtHorizon]], Measurement]:
        def test(curve: Sequence[AtHorizon]) -> Measurement:
            power = slopes(curve, _ZETAS, share=share)
            return Measurement(f"∝ ζ^{power}", (power.high <= _SLOPE + _SLACK,))

        return test

    def verdict(reading: str, *, share: bool = True) -> ClaimVerdict:
        speeds = _ZETAS if reading == _FASTER else (1,) * len(_ZETAS)
        step_s = PAPER_LINEAR.token_seconds[0]
        owed = [
            replace(s, gaps=(least_gap(s.horizon_s, z * _RATE, step_s / speed),) * 2)
            for z, speed, s in zip(_ZETAS, speeds, zetas[reading], strict=True)
        ]
        unit = "as a share of Throughput*" if share else "in tokens/s"
        return check(
            f"the gap is O(1/(ζT)) in ζ (eq. 8), {reading}, {unit}",
            falls(share),
            zetas[reading],
            _FASTER_ABOVE,
            zetas[_FASTER_ABOVE],
            ("the least that any policy owes", owed),
        )

    return [verdict(_FASTER), verdict(_FASTER, share=False), verdict(_SAME), verdict(_WIDER)]


def exact_memory_verdict(
    free: AtHorizon, at: AtHorizon, under: AtHorizon, kv_tokens: int
) -> ClaimVerdict:
    """The paper's π at equality, whose M^π is M*: no more of a gap than with all memory."""

    def test(found: AtHorizon) -> Measurement:
        return Measurement(
            f"gap {found.gap:,.0f} tokens/s at T = {found.horizon_s:g} s, with all memory "
            f"{free.gap:,.0f}",
            (found.gap <= free.gap,),
        )

    return check(
        f"memory of exactly C = M* ({kv_tokens:,} KV tokens) suffices at equality (appendix C)",
        test,
        at,
        f"{_BELOW:.0%} of M*",
        under,
    )


def _steady(curve: Sequence[AtHorizon]) -> Measurement:
    """Latency over the second half of the horizons."""
    first, last = curve[-1 - len(curve) // 2], curve[-1]
    growth = last.latency_s / first.latency_s
    return Measurement(
        f"×{growth:.2f} from T = {first.horizon_s:g} to {last.horizon_s:g} s "
        f"({last.latency_s:.2f} s)",
        (growth <= _STEADY,),
    )


def _gaps(samples: Sequence[AtHorizon]) -> str:
    first, last = samples[0], samples[-1]
    return (
        f"{first.gap:,.0f} tokens/s at T = {first.horizon_s:g} s, "
        f"{last.gap:,.0f} at {last.horizon_s:g} s"
    )


def _constant_verdict(
    strict: Sequence[AtHorizon], overload: Sequence[AtHorizon], found: WaitThresholds
) -> ClaimVerdict:
    def test(samples: Sequence[AtHorizon]) -> Measurement:
        last = samples[-1]
        bound = found.throughput_gap(last.horizon_s)
        return Measurement(
            f"gap {last.gap:,.0f} of {bound:,.0f} tokens/s at T = {last.horizon_s:g} s; "
            f"KV peak {last.kv_peak:,} of {found.kv_tokens:,.0f}",
            (last.gap <= bound, last.kv_peak <= found.kv_tokens),
        )

    return check(
        "the bounds with the mended constants (see fluid.md) are kept",
        test,
        strict,
        f"{_OVERLOAD:g} times the rate at equality",
        overload,
    )


def _memory_verdict(job: Trial) -> ClaimVerdict:
    """Thresholds that keep up, with memory just above M*, on a machine ζ times as wide at ζ times
    the rate. The theorem is about large ζ."""
    found = {}
    for zeta in _MEMORY_ZETAS:
        profile = faster(PAPER_LINEAR, 1, zeta)
        traffic = scaled(unit_traffic(_WORKLOAD), zeta * _RATE)
        policy = wait_thresholds(profile, traffic, profile.kv_tokens)
        found[zeta] = profile, policy, equilibrium(profile, traffic).kv_tokens

    def missing(zeta: int, above: float) -> tuple[float, bool]:
        """Share of the tokens, and whether the gap is within its bound."""
        profile, policy, fluid = found[zeta]
        job.tell(f"{NAME}: memory of {above:g} M*, ζ = {zeta}")
        server = replace(_wait(policy), profile=profile, kv_tokens=int(above * fluid))
        run = sample(job, server, zeta * _RATE, _ZETA_HORIZON_S, range(1))
        return run.gap / run.offered, run.gap <= policy.throughput_gap(_ZETA_HORIZON_S)

    def test(above: float) -> Measurement:
        runs = {zeta: missing(zeta, above) for zeta in found}
        told = ", ".join(
            f"{runs[z][0]:.1%} at ζ = {z} (M^π {policy.kv_tokens / fluid:.4g} M*)"
            for z, (_, policy, fluid) in found.items()
        )
        return Measurement(
            f"with {above:g} M* tokens are missing after {_ZETA_HORIZON_S:g} s: {told}",
            (runs[_MEMORY_ZETAS[-1]][1],),
        )

    return check(
        "memory above M* suffices as ζ grows (theorem 4.1; ζ times as wide)",
        test,
        _ABOVE,
        "half of it",
        _ABOVE / 2,
    )


def _draw(
    job: Trial, curves: dict[str, list[AtHorizon]], zetas: dict[str, list[AtHorizon]]
) -> None:
    gaps, bands, latencies = {}, {}, {}
    for name, samples in curves.items():
        horizons = [s.horizon_s for s in samples]
        gaps[name] = horizons, [s.gap for s in samples]
        bands[name] = [min(s.gaps) for s in samples], [max(s.gaps) for s in samples]
        latencies[name] = horizons, [s.latency_s for s in samples]
    first, horizons = curves[_STRICT][0], gaps[_STRICT][0]
    gaps["1/T"] = horizons, [first.gap * first.horizon_s / h for h in horizons]
    shares = {name: (_ZETAS, [s.gap / s.offered for s in curve]) for name, curve in zetas.items()}
    spread = {
        name: ([min(s.gaps) / s.offered for s in curve], [max(s.gaps) / s.offered for s in curve])
        for name, curve in zetas.items()
    }
    scales: dict[str, Any] = {"xscale": "log", "yscale": "log"}
    over_t = {**scales, "xlabel": "T, s", "title": "T grows"}
    plots = [
        Plot(gaps, {**over_t, "ylabel": "gap, tokens/s"}, "o-", {"1/T": "k--"}, bands),
        Plot(latencies, {**over_t, "ylabel": "mean latency, s"}, "o-"),
        Plot(
            shares,
            {**scales, "xlabel": "ζ", "ylabel": "gap over Throughput*", "title": "ζ grows"},
            "o-",
            bands=spread,
        ),
    ]
    title = "WAIT's gap and latency (WAIT paper, theorem 4.1; low workload)"
    draw(job.out / f"{NAME}.png", title, [plots])


EXPERIMENT = Experiment(NAME, "WAIT, theorem 4.1: throughput gap and latency against T and ζ", run)
