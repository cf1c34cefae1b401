"""The policies that fluid_guided is compared with, where prompts are long."""

from typing import Any

import numpy as np
import pytest
from tests.products import first_fast

from lab.rivals import policy_named
from penstock.sim.profiles import load_profile
from penstock.sim.run import Report, Setup, run
from penstock.sim.workloads import Workload, make_workload

A100 = load_profile("a100-llama2-7b")


def served(admission: str, workload: Workload, **options: Any) -> Report:
    return run(Setup(A100, policy_named(admission, **options)), workload)


def long_prompts(num: int, rate: float, seed: int = 0) -> Workload:
    """Log-normal lengths, prompts of 12,000 tokens in the mean."""
    rng = np.random.default_rng([seed, 7])
    prompts = np.clip(rng.lognormal(np.log(12_000) - 0.5, 1.0, num), 16, 100_000)
    outputs = np.clip(rng.lognormal(np.log(200) - 0.5, 1.0, num), 1, 2000)
    lengths = Workload("long", prompts.astype(np.int64), outputs.astype(np.int64))
    return make_workload(lengths, rate=rate, arrivals="poisson", seed=seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "admission", first_fast(["vllm_v1", "sarathi", "vllm_v0", "fluid_guided"], 3)
)
def test_every_rival_takes_the_size_aware_order(admission: str) -> None:
    """On long prompts the order is worth more than anything else."""
    workload = long_prompts(250, 0.6)
    in_order = served(admission, workload, order="arrival")
    by_size = served(admission, workload, order="size_aware")
    assert by_size.ttft.mean() < 0.85 * in_order.ttft.mean()


@pytest.mark.slow
@pytest.mark.parametrize("admission", ["fluid_guided", "sarathi"])
def test_the_size_aware_order_leaves_the_tail_where_it_was(admission: str) -> None:
    """It halves the mean wait of a long queue."""
    ratios = []
    for seed in range(5):
        workload = long_prompts(120, 0.7, seed)
        arrival, by_size = (
            served(admission, workload, order=order).figures()
            for order in ("arrival", "size_aware")
        )
        longest = [f["by_prompt_len"][-1]["slowdown"] for f in (by_size, arrival)]
        ratios.append(
            (
                by_size["ttft_s"]["p999"] / arrival["ttft_s"]["p999"],
                longest[0] / longest[1],
                by_size["ttft_s"]["mean"] / arrival["ttft_s"]["mean"],
            )
        )
    last, slowdown, mean = np.array(ratios).T
    assert last.max() < 1.25
    assert slowdown.mean() < 1.25
    assert mean.mean() < 0.7


@pytest.mark.slow
def test_the_order_of_fluid_guided_is_size_aware() -> None:
    workload = long_prompts(100, 0.6)
    default = served("fluid_guided", workload).finished_at
    assert (default == served("fluid_guided", workload, order="size_aware").finished_at).all()
