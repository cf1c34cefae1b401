import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tests.fluid.simulate import Line, poisson, run

from penstock.fluid.nested import (
    NestedThresholds,
    Segments,
    log_odds,
    nested_policy,
    nested_thresholds,
    segments_of,
)
from penstock.fluid.queues import tail_exponent
from penstock.fluid.stages import iteration_seconds
from penstock.fluid.step_profile import PAPER_LINEAR, StepProfile
from penstock.fluid.traffic import TrafficType, scaled

MEMORY = 111_580
NESTED = tuple(TrafficType(1.0, 62, n) for n in (20, 40, 80, 160))
SMALL = tuple(TrafficType(8.0, 10, n) for n in (3, 6, 12))
TOY = StepProfile("toy", 10**6, (0,), (0.05,), per_kv_token=2e-4, per_prefill_token=2e-4)


def printed_in_appendix_d(prompt: int, ends: list[int], counts: list[int]) -> float:
    """Σ n_j (l + (l'_1 + … + l'_j)/2)(l'_j − l'_{j−1})."""
    sums = np.cumsum(ends) / 2
    return float(np.sum(np.array(counts) * (prompt + sums) * np.diff([0, *ends])))


def printed_in_b2(prompt: int, width: int, counts: list[int]) -> float:
    """Σ n_i (l + i ΔL / 2) ΔL."""
    return sum(n * (prompt + i * width / 2) * width for i, n in enumerate(counts, 1))


def test_segments_of_types() -> None:
    four = segments_of(NESTED, 4)
    assert four.ends == (20, 40, 80, 160)
    assert four.survival == pytest.approx((3 / 4, 2 / 3, 1 / 2))
    assert four.rate == 4.0
    two = segments_of(NESTED, 2)
    assert two.ends == (40, 160)
    assert two.survival == (0.5,)
    assert segments_of(NESTED, 1).ends == (160,)
    stages = [(r.first, r.last) for r in four.ranges()]
    assert stages == [(0, 20), (21, 40), (41, 80), (81, 160)], "segment 1 has stage 0 too"
    assert [four.queue_kv_tokens(i) for i in range(4)] == [0, 82, 102, 142]
    with pytest.raises(ValueError, match="1 to 4 segments"):
        segments_of(NESTED, 5)


def test_waves_move_the_ends_of_segments() -> None:
    eight = segments_of(NESTED, 4, wave=8)
    assert eight.ends == (23, 47, 87, 160), "21 steps are three stages of 8"
    assert eight.survival == segments_of(NESTED, 4).survival
    assert sum(r.num_stages for r in eight.ranges()) == math.ceil(161 / 8)
    assert len(segments_of(NESTED, 3, wave=64).ends) == 3
    with pytest.raises(ValueError, match="1 to 3 segments"):
        segments_of(NESTED, 4, wave=64)
    with pytest.raises(ValueError, match="where a stage of 8 steps does"):
        replace(eight, ends=(20, 40, 80, 160))


def test_peak_memory_is_the_sum_over_stages_and_not_what_is_printed() -> None:
    counts = [7, 6, 5, 3]
    policy = nested_policy(PAPER_LINEAR, segments_of(NESTED, 4), counts, 0.01, 1000)
    entries = [0, 21, 41, 81, 161]
    by_stage = sum(
        n * (62 + k)
        for n, (first, end) in zip(counts, itertools.pairwise(entries), strict=True)
        for k in range(first, end)
    )
    assert policy.batch_kv_tokens == by_stage
    assert printed_in_appendix_d(62, [20, 40, 80, 160], counts) != by_stage
    equal = Segments((62,) * 3, (20, 40, 60), (0.6, 0.5), 1.0)
    three = nested_policy(PAPER_LINEAR, equal, [7, 6, 5], 0.01, 1000)
    assert printed_in_b2(62, 20, [7, 6, 5]) < 0.9 * three.batch_kv_tokens, "far too small"
    assert printed_in_appendix_d(62, [20, 40, 60], [7, 6, 5]) != three.batch_kv_tokens


def test_the_three_terms_of_the_memory_bound() -> None:
    counts = [8, 7, 5, 3]
    segments = segments_of(NESTED, 4)
    policy = nested_policy(PAPER_LINEAR, segments, counts, 0.01, 1000)
    odds = math.log(3 * 1000 / 0.01)
    assert log_odds(4, 1000, 0.01) == pytest.approx(odds)
    assert policy.queue_kv_tokens == 7 * 82 + 5 * 102 + 3 * 142
    exponents = [tail_exponent(a, b, p) for a, b, p in ((8, 7, 0.75), (7, 5, 2 / 3), (5, 3, 0.5))]
    tail = sum(odds / t * kv for t, kv in zip(exponents, (82, 102, 142), strict=True))
    assert policy.tail_kv_tokens == pytest.approx(tail)
    assert policy.kv_bound_tokens == pytest.approx(
        policy.batch_kv_tokens + policy.queue_kv_tokens + tail
    )


def test_thresholds_that_cannot_keep_up_are_refused() -> None:
    segments = segments_of(scaled(NESTED, 20.0), 4)
    with pytest.raises(ValueError, match="first threshold is too low"):
        nested_policy(PAPER_LINEAR, segments, [1, 1, 1, 1], 0.01, 1000)
    with pytest.raises(ValueError, match="grow without bound"):
        nested_policy(PAPER_LINEAR, segments_of(NESTED, 4), [8, 6, 5, 3], 0.01, 1000)
    with pytest.raises(ValueError, match="4 segments need as many"):
        nested_policy(PAPER_LINEAR, segments, [8, 7], 0.01, 1000)
    with pytest.raises(ValueError, match="δ lies in"):
        nested_policy(PAPER_LINEAR, segments_of(NESTED, 4), [8, 7, 5, 3], 1.5, 1000)
    with pytest.raises(ValueError, match="no thresholds fit"):
        nested_thresholds(PAPER_LINEAR, segments, 20_000, 0.01, 1000)


def smallest(segments: Segments, shape: Callable[[int], list[int]]) -> NestedThresholds:
    """The bounds of the smallest first threshold that keeps up, the others by `shape`."""
    for first in range(1, 400):
        thresholds = shape(first)
        seconds = iteration_seconds(PAPER_LINEAR, segments.ranges(), thresholds)
        if segments.rate * seconds < first:
            return nested_policy(PAPER_LINEAR, segments, thresholds, 1e-3, 10**5)
    raise AssertionError("this shape never keeps up")


@pytest.mark.parametrize("rate", [2.0, 10.0, 20.0])
def test_the_solver_needs_less_memory_than_simple_shapes(rate: float) -> None:
    segments = segments_of(scaled(NESTED, rate), 4, wave=4)
    policy = nested_thresholds(PAPER_LINEAR, segments, MEMORY, 1e-3, 10**5)
    assert policy.thresholds[0] > segments.rate * policy.iteration_s
    for (a, b), p in zip(itertools.pairwise(policy.thresholds), segments.survival, strict=True):
        assert a * p < b <= a

    def leanest(first: int) -> list[int]:
        thresholds = [first]
        for p in segments.survival:
            thresholds.append(math.floor(thresholds[-1] * p) + 1)
        return thresholds

    lean = smallest(segments, leanest)
    flat = smallest(segments, lambda first: [first] * 4)
    assert policy.thresholds[0] <= flat.thresholds[0]
    assert policy.kv_bound_tokens <= min(lean.kv_bound_tokens, flat.kv_bound_tokens)


def simulated(policy: NestedThresholds, horizon: float, seed: int) -> tuple[Line, int, int]:
    rng = np.random.default_rng(seed)
    line = Line(10, policy.segments.ends, policy.thresholds)
    arrivals = [(at, 0, t.decode_len) for t in SMALL for at in poisson(rng, t.rate, horizon)]
    return line, *run([line], arrivals, lambda kv: 0.05 + 2e-4 * kv)


@pytest.mark.slow
def test_the_algorithm_keeps_the_bounds() -> None:
    delta, iterations, runs = 0.2, 4000, 30
    policy = nested_thresholds(TOY, segments_of(SMALL, 3), 10**6, delta, iterations)
    above = 0
    for seed in range(runs):
        line, peak, peak_batch = simulated(policy, 150.0, seed)
        assert len(line.queue_samples[0]) <= iterations
        assert peak_batch == policy.batch_kv_tokens, "M^π is what a full batch holds"
        above += peak > policy.kv_bound_tokens
        assert peak > policy.batch_kv_tokens, "queues before later segments hold KV"
    assert above <= delta * runs
