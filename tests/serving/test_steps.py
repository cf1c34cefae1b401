"""Recorded steps, their way into a profile, and the benchmark that compares with the simulator."""

from pathlib import Path

import numpy as np
import pytest

from lab.bench.simulator_vs_engine import KV_TOKENS, LiveServer, LoadCell, fit, mixed_prompts
from lab.common.step_recorder import StepRecorder
from penstock.core.types import PhaseTimes, StepPlan, StepResult
from penstock.fluid.step_profile import StepWork
from penstock.sim.profiles import fit_profile, load_profile
from penstock.sim.workloads import Workload


class _Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time


def _record(recorder: StepRecorder, clock: _Clock, work: StepWork | None, seconds: float) -> None:
    plan = StepPlan(id=0, lane="target", created_at=clock.time)
    clock.time += seconds
    phases = PhaseTimes(draft=0.25 * seconds)
    times = plan.created_at, clock.time
    recorder.on_result(plan, StepResult(0, "target", *times, phases=phases, work=work))


def test_a_step_is_timed_from_its_turn_to_its_update_without_drafting() -> None:
    clock = _Clock()
    recorder = StepRecorder(clock)
    _record(recorder, clock, StepWork(num_decodes=3, num_kv_tokens=30), 0.8)
    _record(recorder, clock, None, 5.0)
    ((work, seconds),) = recorder.steps
    assert work == StepWork(num_decodes=3, num_kv_tokens=30)
    assert seconds == pytest.approx(0.6)


def test_the_profile_takes_what_equal_steps_take_in_the_mean(tmp_path: Path) -> None:
    clock = _Clock()
    recorder = StepRecorder(clock)
    for i in range(40):
        _record(recorder, clock, StepWork(num_decodes=2, num_kv_tokens=20), 0.03 if i % 4 else 0.11)
    recorder.write(tmp_path / "steps.csv")
    fitted = fit_profile(tmp_path / "steps.csv", name="mean", kv_tokens=100)
    # A quarter takes 0.11 s, the others 0.03 s; a quarter of each is drafting.
    assert fitted.profile.seconds(StepWork(num_decodes=2, num_kv_tokens=20)) == pytest.approx(
        0.75 * 0.05, rel=1e-3
    )


@pytest.fixture(scope="module")
def server(family: dict[str, Path]) -> LiveServer:
    return LiveServer(family["target"], "float32")


def _short_workload() -> Workload:
    rng = np.random.default_rng(0)
    arrival_time = np.concatenate([[0.0], np.cumsum(rng.exponential(0.004, size=39))])
    return Workload("short", rng.integers(2, 60, 40), rng.integers(1, 30, 40), arrival_time)


@pytest.mark.parametrize("admission", ["vllm_v1", "fluid_guided"])
def test_the_engine_and_the_simulator_serve_the_same_requests(server, admission, tmp_path) -> None:
    workload = _short_workload()
    prompts = mixed_prompts(server.engine.tokenizer_path)
    cell = LoadCell(admission, 0.5, 250.0, [workload])
    cell.play(server, 0, prompts)
    works = [work for work, _ in cell.steps]
    assert sum(w.num_decodes + w.num_prefill_tokens for w in works) == int(
        (workload.prompt_len + workload.output_len - 1).sum()
    )
    fitted = fit(cell, server, tmp_path)
    assert fitted.profile.kv_tokens == KV_TOKENS
    assert load_profile(tmp_path / "zoo-large.json") == fitted.profile
    cell.predict(fitted.profile, server)
    for outcome in (cell.live, cell.simulated):
        assert outcome.tokens == workload.output_len.sum()
        assert len(outcome.ttft) == len(workload)
        assert len(outcome.tpot) == (workload.output_len > 1).sum()
        assert min(outcome.ttft) > 0
    # The profile takes the mean of the very steps that it was fitted to, a stall apart: of so few
    # steps one is much, where other tests share the cores.
    assert cell.report()["step_seconds_ratio"] == pytest.approx(1, abs=0.25)
