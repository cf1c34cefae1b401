"""WAIT paper, figure 1 (a-b): throughput and latency of WAIT on the synthetic workloads.

On the paper's step times and on those of an A100, against vLLM's two rules and Sarathi as they come
and Sarathi with budget and cap tuned in hindsight. WAIT has the fluid planner's thresholds for each
load, where they fit, else the best in hindsight. Peaks are the most that any load gives, seed by
seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from lab.common.claims import ClaimVerdict, Measurement, check
from lab.common.experiment import Experiment, Trial
from lab.common.loads import (
    PROFILES,
    SHIPPED,
    TUNED,
    Point,
    Scene,
    Sustained,
    best_of,
    bounds,
    curves,
    draw_points,
    gain_verdict,
    peaks,
    setup_of,
    tuned_sarathi,
    write_peaks,
    write_points,
)
from lab.common.statistics import FloatArray, ratio
from lab.common.thresholds import (
    planned_thresholds,
    planned_wait,
    unit_traffic,
    wait_choice,
    wait_neighbours,
)
from penstock.fluid.step_profile import PAPER_LINEAR
from penstock.sim.run import Setup

NAME = "wait_fig1_known"

_PAPER_RATES = {"low": 2_000, "high": 12_000}
"""Σ λ_j as section 6 prints it, without a unit."""
_DRAWN = ("wait", *SHIPPED, TUNED)
_BEST = "wait, thresholds of its capacity"
_CHANCE = 0.05
"""What is finished in the second half of a run may have come in the first."""
_NEAR = 0.95
"""Share of a limit that counts as near it."""

Peaks = dict[str, dict[str, FloatArray]]
"""Output tokens/s by scene and policy, [seeds]."""


def run(job: Trial) -> list[ClaimVerdict]:
    scenes = [Scene(load(), name) for load in PROFILES.values() for name in _PAPER_RATES]
    points: list[tuple[Scene, Point]] = []
    found: dict[str, dict[str, Setup]] = {}
    for scene in scenes:
        found[scene.name] = servers(job, scene)
        at = partial(_at_load, scene, found[scene.name], min(job.effort.shares) * scene.bound)
        points += [(scene, p) for p in curves(job, scene, at, NAME)]
    best = {scene.name: peaks(p for s, p in points if s is scene) for scene in scenes}
    write_peaks(scenes, found, best, job.out / f"{NAME}_peak.csv")
    write_points(points, job.out / f"{NAME}.csv")
    title = "WAIT on known output lengths (WAIT paper, figure 1 a-b)"
    draw_points(points, _DRAWN, job.out / f"{NAME}.png", title)
    return verdicts(points, best)


def servers(job: Trial, scene: Scene) -> dict[str, Setup]:
    """WAIT with its best thresholds in hindsight and its rivals, by name."""
    traffic = unit_traffic(str(scene.lengths))
    job.tell(f"{NAME}: Sarathi's budget and cap on {scene.name}")
    tuned = tuned_sarathi(scene, job.effort, job.workers)
    best = best_of(
        planned_wait(traffic, scene.bound, scene.profile),
        lambda setup: wait_neighbours(traffic, setup),
        scene,
        job.effort,
        lambda what: job.tell(f"{NAME}: {what}"),
        job.workers,
    )
    one_each = wait_choice(traffic, (1,) * len(traffic), scene.profile).setup
    wait = (best or Sustained(one_each, 0.0)).setup
    return {"wait": wait, **{p: setup_of(p, scene.profile) for p in SHIPPED}, TUNED: tuned}


def _at_load(
    scene: Scene, found: Mapping[str, Setup], lightest: float, rate: float
) -> Mapping[str, Setup]:
    """WAIT with the fluid planner's thresholds for a load, where they fit, else with those of its
    capacity, which is also shown at the lightest load; rivals as they are."""
    traffic = unit_traffic(str(scene.lengths))
    planned = planned_thresholds(traffic, rate, scene.profile)
    wait = wait_choice(traffic, planned, scene.profile).setup if planned else found["wait"]
    return {**found, "wait": wait, **({_BEST: found["wait"]} if rate == lightest else {})}


# --- verdicts -------------------------------------------------------------------------------------


def verdicts(points: Sequence[tuple[Scene, Point]], best: Peaks) -> list[ClaimVerdict]:
    scenes = {scene.name: scene for scene, _ in points}
    by_scene = {name: [p for s, p in points if s is scene] for name, scene in scenes.items()}
    drawn = {name: {p: peak for p, peak in best[name].items() if p in _DRAWN} for name in best}
    limits = bounds(scenes.values(), points)
    return [
        *(gain_verdict(f"{n}: WAIT", "wait", peak, limits[n]) for n, peak in drawn.items()),
        *(high_load_verdict(profile, drawn, limits) for profile in PROFILES),
        limit_verdict(drawn, limits),
        benchmark_verdict(by_scene),
        balance_verdict(by_scene),
        latency_verdict(by_scene),
        _unit_verdict(),
    ]


def high_load_verdict(profile: str, best: Peaks, limits: Mapping[str, float]) -> ClaimVerdict:
    """best, limits: of both workloads on a profile, among others."""
    found = {name: best[f"{name}, {profile}"] for name in _PAPER_RATES}
    rivals = {n: max(SHIPPED, key=lambda p: peak[p].mean()) for n, peak in found.items()}

    def gains_more(mine: Mapping[str, FloatArray]) -> Measurement:
        made = {n: np.maximum(peak, 1e-9) for n, peak in mine.items()}
        gain = {n: ratio(made[n], found[n][rivals[n]]).mean - 1 for n in found}
        told = ", ".join(f"{g:+.0%} over {rivals[n]} on {n}" for n, g in gain.items())
        return Measurement(told, (gain["high"] > gain["low"],))

    return check(
        f"{profile}: WAIT gains most under high synthetic load",
        gains_more,
        {n: peak["wait"] for n, peak in found.items()},
        "the best rival in its place",
        {n: peak[rivals[n]] for n, peak in found.items()},
        (
            "the fluid bound in its place",
            {n: 0 * peak["wait"] + limits[f"{n}, {profile}"] for n, peak in found.items()},
        ),
    )


def limit_verdict(best: Peaks, limits: Mapping[str, float]) -> ClaimVerdict:
    """limits: output tokens/s."""

    def near(chosen: Callable[[Mapping[str, FloatArray]], FloatArray]) -> Measurement:
        shares = {name: float(chosen(peak).mean()) / limits[name] for name, peak in best.items()}
        return Measurement(
            ", ".join(f"{share:.0%} ({n})" for n, share in shares.items()),
            tuple(share >= _NEAR for share in shares.values()),
        )

    return check(
        f"WAIT's peak is at least {_NEAR:.0%} of the fluid bound",
        near,
        lambda peak: peak["wait"],
        "vllm_v0 in its place",
        lambda peak: peak["vllm_v0"],
        (
            "the best of all policies in hindsight",
            lambda peak: max(peak.values(), key=lambda found: float(found.mean())),
        ),
    )


def benchmark_verdict(points: Mapping[str, Sequence[Point]]) -> ClaimVerdict:
    """Eq. 6 bounds what is made because no more is asked for: half of it bounds nothing."""

    def bounds_all(share: float) -> Measurement:
        above, runs = 0, 0
        for mine in points.values():
            shares = [
                _means(mine, *at)[0] / (share * _offered(mine, at[1]))
                for at in {(p.policy, p.rate) for p in mine}
            ]
            above += sum(made > 1 + _CHANCE for made in shares)
            runs += len(shares)
        return Measurement(
            f"passed by {above} of {runs} means by more than {_CHANCE:.0%}; it is what is offered "
            "and knows of no machine",
            (above == 0,),
        )

    return check(
        "Throughput* (eq. 6) is the most that any policy makes", bounds_all, 1.0, "half of it", 0.5
    )


def balance_verdict(points: Mapping[str, Sequence[Point]]) -> ClaimVerdict:
    """At the heaviest load of the curves that is below the bound."""

    def superior(policy: str) -> Measurement:
        parts, told = [], []
        for name, mine in points.items():
            rates = sorted({p.rate for p in mine})
            rate = rates[-2] if len(rates) > 1 else rates[-1]
            at = {p: _means(mine, p, rate) for p in SHIPPED if p != policy}
            tokens, latency = _means(mine, policy, rate)
            parts += [tokens >= t and latency <= s for t, s in at.values()]
            rivals = ", ".join(f"{p} {t:,.0f}, {s:.3g} s" for p, (t, s) in at.items())
            told.append(f"{name}: {tokens:,.0f} tokens/s, {latency:.3g} s ({rivals})")
        return Measurement("; ".join(told), tuple(parts))

    claim = (
        "WAIT has the better throughput and latency under heavy traffic (no fewer tokens and no "
        "more latency than each rival as it comes)"
    )
    tuned = (f"{TUNED}, in its place", TUNED)
    return check(claim, superior, "wait", "vllm_v0 in its place", "vllm_v0", tuned)


def latency_verdict(points: Mapping[str, Sequence[Point]]) -> ClaimVerdict:
    """Latency at the lightest load of the curves against the rival's; the control is WAIT with the
    thresholds of its capacity, which wait there for many requests."""

    def slightly_higher(policy: str) -> Measurement:
        parts, within = [], []
        for name, mine in points.items():
            rate = min(p.rate for p in mine)
            own, rival = (_means(mine, p, rate)[1] for p in (policy, "vllm_v0"))
            within.append(own <= 2 * rival)
            parts.append(f"{own:.3g} s against {rival:.3g} ({name})")
        return Measurement("; ".join(parts), tuple(within))

    return check(
        "WAIT's latency is only slightly higher at low loads (at most twice vllm_v0's)",
        slightly_higher,
        "wait",
        "the thresholds of its capacity",
        _BEST,
        ("vllm_v1 in its place", "vllm_v1"),
    )


def _offered(points: Sequence[Point], rate: float) -> float:
    return float(np.mean([p.offered for p in points if p.rate == rate]))


def _means(points: Sequence[Point], policy: str, rate: float) -> tuple[float, float]:
    """Output tokens/s, and latency in seconds (endless where nothing was finished)."""
    mine = [p for p in points if (p.policy, p.rate) == (policy, rate)]
    latencies = [p.latency_s for p in mine if p.latency_s is not None]
    tokens = float(np.mean([p.tokens_per_s for p in mine])) if mine else 0.0
    return tokens, float(np.mean(latencies)) if latencies else np.inf


def _unit_verdict() -> ClaimVerdict:
    """No unit of time makes the low rates low and the high ones sustainable but a long one, so the
    printed figures are read as requests of a run, and only their proportions are used."""
    capacity = {name: Scene(PAPER_LINEAR, name).bound for name in _PAPER_RATES}

    def bearable(seconds: float) -> Measurement:
        over = {name: rate / seconds / capacity[name] for name, rate in _PAPER_RATES.items()}
        return Measurement(
            f"{over['low']:.2f} and {over['high']:,.2f} times the fluid capacity bound",
            tuple(x <= 1 for x in over.values()),
        )

    return check(
        "the printed rates, 1,000 + 1,000 and 6,000 + 4,000 + 2,000, are requests a second",
        bearable,
        1.0,
        "requests a millisecond",
        1e-3,
        ("requests in three minutes", 180.0),
    )


EXPERIMENT = Experiment(
    NAME, "WAIT, figure 1 a-b: throughput and latency, output lengths known", run
)
