"""WAIT paper, theorem 4.1: the throughput gap is O(1/(ζT)), latency is O(1), memory above M*
suffices.

Rates stay as they are and T grows; then T stays and ζ grows. The gap is what arrived in [0, T] less
what was made, in tokens over T: its mean is Throughput* less the mean throughput, without the noise
of arrivals. At equality in eq. 7 (the paper's π = [n_j* / (l'_j + 1)], whose M^π is M*) no
threshold has slack. Powers are fitted seed by seed; O(·) is tested by the upper end of their
interval, and that a gap falls no faster by the lower.

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
            (_AT, replace(setup, kv_tokens=exact), full),
            (_UNDER, replace(setup, kv_tokens=int(_BELOW * exact)), full),
            (_OTHER, replace(setup_of(_OTHER), counted=False), _RATE),
        )
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
            for name, zeta, s, bound in _rows(curves, zetas, strict, tight)
        ],
    )
    _draw(job, curves, zetas)
    return [
        *verdicts(curves[_STRICT], curves[_TIGHT], curves[_ABOVE_TIGHT], curves[_OTHER]),
        *zeta_verdicts(zetas),
        _constant_verdict(curves[_STRICT], curves[_ABOVE_TIGHT], strict),
        exact_memory_verdict(curves[_AT], curves[_UNDER], exact),
        _memory_verdict(job, strict, horizons[-1]),
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


def verdicts(
    strict: Sequence[AtHorizon],
    tight: Sequence[AtHorizon],
    overload: Sequence[AtHorizon],
    other: Sequence[AtHorizon],
) -> list[ClaimVerdict]:
    """Decay of the gap, each side of its power by itself, and growth of the latency, with and
    without slack. other: of a policy without thresholds."""
    squared = [replace(s, gaps=tuple(g / s.horizon_s for g in s.gaps)) for s in strict]
    linear = [replace(s, gaps=tuple(g / s.horizon_s**0.5 for g in s.gaps)) for s in tight]
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
            _no_faster(_SLOPE, other),
            strict,
            "a gap of 1/T²",
            squared,
        ),
        check(
            "at equality in eq. 7 it is O(1/√T) (appendix C, case 1)",
            _falls_as(_ROOT_SLOPE),
            tight,
            f"{_OVERLOAD:g} times the rate at equality",
            overload,
        ),
        check(
            "and no better than 1/√T there",
            _no_faster(_ROOT_SLOPE),
            tight,
            "the same gap over another √T",
            linear,
        ),
        check(
            "mean latency is O(1) (eq. 9), with slack and at equality",
            _steady,
            (strict, tight),
            f"{_OVERLOAD:g} times the rate at equality",
            (overload, overload),
        ),
    ]


def _falls_as(power: float) -> Callable[[Sequence[AtHorizon]], Measurement]:
    """No slower than a power of T."""

    def test(samples: Sequence[AtHorizon]) -> Measurement:
        found = slopes(samples)
        return Measurement(f"gap ∝ T^{found}: {_gaps(samples)}", (found.high <= power + _SLACK,))

    return test


def _no_faster(
    power: float, other: Sequence[AtHorizon] = ()
) -> Callable[[Sequence[AtHorizon]], Measurement]:
    """No faster than a power of T. With another policy's gaps: that is claimed to be proved, and
    the paper prints no proof."""

    def test(samples: Sequence[AtHorizon]) -> Measurement:
        found = slopes(samples)
        told = f"gap ∝ T^{found}"
        parts = [found.low >= power - _SLACK]
        if other:
            told += (
                f", and {_OTHER}'s ∝ T^{slopes(other)} ({other[-1].gap:,.0f} tokens/s at "
                f"T = {other[-1].horizon_s:g} s), for whatever keeps up owes only what is being "
                "served; the paper prints no lower bound and no proof of one"
            )
            parts.append(False)
        return Measurement(told, tuple(parts))

    return test


def zeta_verdicts(zetas: dict[str, list[AtHorizon]]) -> list[ClaimVerdict]:
    """By reading."""

    def falls(curve: Sequence[AtHorizon]) -> Measurement:
        share, tokens = (slopes(curve, _ZETAS, share=s) for s in (True, False))
        first, last = (s.gap / s.offered for s in (curve[0], curve[-1]))
        return Measurement(
            f"as a share of Throughput*, which is the gap for an iteration, ∝ ζ^{share} "
            f"({first:.1%} at ζ = 1, {last:.1%} at {_ZETAS[-1]}); in tokens/s ∝ ζ^{tokens}",
            (share.high <= _SLOPE + _SLACK, tokens.high <= _SLOPE + _SLACK),
        )

    def vanishes(curve: Sequence[AtHorizon]) -> Measurement:
        share = slopes(curve, _ZETAS, share=True)
        return Measurement(
            f"the gap as a share of Throughput* ∝ ζ^{share}, {curve[-1].gap:,.0f} tokens/s "
            f"of {curve[-1].offered:,.0f} at ζ = {_ZETAS[-1]}",
            (share.high <= _SLOPE + _SLACK,),
        )

    claim = "the gap is O(1/(ζT)) in ζ (eq. 8)"
    return [
        check(f"{claim}, {_FASTER}", falls, zetas[_FASTER], _FASTER_ABOVE, zetas[_FASTER_ABOVE]),
        check(f"{claim}, {_SAME}", vanishes, zetas[_SAME], _FASTER_ABOVE, zetas[_FASTER_ABOVE]),
        check(f"{claim}, {_WIDER}", vanishes, zetas[_WIDER], _FASTER_ABOVE, zetas[_FASTER_ABOVE]),
    ]


def exact_memory_verdict(
    at: Sequence[AtHorizon], under: Sequence[AtHorizon], kv_tokens: int
) -> ClaimVerdict:
    """The paper's π at equality, whose M^π is M*."""

    def test(samples: Sequence[AtHorizon]) -> Measurement:
        found = slopes(samples)
        return Measurement(
            f"gap ∝ T^{found}: {_gaps(samples)}; KV peak {samples[-1].kv_peak:,}",
            (found.high <= _ROOT_SLOPE + _SLACK,),
        )

    return check(
        f"memory of exactly C = M* ({kv_tokens:,} KV tokens) suffices for O(1/√T) at equality "
        "(appendix C)",
        test,
        at,
        f"{_BELOW:.0%} of M*",
        under,
    )


def _steady(curves: Sequence[Sequence[AtHorizon]]) -> Measurement:
    """Latency over the second half of the horizons."""
    parts, growths = [], []
    for curve in curves:
        first, last = curve[-1 - len(curve) // 2], curve[-1]
        growths.append(last.latency_s / first.latency_s)
        parts.append(
            f"×{growths[-1]:.2f} from T = {first.horizon_s:g} to {last.horizon_s:g} s "
            f"({last.latency_s:.2f} s)"
        )
    return Measurement(", ".join(parts), tuple(growth <= _STEADY for growth in growths))


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


def _memory_verdict(job: Trial, found: WaitThresholds, horizon_s: float) -> ClaimVerdict:
    """Thresholds that keep up, with memory just above M*, as the theorem has it."""
    fluid = equilibrium(PAPER_LINEAR, found.traffic).kv_tokens
    offered = _RATE * float(np.mean([t.output_len for t in found.traffic]))

    def test(memory: int) -> Measurement:
        job.tell(f"{NAME}: memory of {memory} KV tokens")
        starved = sample(job, replace(_wait(found), kv_tokens=memory), _RATE, horizon_s, range(1))
        return Measurement(
            f"with {memory:,} KV tokens {starved.gap / offered:.0%} of the tokens are missing "
            f"after {horizon_s:g} s (M* {fluid:,.0f}, M^π {found.kv_tokens:,.0f})",
            (starved.gap <= found.throughput_gap(horizon_s),),
        )

    return check(
        "memory above M* suffices (theorem 4.1)",
        test,
        int(_ABOVE * fluid),
        "half of it",
        int(_ABOVE * fluid / 2),
    )


def _draw(
    job: Trial, curves: dict[str, list[AtHorizon]], zetas: dict[str, list[AtHorizon]]
) -> None:
    # With exactly M* it is the curve at equality again.
    drawn = {name: curve for name, curve in curves.items() if name not in (_AT, _UNDER)}
    gaps, bands, latencies = {}, {}, {}
    for name, samples in drawn.items():
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
