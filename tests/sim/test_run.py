from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.products import first_fast

from penstock.config import PolicyConfig
from penstock.core.loop import Instrument
from penstock.core.scheduler import Scheduler
from penstock.core.types import StepPlan
from penstock.fluid.capacity import output_work
from penstock.fluid.step_profile import StepProfile
from penstock.sim.acceptance import GeometricAcceptance
from penstock.sim.planner import (
    PlanError,
    check_thresholds_fit,
    length_classes,
    load_bound,
    plan_deployment,
    static_budget,
    threshold_options,
)
from penstock.sim.plots import Sampler
from penstock.sim.profiles import load_profile
from penstock.sim.run import Report, Setup, run
from penstock.sim.workloads import Workload, make_workload

PROFILE = load_profile("a100-llama2-7b")
HIGH = make_workload("high", num_requests=300, rate=15, seed=1)


def tenants(*names: str) -> Workload:
    ones = np.full(len(names), 20, dtype=np.int64)
    times = 0.1 * np.arange(len(names))
    return Workload("t", ones, ones, times, np.array(names))


def test_figures_by_hand() -> None:
    report = run(Setup(PROFILE, PolicyConfig.from_name("sarathi")), HIGH)
    figures = report.figures()
    assert figures["requests_completed"] == 300
    assert figures["requests_refused"] == figures["requests_unfinished"] == 0
    end = report.finished_at.max()
    assert figures["throughput_requests_per_s"] == pytest.approx(300 / end)
    assert figures["throughput_tokens_per_s"] == pytest.approx(HIGH.output_len.sum() / end)
    assert figures["latency_s"]["mean"] == pytest.approx(
        (report.finished_at - report.arrived_at).mean()
    )
    per_token = (report.finished_at - report.first_token_at) / (HIGH.output_len - 1)
    assert figures["tpot_s"]["p99"] == pytest.approx(np.percentile(per_token, 99))
    assert "slo_goodput" not in figures
    assert "tenants" not in figures


def test_slowdown_is_against_the_request_alone() -> None:
    """A request alone has about one; in a queue each has its latency over that of itself alone."""
    lengths = Workload("w", np.array([2000]), np.array([300]), np.zeros(1))
    alone = run(Setup(PROFILE, PolicyConfig.from_name("vllm_v1")), lengths)
    assert alone.slowdown == pytest.approx([1.0])
    queue = make_workload(lengths, num_requests=200, rate=4.0, seed=1)
    report = run(Setup(PROFILE, PolicyConfig.from_name("vllm_v1")), queue)
    assert report.slowdown == pytest.approx(report.latency / alone.latency)
    figures = report.figures()
    assert figures["slowdown"]["max"] == pytest.approx(report.slowdown.max())
    assert figures["ttft_s"]["p999"] == pytest.approx(np.percentile(report.ttft, 99.9))
    assert [g["prompt_len"] for g in figures["by_prompt_len"]] == [[2000, 2000]]


def test_long_prompts_are_reported_apart() -> None:
    rng = np.random.default_rng(3)
    lengths = Workload("w", rng.permutation(np.arange(100, 2100)), np.full(2000, 20))
    report = run(
        Setup(PROFILE, PolicyConfig.from_name("vllm_v1")), make_workload(lengths, rate=6.0, seed=1)
    )
    groups = report.figures()["by_prompt_len"]
    assert [g["prompt_len"] for g in groups] == [[100 + 200 * i, 299 + 200 * i] for i in range(10)]
    assert [g["requests"] for g in groups] == [200] * 10
    assert np.mean([g["slowdown"] for g in groups]) == pytest.approx(report.slowdown.mean())
    longest = report.workload.prompt_len >= 1900
    assert groups[-1]["ttft_s"] == pytest.approx(report.ttft[longest].mean())


def test_targets_count_each_request_by_itself() -> None:
    report = run(Setup(PROFILE, PolicyConfig.from_name("sarathi")), HIGH)
    ttft = report.first_token_at - report.arrived_at
    per_token = (report.finished_at - report.first_token_at) / (HIGH.output_len - 1)
    middle, slow = float(np.median(ttft)), float(per_token.max())
    seconds = report.result.finished_at
    missed = report.figures(ttft_p99=middle)
    assert missed["slo_met"] == {"ttft": False}
    assert missed["slo_goodput"] == pytest.approx((ttft <= middle).sum() / seconds)
    met = report.figures(ttft_p99=60.0, tpot_p99=slow)
    assert met["slo_met"] == {"ttft": True, "tpot": True}
    assert met["slo_goodput"] == pytest.approx(300 / seconds)


def test_tenants_share_and_are_reported_apart() -> None:
    workload = tenants(*("ab" * 20), *("a" * 40))
    figures = run(Setup(PROFILE, PolicyConfig.from_name("vllm_v1")), workload).figures()
    own = figures["tenants"]
    assert {n: f["requests_completed"] for n, f in own.items()} == {"a": 60, "b": 20}
    x = np.array([f["throughput_tokens_per_s"] for f in own.values()])
    assert x.sum() == pytest.approx(figures["throughput_tokens_per_s"])
    # Both were served all that they asked for.
    assert figures["jain"] == pytest.approx(1.0)
    assert isinstance(figures["sum_log_rate"], float)


def test_what_memory_cannot_hold_is_refused_and_counted() -> None:
    lengths = np.array([20, 900, 20], dtype=np.int64)
    workload = make_workload(Workload("w", lengths, np.array([5, 5, 5])), rate=10.0)
    figures = run(
        Setup(PROFILE, PolicyConfig.from_name("sarathi"), kv_tokens=600), workload
    ).figures()
    assert (figures["requests_completed"], figures["requests_refused"]) == (2, 1)
    none = run(Setup(PROFILE, PolicyConfig.from_name("sarathi"), kv_tokens=10), workload).figures()
    assert (none["requests_completed"], none["requests_refused"]) == (0, 3)
    nothing = dict.fromkeys(("mean", "p50", "p99", "p999", "max"))
    assert none["latency_s"] == none["slowdown"] == nothing
    assert none["by_prompt_len"] == []


def test_the_bound_holds_with_and_without_drafts() -> None:
    alone = load_bound(PROFILE, HIGH, PROFILE.kv_tokens)
    acceptance = GeometricAcceptance({"a": 0.8})
    drafted = load_bound(PROFILE, HIGH, PROFILE.kv_tokens, acceptance, ["a"])
    useless = load_bound(PROFILE, HIGH, PROFILE.kv_tokens, GeometricAcceptance({"a": 0.0}), ["a"])
    assert drafted >= alone == pytest.approx(useless)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["low", "high", "nested", "ten_bins"])
@pytest.mark.parametrize("admission", ["wait", "nested_wait"])
def test_planned_thresholds_carry_their_load(name: str, admission: str) -> None:
    bound = load_bound(PROFILE, make_workload(name, num_requests=2000, rate=1), PROFILE.kv_tokens)
    workload = make_workload(name, num_requests=600, rate=0.7 * bound, seed=4)
    policy = PolicyConfig.from_name(admission, gated=True)
    options = threshold_options(policy, PROFILE, workload, 0.7 * bound, PROFILE.kv_tokens)
    figures = run(Setup(PROFILE, policy.with_defaults(options)), workload).figures()
    assert figures["requests_completed"] == 600
    assert figures["throughput_requests_per_s"] > 0.4 * 0.7 * bound


def test_planned_thresholds_of_the_literal_algorithms_are_whole() -> None:
    paper = load_profile("paper-linear")
    wait = threshold_options(PolicyConfig.from_name("wait"), paper, HIGH, 30.0, paper.kv_tokens)
    assert wait["output_lens"] == (101, 201, 301)
    assert all(type(n) is int for n in wait["thresholds"])
    nested = threshold_options(
        PolicyConfig.from_name("nested_wait"), paper, HIGH, 30.0, paper.kv_tokens
    )
    assert nested["segment_ends"][-1] == 301
    assert all(type(n) is int for n in nested["thresholds"])
    assert (
        threshold_options(PolicyConfig.from_name("sarathi"), paper, HIGH, 30.0, paper.kv_tokens)
        == {}
    )
    with pytest.raises(PlanError, match="wait at 70 requests a second: no thresholds fit"):
        threshold_options(PolicyConfig.from_name("wait"), paper, HIGH, 70.0, paper.kv_tokens)


OWN = """
from dataclasses import dataclass
from penstock.core.policies.admission.papers.wait import Wait
from penstock.core.policies.declared import LimitOptions, ThresholdOptions

class Own(Wait):
    name = "own"
    limits = LimitOptions(token_budget="most")
    thresholds = ThresholdOptions("type", "lens", "counts", "open")

    @dataclass(frozen=True, slots=True)
    class Options:
        lens: tuple[int, ...] = (1,)
        counts: tuple[float, ...] = (1.0,)
        open: bool = False
        most: int = 2048

    def __init__(self, options):
        super().__init__(
            Wait.Options(options.lens, options.counts, options.open, options.most)
        )
        self.options = options

POLICY = Own
"""


def test_thresholds_of_any_policy_that_declares_them(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    for gate in (False, True):
        own = PolicyConfig.from_name(str(path), open=gate)
        wait = PolicyConfig.from_name("wait", gated=gate)
        options, known = (
            threshold_options(p, PROFILE, HIGH, 15.0, PROFILE.kv_tokens) for p in (own, wait)
        )
        assert options == {"lens": known["output_lens"], "counts": known["thresholds"]}
        assert length_classes(own.with_defaults(options), HIGH) == [101, 201, 301]
    own = PolicyConfig.from_name(str(path), lens=(101, 201, 301), counts=(900.0,) * 3)
    with pytest.raises(PlanError, match="memory has 100000"):
        check_thresholds_fit(own, PROFILE, HIGH, 100_000)


def test_thresholds_that_cannot_fit_are_refused() -> None:
    options = {"output_lens": (101, 201, 301), "thresholds": (1, 1, 1)}
    literal = PolicyConfig.from_name("wait", **options)
    check_thresholds_fit(literal, PROFILE, HIGH, 160_000)
    check_thresholds_fit(PolicyConfig.from_name("wait", gated=True, **options), PROFILE, HIGH, 100)
    with pytest.raises(PlanError, match=r"thresholds 1,1,1 hold up to 1\d{5} KV tokens"):
        check_thresholds_fit(literal, PROFILE, HIGH, 100_000)
    check_thresholds_fit(literal, with_slots(603), HIGH, 160_000)
    with pytest.raises(PlanError, match="wait: no thresholds fit: they hold at least 603 requests"):
        check_thresholds_fit(literal, with_slots(602), HIGH, 160_000)
    segments = {"segment_ends": (100, 300), "thresholds": (3, 1)}
    nested = PolicyConfig.from_name("nested_wait", **segments)
    with pytest.raises(PlanError, match="nested_wait: thresholds 3,1 hold up to"):
        check_thresholds_fit(nested, PROFILE, HIGH, 50_000)


def test_the_static_budget_is_at_a_corner_and_within_memory() -> None:
    work = output_work(HIGH.prompt_len, HIGH.output_len)
    static = static_budget(PROFILE, work, PROFILE.kv_tokens)
    assert static.token_budget == 768, "a corner of the staircase"
    assert PROFILE.linear(769) > 1.05 * PROFILE.linear(768)
    assert 500 < static.max_num_seqs <= 768
    tight = static_budget(PROFILE, work, 30_000)
    assert tight.max_num_seqs < 0.4 * static.max_num_seqs
    with pytest.raises(PlanError, match="hold no step"):
        static_budget(PROFILE, work, 5)


def with_slots(num: int) -> StepProfile:
    """The profile of a hybrid model, whose states have room for so many requests."""
    return replace(PROFILE, state_slots=num)


@pytest.mark.parametrize("num_slots", [1, 8, 100])
def test_states_bound_the_advised_requests(num_slots: int) -> None:
    """And with them the budget: a step of so few requests has no more positions to fill."""
    work = output_work(HIGH.prompt_len, HIGH.output_len)
    free = static_budget(PROFILE, work, PROFILE.kv_tokens)
    static = static_budget(with_slots(num_slots), work, PROFILE.kv_tokens)
    assert 0.8 * num_slots <= static.max_num_seqs <= num_slots
    assert static.token_budget <= free.token_budget / 4
    assert static_budget(with_slots(10**6), work, PROFILE.kv_tokens) == free


def test_a_plan_is_within_the_states_that_have_room() -> None:
    plan = plan_deployment(with_slots(20), HIGH, 5.0, PROFILE.kv_tokens)
    assert plan.static.max_num_seqs == 20
    with pytest.raises(PlanError, match="room for 6 recurrent states"):
        plan_deployment(with_slots(6), HIGH, 5.0, PROFILE.kv_tokens)
    lengths = Workload("trace", HIGH.prompt_len, HIGH.output_len)
    by_segment = plan_deployment(with_slots(20), lengths, 5.0, PROFILE.kv_tokens)
    assert by_segment.static == plan.static
    with pytest.raises(PlanError, match="room for 6 recurrent states"):
        plan_deployment(with_slots(6), lengths, 5.0, PROFILE.kv_tokens)


class MostRunning(Instrument):
    """Most requests at once, and the largest number that waited meanwhile."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._table = scheduler.table
        self.running = self.waiting = 0

    def on_plan(self, plan: StepPlan) -> None:
        self.running = max(self.running, len(self._table.running))
        self.waiting = max(self.waiting, len(self._table.waiting))


@pytest.mark.parametrize("admission", first_fast(["fluid_guided", "vllm_v1", "sarathi", "gated"]))
def test_requests_wait_for_a_state(admission: str) -> None:
    """As in a server: KV memory would hold all of them."""
    chosen = PolicyConfig.from_name(admission)
    if admission == "gated":
        chosen = PolicyConfig.from_name("nested_wait", gated=True, thresholds=())
    seen: list[MostRunning] = []

    def watch(scheduler: Scheduler) -> Sequence[MostRunning]:
        seen.append(MostRunning(scheduler))
        return seen[-1:]

    for profile in (PROFILE, with_slots(8)):
        report = run(Setup(profile, chosen, block_size=16), HIGH, watch=watch)
        assert report.completed.all()
    free, bounded = seen
    assert (free.running > 30, bounded.running) == (True, 8)
    assert bounded.waiting > free.waiting + 100


def test_no_load_above_the_bound_is_served_with_few_states() -> None:
    bound = load_bound(with_slots(8), HIGH, PROFILE.kv_tokens)
    assert bound < 0.5 * load_bound(PROFILE, HIGH, PROFILE.kv_tokens)
    crowd = make_workload("high", num_requests=400, rate=1000.0, seed=2)
    figures = run(Setup(with_slots(8)), crowd).figures()
    assert 0.85 * bound < figures["throughput_requests_per_s"] < bound


@pytest.mark.slow
def test_a_plan_for_recorded_lengths_has_segments_and_a_chance() -> None:
    rng = np.random.default_rng(1)
    lengths = Workload("trace", rng.integers(20, 400, 2000), rng.integers(1, 400, 2000))
    bound = load_bound(PROFILE, lengths, PROFILE.kv_tokens)
    light = plan_deployment(PROFILE, lengths, 0.3 * bound, PROFILE.kv_tokens)
    assert light.thresholds["algorithm"] == "nested_wait"
    assert light.thresholds["segment_ends"][-1] >= 399
    surer = plan_deployment(PROFILE, lengths, 0.3 * bound, PROFILE.kv_tokens, 1e-6)
    assert surer.memory.bound > light.memory.bound
    assert light.memory.mean < light.memory.batch < light.memory.bound
    assert (light.memory.delta, surer.memory.delta) == (1e-3, 1e-6)
    heavy = plan_deployment(PROFILE, lengths, 0.95 * bound, PROFILE.kv_tokens)
    starts = [p.thresholds["thresholds"][0] / p.thresholds["stage_steps"] for p in (light, heavy)]
    assert starts[0] < starts[1]
    with pytest.raises(PlanError, match="at 1e"):
        plan_deployment(PROFILE, lengths, 1e6, PROFILE.kv_tokens)


def sampled(every: float) -> tuple[Sampler, Report]:
    made: list[Sampler] = []

    def watch(scheduler: Scheduler) -> list[Sampler]:
        made.append(Sampler(scheduler, every, [100, 200, 300]))
        return made

    report = run(Setup(PROFILE, PolicyConfig.from_name("sarathi")), HIGH, watch=watch)
    return made[0], report
