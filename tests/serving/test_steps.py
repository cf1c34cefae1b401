"""Recorded steps, and their way into a profile."""

from pathlib import Path

import pytest

from lab.common.step_recorder import StepRecorder
from penstock.core.types import PhaseTimes, StepPlan, StepResult
from penstock.fluid.step_profile import StepWork
from penstock.sim.profiles import fit_profile


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
