"""Which loads are sustained: queues whose limit is known, and policies on runs of any length."""

from dataclasses import replace

import numpy as np
import pytest
from tests.products import first_fast

from lab.common.loads import Scene
from penstock.config import PolicyConfig
from penstock.fluid.step_profile import PAPER_LINEAR
from penstock.sim.capacity import Criterion, TooShort, capacity, judge_load
from penstock.sim.driver import SimulationResult
from penstock.sim.planner import load_bound
from penstock.sim.profiles import load_profile
from penstock.sim.run import Report, Setup, run
from penstock.sim.workloads import Workload, make_workload

PROFILE = load_profile("a100-llama2-7b")
PAPER = load_profile("paper-linear")
SEEDS = range(5)


def one_server(load: float, num: int, seed: int) -> Report:
    """An M/M/1 queue that serves one request a second, by Lindley's recursion."""
    rng = np.random.default_rng([seed, num])
    work = rng.geometric(1 / 500, num)
    workload = Workload("M/M/1", np.ones(num, dtype=np.int64), work)
    arrived = np.concatenate([[0.0], np.cumsum(rng.exponential(1 / load, num - 1))])
    service = work / work.mean()
    ahead = np.concatenate([[0.0], np.cumsum(service)[:-1]])
    finished = np.maximum.accumulate(arrived - ahead) + ahead + service
    finished[finished > arrived[-1]] = np.nan
    return Report(
        PAPER,
        workload,
        SimulationResult({}, float(arrived[-1]), 0, 0, num),
        arrived_at=arrived,
        first_token_at=finished - service,
        finished_at=finished,
        num_tokens=work,
        refused=np.zeros(num, dtype=bool),
        wall_s=0.0,
    )


@pytest.mark.parametrize("num", first_fast([20_000, 60_000, 150_000]))
def test_a_queue_with_a_known_limit(num: int) -> None:
    stable = [Criterion().judge(one_server(0.95, num, seed)) for seed in SEEDS]
    assert all(verdict.sustained for verdict in stable)
    beyond = [Criterion().judge(one_server(1.1, num, seed)) for seed in SEEDS]
    assert not any(verdict.sustained for verdict in beyond)
    # What is completed is the limit, whatever the load above it. Of ten intervals at 95% nine or
    # ten have it in them.
    beyond += [Criterion().judge(one_server(1.02, num, seed)) for seed in SEEDS]
    assert sum(v.completed.low <= 1 <= v.completed.high for v in beyond) >= 9
    if num == 150_000:
        assert not any(verdict.sustained for verdict in beyond)


@pytest.mark.slow
def test_capacity_is_where_the_criterion_turns() -> None:
    def at(rate: float) -> Workload:
        return make_workload("low", num_requests=2500, rate=rate, seed=2)

    setup = Setup(PROFILE, PolicyConfig.from_name("sarathi", token_budget=768, max_num_seqs=320))
    found = capacity(setup, at, 40.0, 120.0, tolerance=0.05)
    assert found.requests_per_s > 120, "the range is widened"
    assert judge_load(setup, at(found.low)).sustained
    assert not judge_load(setup, at(1.1 * found.high)).sustained
    assert found.low < load_bound(PROFILE, at(1.0), PROFILE.kv_tokens)


@pytest.mark.slow
def test_targets_end_the_search_where_they_are_missed() -> None:
    def at(rate: float) -> Workload:
        return make_workload("low", num_requests=3000, rate=rate, seed=2)

    setup, criterion = Setup(PROFILE, PolicyConfig.from_name("sarathi")), Criterion(tpot_p99=0.02)
    found = capacity(setup, at, 20.0, 160.0, criterion=criterion, tolerance=0.02)
    assert found.low <= found.requests_per_s <= found.high
    assert judge_load(setup, at(1.3 * found.high)).sustained, "it is the target that ends it"
    assert judge_load(setup, at(found.low), criterion).beyond[0].mean <= 0
    assert judge_load(setup, at(found.high), criterion).beyond[0].mean > 0
    with pytest.raises(TooShort, match=r"1000 requests are too few .* about 2500"):
        capacity(setup, Scene(PAPER_LINEAR, "low").at(1000), 20.0, 160.0, criterion=criterion)


def test_who_is_never_served_is_late() -> None:
    workload = make_workload("low", num_requests=2000, rate=20.0, seed=2)
    report = run(
        Setup(PROFILE, PolicyConfig.from_name("sarathi")),
        workload,
        until=float(workload.arrival_time[-1]),
    )
    criterion = Criterion(ttft_p99=1.0)
    assert criterion.judge(report).sustained
    starved = [column.copy() for column in (report.first_token_at, report.finished_at)]
    for column in starved:
        # 1.1% of those that count: neither a backlog nor, of those that finish, a late one.
        column[1000:1990:90] = np.nan
    report = replace(report, first_token_at=starved[0], finished_at=starved[1])
    assert np.percentile(report.ttft, 99) < 1.0
    assert not criterion.judge(report).sustained


@pytest.mark.slow
def test_a_load_without_a_setup_is_not_sustained() -> None:
    def setup_at(rate: float) -> Setup | None:
        return Setup(PROFILE, PolicyConfig.from_name("sarathi")) if rate < 12 else None

    def at(rate: float) -> Workload:
        return make_workload("low", num_requests=2000, rate=rate)

    found = capacity(setup_at, at, 5.0, 40.0, tolerance=0.05)
    assert found.requests_per_s == pytest.approx(12, rel=0.05)
