"""WAIT paper, figure 1 (c-d): throughput and latency of Nested WAIT on ten bins of lengths.

The bins are drawn from e^(−l'/210) and, with measurements, from recorded conversations: those of at
most 500 output tokens, with prompts of 62 tokens as in appendix B.2. The paper's LMSYS-Chat-1M is
not at hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from lab.common.claims import ClaimVerdict, Measurement, check, not_measured
from lab.common.experiment import QUICK, Experiment, LabError, Trial
from lab.common.loads import (
    PROFILES,
    SHIPPED,
    TUNED,
    Point,
    Scene,
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
from lab.common.recorded import LONGEST, PROMPT, RECORDED, recorded_lengths
from lab.common.statistics import FloatArray
from lab.common.thresholds import (
    nested_choices,
    nested_kv,
    nested_neighbours,
    segment_ends,
    unit_traffic,
)
from penstock.fluid.step_profile import PAPER_LINEAR
from penstock.fluid.traffic import Traffic, TrafficType, scaled
from penstock.fluid.wait import fractional_wait_thresholds
from penstock.sim.run import Setup
from penstock.sim.workloads import MIXES, Workload

NAME = "wait_fig1_nested"

_SYNTHETIC = ("ten_bins", "nested")
_SEGMENTS = 10
_FEWER = (4, 2, 1)
_GATED_LOADS = (0.95, 0.9, 0.85, 0.8, 0.7, 0.5)
"""Shares of the bound: the first that has an equilibrium is what the gated version's thresholds are
planned for."""
LITERAL, GATED = "nested_wait", "nested_wait, gated"
_DRAWN = (LITERAL, GATED, *SHIPPED, TUNED)


def run(job: Trial) -> list[ClaimVerdict]:
    is_quick = job.effort.seeds <= QUICK.seeds
    workloads: list[str | Workload] = [*(_SYNTHETIC[:1] if is_quick else _SYNTHETIC)]
    recorded = recorded_lengths(job.data)
    if recorded is not None:
        workloads.append(recorded)
    scenes = [Scene(load(), w) for load in PROFILES.values() for w in workloads]
    points: list[tuple[Scene, Point]] = []
    found: dict[str, Mapping[str, Setup]] = {}
    shorter = replace(job, effort=replace(job.effort, arrivals=job.effort.arrivals // 2))
    for scene in scenes:
        setups = found[scene.name] = servers(job, scene)
        drawn = curves(shorter, scene, partial(_whatever_load, setups), NAME)
        points += [(scene, p) for p in drawn]
    best = {scene.name: peaks(p for s, p in points if s is scene) for scene in scenes}
    write_peaks(scenes, found, best, job.out / f"{NAME}_peak.csv")
    write_points(points, job.out / f"{NAME}.csv")
    title = "Nested WAIT on unknown output lengths (WAIT paper, figure 1 c-d)"
    draw_points(points, _DRAWN, job.out / f"{NAME}.png", title)
    missing = [] if recorded else [not_measured("recorded lengths", f"{RECORDED} (--data)")]
    thresholds = {
        name: setups[LITERAL].admission.options["thresholds"]
        for name, setups in found.items()
        if LITERAL in setups
    }
    return [*verdicts(best, thresholds, bounds(scenes, points)), *missing]


def _whatever_load(setups: Mapping[str, Setup], rate: float) -> Mapping[str, Setup]:
    """Thresholds are the same at every load."""
    return setups


def traffic_of(lengths: str | Workload) -> Traffic:
    """Types at one request a second altogether: of a mix, or recorded lengths in ten bins."""
    if isinstance(lengths, str):
        return unit_traffic(lengths)
    width = LONGEST // _SEGMENTS
    bins = np.bincount((lengths.output_len - 1) // width, minlength=_SEGMENTS) / len(lengths)
    return tuple(TrafficType(float(p), PROMPT, width * (i + 1) - 1) for i, p in enumerate(bins))


def servers(job: Trial, scene: Scene) -> dict[str, Setup]:
    """Rivals; the best literal algorithm in hindsight, if any is stable; the gated version with a
    segment for each length."""
    traffic = traffic_of(scene.lengths)
    job.tell(f"{NAME}: Sarathi's budget and cap on {scene.name}")
    found = {p: setup_of(p, scene.profile) for p in SHIPPED}
    found[TUNED] = tuned_sarathi(scene, job.effort, job.workers)
    found[GATED] = _gated(scene, traffic)
    # It is slow to simulate: paused requests are looked at one by one.
    effort = replace(job.effort, arrivals=job.effort.arrivals // 3, tries=job.effort.tries // 2)
    best = 0.0
    for count in (c for c in _FEWER if c <= len(traffic)):
        sustained = best_of(
            nested_choices(traffic, count, scene.profile),
            lambda setup: nested_neighbours(traffic, setup),
            scene,
            effort,
            lambda what: job.tell(f"{NAME}: {what}"),
            job.workers,
        )
        if sustained is not None and sustained.requests_per_s > best:
            best, found[LITERAL] = sustained.requests_per_s, sustained.setup
    return found


def _gated(scene: Scene, traffic: Traffic) -> Setup:
    """The version that serves, with the fluid's fractional thresholds: a segment's is the share of
    the requests that enters it."""
    profile = scene.profile
    ends = segment_ends(traffic, min(_SEGMENTS, len(traffic)))
    # A bin counts as its longest length, so that the bound may be too much for recorded ones.
    for share in _GATED_LOADS:
        planned = scaled(traffic, share * scene.bound)
        try:
            found = fractional_wait_thresholds(profile, planned, 2 * profile.kv_tokens)
            break
        except ValueError:
            continue
    else:
        raise LabError(f"no thresholds for {scene.name} at {_GATED_LOADS[-1]:.0%} of the bound")
    per_stage = found.thresholds
    numbers = list(zip(planned, per_stage, strict=True))
    thresholds = tuple(
        sum(n for t, n in numbers if t.output_len > start) for start in (0, *ends[:-1])
    )
    return setup_of(LITERAL, profile, gated=True, segment_ends=ends, thresholds=thresholds)


# --- verdicts -------------------------------------------------------------------------------------


def verdicts(
    best: Mapping[str, Mapping[str, FloatArray]],
    thresholds: Mapping[str, Sequence[int]],
    limits: Mapping[str, float],
) -> list[ClaimVerdict]:
    """What peaks say about the paper's claims for Nested WAIT. best: by scene and policy.
    thresholds: of the best literal one, by scene. limits: output tokens/s."""
    found = [_ten_segments_verdict()]
    for scene, peak in best.items():
        rivals = {p: v for p, v in peak.items() if p not in (LITERAL, GATED)}
        zero = np.zeros(len(rivals[SHIPPED[0]]))
        chosen = "/".join(map(str, thresholds.get(scene, ("none that fit",))))
        for policy, what in (
            (LITERAL, f"Nested WAIT as printed (thresholds {chosen})"),
            (GATED, "the version that serves"),
        ):
            own = {policy: peak.get(policy, zero), **rivals}
            found.append(gain_verdict(f"{scene}: {what}", policy, own, limits[scene]))
    return found


def _ten_segments_verdict() -> ClaimVerdict:
    traffic = unit_traffic("ten_bins")

    def fits(thresholds: Sequence[int]) -> Measurement:
        needed = nested_kv(traffic, segment_ends(traffic, len(thresholds)), thresholds)
        return Measurement(
            f"thresholds of {thresholds[0]} hold {needed:,.0f} KV tokens on average, memory has "
            f"{PAPER_LINEAR.kv_tokens:,}",
            (needed <= PAPER_LINEAR.kv_tokens,),
        )

    return check(
        f"L = {_SEGMENTS} segments, as in the experiments, for lengths up to "
        f"{MIXES['ten_bins'].decode_lens[-1]}",
        fits,
        (1,) * _SEGMENTS,
        "two requests a stage",
        (2,) * _SEGMENTS,
        ("the fewest segments", (1,)),
    )


EXPERIMENT = Experiment(
    NAME, "WAIT, figure 1 c-d: throughput and latency, output lengths unknown", run
)
