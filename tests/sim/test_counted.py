"""Counting requests that only lengths are known of, and planning runs of equal steps at once,
changes no result: every policy does the same request by request, step by step."""

from typing import Any

import numpy as np
import pytest
from tests.core.world import ADMISSIONS
from tests.products import covering, first_fast

from penstock.config import PolicyConfig
from penstock.sim.profiles import load_profile
from penstock.sim.run import Report, Setup, run
from penstock.sim.workloads import Workload, make_workload

PROFILE = load_profile("a100-llama2-7b")


def long_prompts() -> Workload:
    """Prompts up to many times a step's budget, outputs from one token on."""
    rng = np.random.default_rng(5)
    lengths = Workload("long", rng.integers(1, 3000, 120), rng.integers(1, 150, 120))
    return make_workload(lengths, rate=2.5, seed=2)


WORKLOADS = {
    "low": make_workload("low", num_requests=250, rate=150, seed=3),
    "high": make_workload("high", num_requests=250, rate=40, seed=3),
    "long": long_prompts(),
}
# So tight that policies which do not plan ahead preempt, in tokens.
MEMORY = {"low": 1400, "high": 8000, "long": 4200}
AMPLE = 400_000
LENGTHS = {"low": (10, 20), "high": (100, 200, 300), "long": (50, 100, 150)}
THRESHOLDS = {"low": (2, 2), "high": (1, 1, 1), "long": (1, 1, 1)}


def options_of(admission: str, name: str) -> dict[str, Any]:
    lengths, thresholds = LENGTHS[name], THRESHOLDS[name]
    policy, options = ADMISSIONS[admission]
    if options:
        options = {"thresholds": tuple(0.3 * n for n in thresholds), **options}
    else:
        options = {"thresholds": thresholds}
    if policy == "wait":
        return {"output_lens": lengths, **options}
    if policy == "nested_wait":
        return {"segment_ends": lengths, **options}
    return {}


def both(
    admission: str, name: str, block_size: int, kv_tokens: int | None = None, **options: Any
) -> tuple[Report, Report]:
    counted, single = (
        run(
            Setup(
                PROFILE,
                PolicyConfig.from_name(
                    ADMISSIONS[admission][0], **options_of(admission, name), **options
                ),
                kv_tokens=kv_tokens or MEMORY[name],
                block_size=block_size,
                counted=counted,
            ),
            WORKLOADS[name],
        )
        for counted in (True, False)
    )
    return counted, single


def assert_same(counted: Report, single: Report) -> None:
    for column in ("arrived_at", "first_token_at", "finished_at", "refused"):
        np.testing.assert_array_equal(getattr(counted, column), getattr(single, column), column)
    # What is counted tells of its tokens at its end.
    done = single.completed
    np.testing.assert_array_equal(counted.num_tokens[done], single.num_tokens[done])
    for figure in ("num_preemptions", "num_steps", "finished_at", "stalled"):
        assert getattr(counted.result, figure) == getattr(single.result, figure), figure
    # One by one, some requests have taken their blocks when others are preempted for the next.
    peaks = counted.result.kv_peak_tokens, single.result.kv_peak_tokens
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("admission", "name", "block_size"),
    covering(sorted(ADMISSIONS), WORKLOADS, [1, 16], strength=1),
)
def test_counting_changes_nothing(admission: str, name: str, block_size: int) -> None:
    literal = admission in ("wait", "nested_wait")
    counted, single = both(admission, name, block_size, AMPLE if literal else None)
    assert_same(counted, single)
    assert single.completed.sum() > 10


@pytest.mark.parametrize("admission", ["wait", "nested_wait"])
def test_a_deadlock_comes_at_the_same_step(admission: str) -> None:
    counted, single = both(admission, "high", 1)
    assert single.result.stalled
    assert_same(counted, single)


@pytest.mark.parametrize("name", first_fast(WORKLOADS))
def test_the_memory_is_tight(name: str) -> None:
    """Otherwise the comparison would say little."""
    counted, single = both("vllm_v1", name, 1, reserve_full_prompt=False)
    assert_same(counted, single)
    assert counted.result.num_preemptions > 5


@pytest.mark.slow
def test_targets_change_nothing_in_it() -> None:
    counted, single = both("fluid_guided", "low", 1, ttft_p99=1.0, tpot_p99=0.05)
    assert_same(counted, single)
