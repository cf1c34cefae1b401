"""Requests with latency targets of their own, on the virtual clock."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.config import PolicyConfig
from penstock.sim.acceptance import GeometricAcceptance
from penstock.sim.profiles import load_profile
from penstock.sim.run import Report, Setup, run
from penstock.sim.workloads import Workload, make_workload

A100 = load_profile("a100-llama2-7b")


def mixed(num: int = 90, rate: float = 14.0, tight: float = 0.011, seed: int = 0) -> Workload:
    """Every third request asks for a tight TPOT, every third for a loose one."""
    rng = np.random.default_rng(1)
    lengths = Workload(
        "mixed",
        rng.integers(50, 1500, num),
        rng.integers(30, 300, num),
        tenants=np.array(["a", "b"] * (num // 2)),
        tpot=np.array([tight, 0.05, np.nan] * (num // 3)),
    )
    return make_workload(lengths, rate=rate, seed=seed)


def served(workload: Workload, **options: Any) -> Report:
    setup = Setup(
        A100,
        PolicyConfig.from_name("fluid_guided"),
        PolicyConfig.from_name("priced", **options),
        acceptance=GeometricAcceptance({"d": 0.7}),
        drafters=("d",),
    )
    return run(setup, workload)


@pytest.mark.slow
def test_the_summary_counts_them_by_tenant() -> None:
    report = served(mixed())
    figures = report.figures()
    of_all = figures["latency_targets"]
    assert of_all == {"requests": 60, "met": int(report.met_target.sum())}
    of_tenants = [figures["tenants"][name]["latency_targets"] for name in "ab"]
    assert sum(own["met"] for own in of_tenants) == of_all["met"]
    assert sum(own["requests"] for own in of_tenants) == 60
    without = served(replace(mixed(), tpot=None).select(slice(6))).figures()
    assert "latency_targets" not in without


@pytest.mark.slow
def test_more_targets_are_met_than_where_they_are_worth_nothing() -> None:
    def met(**options: Any) -> int:
        loads = [mixed(tight=0.007, seed=seed) for seed in range(4)]
        return sum(int(served(load, **options).met_target.sum()) for load in loads)

    assert met() > 1.05 * met(in_time=0)


def test_a_deadline_is_met_or_missed_by_the_last_token() -> None:
    workload = Workload(
        "two",
        np.array([100, 100]),
        np.array([50, 50]),
        np.zeros(2),
        deadline=np.array([100.0, 0.01]),
    )
    report = run(Setup(A100), workload)
    assert report.has_target.tolist() == [True, True]
    assert report.met_target.tolist() == [True, False]


def test_a_prompt_is_held_back_for_those_whose_clients_ask_for_it() -> None:
    """A prompt of 40,000 tokens comes while twenty decode."""
    prompts = np.array([200] * 20 + [40_000])
    arrivals = np.array([0.0] * 20 + [0.5])
    workload = Workload("one", prompts, np.full(21, 200), arrivals)
    tpot = np.array([0.03] * 20 + [np.nan])
    setup = Setup(A100, PolicyConfig.from_name("fluid_guided"), kv_tokens=100_000)
    plain, told = run(setup, workload), run(setup, replace(workload, tpot=tpot))
    assert told.met_target.sum() == 20
    assert (plain.token_seconds[:20] > 0.03).any()
    assert told.ttft[-1] < 2 * plain.ttft[-1]


def test_no_request_is_held_back_for_a_target_that_cannot_be_met() -> None:
    prompts = np.array([200] * 20 + [40_000])
    workload = Workload("one", prompts, np.full(21, 200), np.array([0.0] * 20 + [0.5]))
    setup = Setup(A100, PolicyConfig.from_name("fluid_guided"), kv_tokens=100_000)
    hopeless = replace(workload, tpot=np.array([0.001] * 20 + [np.nan]))
    plain, told = run(setup, workload), run(setup, hopeless)
    assert told.finished_at == pytest.approx(plain.finished_at)


def test_the_request_with_the_least_slack_is_admitted_first() -> None:
    """Of six behind a long one, with one place: by slack the two with a deadline come first."""
    deadline = np.array([np.nan, np.nan, np.nan, np.nan, 9.0, 3.0])
    workload = Workload(
        "six", np.full(6, 100), np.array([200, 40, 40, 40, 20, 20]), np.zeros(6), deadline=deadline
    )
    options: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 2048}
    setup = Setup(A100, PolicyConfig.from_name("vllm_v1", **options, order="slack"))
    started = run(setup, workload).first_token_at
    assert started[5] < started[1]
    assert (np.diff(started[1:4]) > 0).all()
    plain = run(replace(setup, admission=PolicyConfig.from_name("vllm_v1", **options)), workload)
    assert (np.diff(plain.first_token_at) > 0).all()
