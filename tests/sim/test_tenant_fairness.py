"""Fairness between tenants on the virtual clock: what it changes, and what it does not."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.core.world import ADMISSIONS
from tests.products import covering, first_fast
from tests.sim.test_counted import LENGTHS, THRESHOLDS, assert_same

from lab.bench.tenants import RULES, beside
from penstock.config import PolicyConfig
from penstock.core.types import FairnessRule
from penstock.sim.profiles import load_profile
from penstock.sim.run import Report, Setup, run
from penstock.sim.workloads import Workload, make_workload

PROFILE = load_profile("a100-llama2-7b")
LITERAL = ("wait", "nested_wait")


def with_tenants(workload: Workload, num: int = 5, seed: int = 0) -> Workload:
    """Requests dealt to tenants, of which the first send most."""
    shares = 1 / np.arange(1, num + 1) ** 1.5
    owner = np.random.default_rng(seed).choice(num, len(workload), p=shares / shares.sum())
    return replace(workload, tenants=np.array([f"t{i}" for i in owner]))


def long_prompts(num: int = 80, rate: float = 3.0) -> Workload:
    rng = np.random.default_rng(5)
    lengths = Workload("long", rng.integers(1, 3000, num), rng.integers(1, 150, num))
    return make_workload(lengths, rate=rate, seed=2)


WORKLOADS = {
    "high": with_tenants(make_workload("high", num_requests=120, rate=40, seed=3)),
    "long": with_tenants(long_prompts()),
}
MEMORY = {"high": 8000, "long": 4200}


def setup_of(admission: str, name: str, fairness: bool, **changes: Any) -> Setup:
    options: dict[str, Any] = {}
    policy, gated = ADMISSIONS[admission]
    if gated:
        key = "output_lens" if policy == "wait" else "segment_ends"
        thresholds = tuple(0.3 * n for n in THRESHOLDS[name])
        options = {key: LENGTHS[name], "thresholds": thresholds, **gated}
    changes.setdefault("kv_tokens", MEMORY[name])
    return Setup(PROFILE, PolicyConfig.from_name(policy, **options), fairness=fairness, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("admission", "name"), covering(sorted(set(ADMISSIONS) - set(LITERAL)), WORKLOADS, strength=1)
)
def test_counting_changes_nothing(admission: str, name: str) -> None:
    reports = [
        run(
            setup_of(admission, name, True, counted=counted, tenant_weights={"t1": 3.0, "t3": 0.3}),
            WORKLOADS[name],
        )
        for counted in (True, False)
    ]
    assert_same(*reports)
    assert reports[0].completed.all()
    unfair = run(setup_of(admission, name, False), WORKLOADS[name])
    assert (reports[0].finished_at != unfair.finished_at).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("admission", "name"), covering(sorted(set(ADMISSIONS) - set(LITERAL)), WORKLOADS, strength=1)
)
def test_one_tenant_is_served_as_without(admission: str, name: str) -> None:
    alone = replace(WORKLOADS[name], tenants=None)
    reports = [run(setup_of(admission, name, rule), alone) for rule in (False, True)]
    assert_same(*reports)


def greedy_and_quiet(
    quiet_prompt: int = 200, every: float = 5.0, outputs: int = 4000, num: int = 60
) -> Workload:
    """Sixty requests with long outputs at once, beside a short one every few seconds."""
    quiet_at = 20.0 + every * np.arange(40)
    times = np.concatenate([np.zeros(num), quiet_at])
    return Workload(
        "greedy and quiet",
        np.r_[np.full(num, 2000), np.full(40, quiet_prompt)],
        np.r_[np.full(num, outputs), np.full(40, 20)],
        times,
        np.array(["greedy"] * num + ["quiet"] * 40),
    )


def ttft_of(report: Report, tenant: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    workload = report.workload
    assert workload.tenants is not None
    return (report.first_token_at - report.arrived_at)[workload.tenants == tenant]


@pytest.mark.slow
@pytest.mark.parametrize("admission", ["vllm_v1", "sarathi", "fluid_guided"])
def test_long_outputs_make_way(admission: str) -> None:
    """They hold all memory for minutes, and end at about the same time."""
    setup = Setup(PROFILE, PolicyConfig.from_name(admission), kv_tokens=111_580)
    workload = greedy_and_quiet()
    unfair = run(setup, workload)
    fair = run(replace(setup, fairness=True), workload)
    assert ttft_of(unfair, "quiet").max() > 20
    assert ttft_of(fair, "quiet").max() < 5
    assert fair.result.finished_at < 1.05 * unfair.result.finished_at
    assert fair.completed.all()


def test_places_make_way() -> None:
    """Long outputs hold all recurrent states, and little memory."""
    setup = Setup(replace(PROFILE, state_slots=8), fairness=True)
    workload = greedy_and_quiet(outputs=2000, num=10)
    assert ttft_of(run(replace(setup, fairness=False), workload), "quiet").max() > 10
    fair = run(setup, workload)
    assert ttft_of(fair, "quiet").max() < 2
    assert fair.completed.all()


def backlog(weights: dict[str, float]) -> Report:
    """Two tenants that always want more."""
    num = 600
    lengths = Workload(
        "backlog", np.full(num, 500), np.full(num, 100), tenants=np.array(["a", "b"] * (num // 2))
    )
    workload = make_workload(lengths, rate=200.0, seed=1)
    setup = Setup(
        PROFILE,
        PolicyConfig.from_name("vllm_v1"),
        fairness=True,
        tenant_weights=weights,
        kv_tokens=30_000,
    )
    return run(setup, workload, until=20.0)


def test_weights_divide_what_is_served() -> None:
    report = backlog({"a": 3.0})
    tenants = report.workload.tenants[: len(report.arrived_at)]
    a, b = ((report.completed & (tenants == t)).sum() for t in "ab")
    assert a / b == pytest.approx(3.0, rel=0.15)
    equal = backlog({})
    assert equal.figures()["jain"] > 0.99


def test_idle_tenants_save_up_no_credit() -> None:
    """A tenant that asked for next to nothing for a minute gets half of the server then, and not
    all of it."""
    num = 600
    tenants = np.array(["busy"] * num + ["back"] * num)
    tenants[5] = "back"
    workload = Workload(
        "credit",
        np.full(2 * num, 1000),
        np.full(2 * num, 150),
        np.r_[np.linspace(0, 60, num), np.full(num, 60.001)],
        tenants,
    )
    report = run(Setup(PROFILE, PolicyConfig.from_name("vllm_v1"), fairness=True), workload)
    begun = (report.first_token_at > 65) & (report.first_token_at < 85)
    assert begun.sum() > 50
    assert (begun & (tenants == "busy")).sum() / begun.sum() == pytest.approx(0.5, abs=0.1)


def test_who_sends_most_does_not_slow_the_others() -> None:
    """A hundred decoding requests of one tenant take the memory's bandwidth."""
    num = 100
    workload = Workload(
        "slow",
        np.r_[np.full(num, 400), np.full(8, 100)],
        np.r_[np.full(num, 700), np.full(8, 150)],
        np.r_[np.zeros(num), np.full(8, 8.0)],
        np.array(["greedy"] * num + ["quiet"] * 8),
    )
    quiet = workload.tenants == "quiet"
    seconds = {}
    rules: tuple[FairnessRule, ...] = (False, True, "strict")
    for rule in rules:
        report = run(Setup(PROFILE, PolicyConfig.from_name("vllm_v1"), fairness=rule), workload)
        seconds[rule] = float(np.mean((report.finished_at - report.first_token_at)[quiet]))
        assert report.completed.all()
    own = replace(workload, arrival_time=None).select(np.flatnonzero(quiet))
    report = run(Setup(PROFILE, PolicyConfig.from_name("vllm_v1")), make_workload(own, rate=1000.0))
    alone = float(np.mean(report.finished_at - report.first_token_at))
    assert seconds[False] > 2.1 * alone
    assert seconds[True] < 2.05 * alone, "half of the server"
    assert seconds["strict"] < 1.35 * alone


@pytest.mark.parametrize(
    "scene", first_fast([("zoo-large", 32), ("zoo-large", 8), ("a100-llama2-7b", 128)])
)
def test_pauses_cost_at_most_a_third(scene: tuple[str, int]) -> None:
    """And give the other half a server for it. Strict ones cost more."""
    profile, heavy = scene
    alone = beside(profile, 0, False)["light"]
    free, fair, strict = (beside(profile, heavy, rule) for rule in RULES)
    assert free["light"] < fair["light"] < strict["light"]
    assert fair["all"] >= 2 / 3 * free["all"] > strict["all"]
    assert fair["light"] >= 0.97 * alone / 2


@pytest.mark.parametrize("num_quiet", [2, 4])
def test_a_tenant_may_have_less_than_one_request_at_work(num_quiet: int) -> None:
    num = 40
    workload = Workload(
        "weights",
        np.r_[np.full(num, 64), np.full(num_quiet, 64)],
        np.r_[np.full(num, 50), np.full(num_quiet, 2000)],
        np.zeros(num + num_quiet),
        np.array(["greedy"] * num + ["quiet"] * num_quiet),
    )
    weights = {"quiet": 10.0}
    setup = Setup(
        load_profile("zoo-large"),
        PolicyConfig.from_name("vllm_v1"),
        fairness="strict",
        tenant_weights=weights,
    )
    report = run(setup, workload)
    assert report.completed.all()
    until = report.finished_at[num:].max()
    greedy = 50 * (report.finished_at[:num] < until).sum()
    quiet = 2000 * num_quiet
    assert quiet / (quiet + greedy) == pytest.approx(10 / 11, abs=0.03)


def test_turns_are_no_reason_to_stand_still() -> None:
    """A tenant that may run in a tenth of the steps runs in all of them while the other's only
    request waits for the memory that it holds."""
    workload = Workload(
        "memory",
        np.array([1000, 3900]),
        np.array([200, 20]),
        np.array([0.0, 0.5]),
        np.array(["greedy", "quiet"]),
    )
    setup = Setup(load_profile("zoo-large"), PolicyConfig.from_name("vllm_v1"), kv_tokens=4096)
    fair = run(replace(setup, fairness="strict", tenant_weights={"quiet": 10.0}), workload)
    assert fair.completed.all()
    np.testing.assert_allclose(fair.finished_at, run(setup, workload).finished_at, rtol=0.05)
