import itertools
from dataclasses import replace

import numpy as np
import pytest
from tests.fluid.simulate import Line, poisson, run
from tests.fluid.test_equilibrium import HIGH, STAIRS

from penstock.fluid.equilibrium import equilibrium
from penstock.fluid.stages import iteration_seconds, stages_of
from penstock.fluid.step_profile import PAPER_LINEAR, StepProfile
from penstock.fluid.traffic import Traffic, TrafficType, scaled
from penstock.fluid.wait import best_wait_thresholds, wait_thresholds, wave_lengths

MEMORY = 111_580
SMALL = (TrafficType(18.0, 10, 3), TrafficType(9.0, 10, 7))
TOY = StepProfile("toy", 10**6, (0,), (0.05,), per_kv_token=2e-4, per_prefill_token=2e-4)


@pytest.mark.parametrize("profile", [TOY, STAIRS])
@pytest.mark.parametrize("wave", [1, 2])
def test_thresholds_are_the_smallest_that_keep_up(profile: StepProfile, wave: int) -> None:
    policy = wait_thresholds(profile, SMALL, 10**6, wave)
    ranges = [stages_of(t, wave=wave) for t in SMALL]
    solutions = [
        counts
        for counts in itertools.product(range(1, 12), repeat=2)
        if all(
            n > t.rate * iteration_seconds(profile, ranges, counts)
            for n, t in zip(counts, SMALL, strict=True)
        )
    ]
    smallest = tuple(min(n[j] for n in solutions) for j in range(2))
    assert policy.thresholds == smallest
    assert smallest in solutions
    assert policy.iteration_s == iteration_seconds(profile, ranges, smallest)


def test_where_none_fit_it_says_so() -> None:
    with pytest.raises(ValueError, match="107686 KV tokens, memory has 107685"):
        wait_thresholds(PAPER_LINEAR, scaled(HIGH, 0.01), 107_685)
    few = replace(TOY, state_slots=11)
    with pytest.raises(ValueError, match=r"hold at least 12 requests, .* for 11 recurrent states"):
        wait_thresholds(few, scaled(SMALL, 0.01), MEMORY)
    assert wait_thresholds(replace(TOY, state_slots=12), scaled(SMALL, 0.01), MEMORY)
    with pytest.raises(ValueError, match="unstable"):
        wait_thresholds(PAPER_LINEAR, scaled(HIGH, 1000.0), MEMORY)
    with pytest.raises(ValueError, match="at least one type"):
        wait_thresholds(PAPER_LINEAR, (), MEMORY)


def simulated(
    policy_of: Traffic, thresholds: tuple[float, ...], horizon: float, seed: int
) -> tuple[list[Line], int]:
    rng = np.random.default_rng(seed)
    lines = [
        Line(t.prompt_len, [t.decode_len], [int(n)])
        for t, n in zip(policy_of, thresholds, strict=True)
    ]
    arrivals = [
        (at, j, t.decode_len)
        for j, t in enumerate(policy_of)
        for at in poisson(rng, t.rate, horizon)
    ]
    return lines, run(lines, arrivals, lambda kv: 0.05 + 2e-4 * kv)[0]


@pytest.mark.slow
def test_the_algorithm_keeps_every_bound() -> None:
    # Planned for 10% more, so that queues are shorter.
    policy = replace(wait_thresholds(TOY, scaled(SMALL, 1.1), 10**6), traffic=SMALL)
    lines, peak = simulated(SMALL, policy.thresholds, 2000.0, seed=8)
    assert peak == policy.kv_tokens, "M^π is reached, and never passed"
    optimum = equilibrium(TOY, SMALL)
    assert peak > optimum.kv_tokens, "M* is passed"
    for line, latency in zip(lines, policy.latency_bounds_s(), strict=True):
        assert 0.4 * latency < np.mean(line.latencies) < latency


def test_the_best_wave_has_the_least_latency() -> None:
    mix = scaled(HIGH, 1.0)
    best = best_wait_thresholds(STAIRS, mix, MEMORY)
    bounds = []
    for wave in wave_lengths(301):
        try:
            one = wait_thresholds(STAIRS, mix, MEMORY, wave)
        except ValueError:
            continue
        bounds.append(sum(t.rate * b for t, b in zip(mix, one.latency_bounds_s(), strict=True)))
    mean = sum(t.rate * b for t, b in zip(mix, best.latency_bounds_s(), strict=True))
    assert mean == pytest.approx(min(bounds))
    assert len(bounds) > 3
    assert wave_lengths(301)[-1] == 512
    assert wave_lengths(1) == [1]
    with pytest.raises(ValueError, match="no thresholds fit"):
        best_wait_thresholds(STAIRS, mix, 300)
