"""WAIT paper, theorem 4.1: the throughput gap is O(1/T), latency is O(1), memory above M* suffices.

Rates stay as they are and T grows. The gap is what arrived in [0, T] less what was made, in tokens
over T: its mean is Throughput* less the mean throughput, without the noise of arrivals. At equality
in eq. 7 (the paper's π = [n_j* / (l'_j + 1)], whose M^π is M*) no threshold has slack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.fluid.equilibrium import equilibrium
from penstock.fluid.step_profile import PAPER_LINEAR
from penstock.fluid.traffic import Traffic, scaled
from penstock.fluid.wait import WaitThresholds, wait_thresholds
from penstock.lab.claims import ClaimVerdict, Measurement, check
from penstock.lab.experiment import Experiment, Trial
from penstock.lab.loads import setup_of
from penstock.lab.report import Plot, draw, write_table
from penstock.lab.thresholds import unit_traffic
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
_OVERLOAD = 1.3
"""Times the rate at equality: control of what holds of a stable load only."""


@dataclass(frozen=True)
class AtHorizon:
    """Means over seeds at one horizon: the gap in tokens/s, the latency in seconds of what was
    finished, and the largest KV peak of any seed in tokens."""

    horizon_s: float
    gap: float
    latency_s: float
    kv_peak: int


def run(job: Trial) -> list[ClaimVerdict]:
    unit = unit_traffic(_WORKLOAD)
    strict = wait_thresholds(PAPER_LINEAR, scaled(unit, _RATE), PAPER_LINEAR.kv_tokens)
    tight = scaled(unit, _equality_rate(unit, strict))
    horizons = _HORIZONS_S[: 3 + min(job.effort.seeds // 4, 3)]
    setup = _wait(strict)
    curves = {
        "strict": _samples(job, "strict", setup, _RATE, horizons),
        "equality": _samples(job, "equality", setup, sum(t.rate for t in tight), horizons),
        "overload": _samples(
            job, "overload", setup, _OVERLOAD * sum(t.rate for t in tight), horizons
        ),
    }
    write_table(
        job.out / f"{NAME}.csv",
        ("thresholds", "horizon_s", "gap_tokens_per_s", "bound_tokens_per_s", "mean_latency_s"),
        (
            (name, s.horizon_s, s.gap, _bound(name, strict, tight, s.horizon_s), s.latency_s)
            for name, curve in curves.items()
            for s in curve
        ),
    )
    _draw(job, curves)
    return [
        *verdicts(curves["strict"], curves["equality"], curves["overload"]),
        _constant_verdict(curves["strict"], curves["overload"], strict),
        _memory_verdict(job, strict, horizons[-1]),
    ]


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


def _bound(name: str, strict: WaitThresholds, tight: Traffic, horizon_s: float) -> float:
    """NaN where there is none."""
    if name == "overload":
        return float("nan")
    found = strict if name == "strict" else replace(strict, traffic=tight)
    return found.throughput_gap(horizon_s)


def _samples(
    job: Trial, name: str, setup: Setup, rate: float, horizons: Sequence[float]
) -> list[AtHorizon]:
    samples = []
    for horizon in horizons:
        job.tell(f"{NAME}: {name}, {horizon:g} s")
        samples.append(sample(job, setup, rate, horizon, range(job.effort.seeds)))
    return samples


def sample(
    job: Trial, setup: Setup, rate: float, horizon_s: float, seeds: Sequence[int]
) -> AtHorizon:
    """Runs that are cut off at a horizon, one for each seed."""
    runs = [*job.each(_cut_off, ((setup, rate, horizon_s, seed) for seed in seeds))]
    gaps, latencies, peaks = zip(*runs, strict=True)
    known = [latency for latency in latencies if latency is not None]
    latency = float(np.mean(known)) if known else float("nan")
    return AtHorizon(horizon_s, float(np.mean(gaps)), latency, max(peaks))


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


def slope(samples: Sequence[AtHorizon]) -> float:
    """Of the gap's logarithm against the horizon's."""
    horizons = np.log([s.horizon_s for s in samples])
    gaps = np.log(np.maximum([s.gap for s in samples], 1e-9))
    return float(np.polyfit(horizons, gaps, 1)[0])


def verdicts(
    strict: Sequence[AtHorizon], tight: Sequence[AtHorizon], overload: Sequence[AtHorizon]
) -> list[ClaimVerdict]:
    """Decay of the gap, a power of T that is neither slower nor faster, and growth of the latency,
    with and without slack."""
    return [
        check(
            "the throughput gap is O(1/T) (eq. 8; thresholds with slack)",
            _decays_as(_SLOPE),
            strict,
            "equality in eq. 7",
            tight,
        ),
        check(
            "at equality in eq. 7 it is O(1/√T) (appendix C, case 1)",
            _decays_as(_ROOT_SLOPE),
            tight,
            "thresholds with slack",
            strict,
        ),
        check(
            "mean latency is O(1) (eq. 9), with slack and at equality",
            _steady,
            (strict, tight),
            f"{_OVERLOAD:g} times the rate at equality",
            (overload, overload),
        ),
    ]


def _decays_as(power: float) -> Callable[[Sequence[AtHorizon]], Measurement]:
    def test(samples: Sequence[AtHorizon]) -> Measurement:
        found = slope(samples)
        return Measurement(
            f"gap ∝ T^{found:.2f}: {_gaps(samples)}", (abs(found - power) <= _SLACK,)
        )

    return test


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


def _draw(job: Trial, curves: dict[str, list[AtHorizon]]) -> None:
    gaps, latencies = {}, {}
    for name, samples in curves.items():
        horizons = [s.horizon_s for s in samples]
        gaps[name] = horizons, [s.gap for s in samples]
        latencies[name] = horizons, [s.latency_s for s in samples]
    first = curves["strict"][0]
    horizons = gaps["strict"][0]
    gaps["1/T"] = horizons, [first.gap * first.horizon_s / h for h in horizons]
    scales = {"xscale": "log", "yscale": "log"}
    left = Plot(gaps, {**scales, "xlabel": "T, s", "ylabel": "throughput gap, tokens/s"}, "o-")
    right = {"xscale": "log", "xlabel": "T, s", "ylabel": "mean latency, s", "ylim": (0, None)}
    title = "WAIT's gap and latency (WAIT paper, theorem 4.1; low workload)"
    draw(job.out / f"{NAME}.png", title, [[left, Plot(latencies, right, "o-")]])


EXPERIMENT = Experiment(NAME, "Theorem 4.1: throughput gap and latency against the horizon", run)
