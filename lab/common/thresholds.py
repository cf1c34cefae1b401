"""Thresholds that the literal algorithms are tried with, and what the fluid expects of them.

Let every batch have the type (or the first segment) with the largest λ_j / n_j. Others join when
they have gathered, and their stages cost a_j seconds of attention a request whenever that is, so a
policy keeps up while rate × (linear(positions a batch) max_j p_j / n_j + Σ p_j a_j) < 1, with
shares p_j. On paper-linear linear(·) is d0, and a_j is d1 K_j, with K_j the KV tokens that one
request holds, summed over its steps. Large thresholds are better, and memory ends that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from lab.common.loads import Candidate, setup_of
from penstock.fluid.nested import segments_of
from penstock.fluid.stages import StageRange, attention_seconds, stages_of
from penstock.fluid.step_profile import PAPER_LINEAR, StepProfile
from penstock.fluid.traffic import Traffic, scaled
from penstock.fluid.wait import wait_thresholds
from penstock.sim.planner import traffic_of
from penstock.sim.run import Setup
from penstock.sim.workloads import synthetic

_LOADS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)


def unit_traffic(name: str) -> Traffic:
    """A named workload at one request a second."""
    return traffic_of(synthetic(name, 1, 0), 1.0)


def work_of(traffic: Traffic) -> list[int]:
    """K_j: KV tokens held, summed over the steps of one request of each type."""
    return [stages_of(t).kv_tokens() for t in traffic]


def expected(profile: StepProfile, traffic: Traffic, batches: float) -> float:
    """Requests/s of `traffic` at one request a second, with so many batches a request."""
    works = [(t.rate, stages_of(t).work()) for t in traffic]
    positions = sum(rate * work.num_positions for rate, work in works) / batches
    attention = sum(rate * attention_seconds(profile, work) for rate, work in works)
    step = profile.linear(math.ceil(positions)) + profile.decode_fixed
    return 1 / (step * batches + attention)


# --- WAIT -----------------------------------------------------------------------------------------


def wait_choice(
    traffic: Traffic, thresholds: Sequence[int], profile: StepProfile = PAPER_LINEAR
) -> Candidate:
    """WAIT with whole thresholds for each type of `traffic` at one request a second."""
    batches = max(t.rate / n for t, n in zip(traffic, thresholds, strict=True))
    setup = setup_of(
        "wait",
        profile,
        output_lens=tuple(t.output_len for t in traffic),
        thresholds=tuple(thresholds),
    )
    return Candidate(setup, expected(profile, traffic, batches))


def planned_wait(
    traffic: Traffic, bound: float, profile: StepProfile = PAPER_LINEAR
) -> Iterator[Candidate]:
    """The fluid planner's thresholds for a range of loads below `bound`, where they fit."""
    for share in _LOADS:
        thresholds = planned_thresholds(traffic, share * bound, profile)
        if thresholds is not None:
            yield wait_choice(traffic, thresholds, profile)


def planned_thresholds(
    traffic: Traffic, rate: float, profile: StepProfile = PAPER_LINEAR
) -> tuple[int, ...] | None:
    """The fluid planner's thresholds for `rate` requests/s; None where none fit."""
    try:
        found = wait_thresholds(profile, scaled(traffic, rate), profile.kv_tokens)
    except ValueError:
        return None
    return tuple(int(n) for n in found.thresholds)


def wait_neighbours(traffic: Traffic, setup: Setup) -> Iterator[Candidate]:
    """Thresholds that differ by one for one type or for all, and whose M^π fits."""
    centre = setup.admission.options["thresholds"]
    for thresholds in _moved(centre):
        held = sum(n * k for n, k in zip(thresholds, work_of(traffic), strict=True))
        if held <= setup.profile.kv_tokens:
            yield wait_choice(traffic, thresholds, setup.profile)


def _moved(centre: Sequence[int]) -> Iterator[tuple[int, ...]]:
    count = len(centre)
    single = [tuple(int(i == j) for i in range(count)) for j in range(count)]
    for move, sign in itertools.product([*single, (1,) * count], (1, -1)):
        moved = tuple(n + sign * m for n, m in zip(centre, move, strict=True))
        if min(moved) >= 1:
            yield moved


# --- Nested WAIT ----------------------------------------------------------------------------------


def nested_choice(
    traffic: Traffic,
    ends: Sequence[int],
    thresholds: Sequence[int],
    profile: StepProfile = PAPER_LINEAR,
) -> Candidate:
    """Nested WAIT with segments that end at `ends` output tokens."""
    options = {"segment_ends": tuple(ends), "thresholds": tuple(thresholds)}
    batches = sum(t.rate for t in traffic) / thresholds[0]
    return Candidate(
        setup_of("nested_wait", profile, **options), expected(profile, traffic, batches)
    )


def nested_choices(
    traffic: Traffic, num_segments: int, profile: StepProfile = PAPER_LINEAR
) -> Iterator[Candidate]:
    """For every first threshold: the smallest whole ones that keep up behind it (eq. 11), and the
    rounded shares of it; where the mean occupancy fits. M^π counts requests that have ended early
    and would admit less, but hindsight may use what they leave."""
    ends = segment_ends(traffic, num_segments)
    shares = [_going_on(traffic, start) for start in (0, *ends[:-1])]
    for first in itertools.count(1):
        kept_up = [first]
        for a, b in itertools.pairwise(shares):
            kept_up.append(int(kept_up[-1] * b / a) + 1)
        rounded = [max(1, round(first * share)) for share in shares]
        memory = profile.kv_tokens
        fitting = [t for t in (kept_up, rounded) if nested_kv(traffic, ends, t) < memory]
        if not fitting:
            return
        for thresholds in fitting:
            yield nested_choice(traffic, ends, thresholds, profile)


def nested_neighbours(traffic: Traffic, setup: Setup) -> Iterator[Candidate]:
    """Thresholds that differ by one, where the mean occupancy fits."""
    ends = setup.admission.options["segment_ends"]
    for thresholds in _moved(setup.admission.options["thresholds"]):
        if nested_kv(traffic, ends, thresholds) < setup.profile.kv_tokens:
            yield nested_choice(traffic, ends, thresholds, setup.profile)


def segment_ends(traffic: Traffic, num_segments: int) -> tuple[int, ...]:
    """Output tokens with which each segment ends, of equally many types each (B.2)."""
    return tuple(end + 1 for end in segments_of(traffic, num_segments).ends)


def nested_kv(traffic: Traffic, ends: Sequence[int], thresholds: Sequence[int]) -> float:
    """KV tokens that full segments hold on average: n_i requests enter a segment together, and
    those that end within it leave their places."""
    held = 0.0
    for start, end, n in zip((0, *ends[:-1]), ends, thresholds, strict=True):
        entering = _going_on(traffic, start)
        for kind in traffic:
            if kind.output_len > start:
                last = min(kind.output_len, end) - 1
                stages = StageRange(kind.prompt_len, start, last).kv_tokens()
                held += n * kind.rate / entering * stages
    return held


def _going_on(traffic: Traffic, start: int) -> float:
    """Share of the requests that enter a segment which begins after `start` output tokens."""
    return sum(t.rate for t in traffic if t.output_len > start)
