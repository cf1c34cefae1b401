"""What is measured before the first request, by runners whose steps take known times."""

from collections.abc import Callable

import pytest
import torch

from penstock.core.learn import Estimators
from penstock.engine.calibrate import calibrate, lanes_may_gain
from penstock.engine.executor import RunnerExecutor
from penstock.engine.models.config import DecoderConfig
from penstock.engine.runner import ModelRunner, RaggedBatch
from penstock.engine.timing import slowdowns_seconds


class TimedRunner(ModelRunner):
    """Computes nothing; a step moves the clock on by what `seconds` says of its rows."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.config = DecoderConfig(16, 16, 16, 1, 1, 1, 16, 512)
        self.num_blocks, self.block_size = 1024, 16
        self.device = torch.device("cpu")
        self.steps: list[int] = []
        self.time = 0.0
        self._seconds = seconds

    def now(self) -> float:
        return self.time

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        raise AssertionError("only dummy steps are taken")

    def dummy_run(self, batch: RaggedBatch) -> None:
        self.steps.append(batch.num_tokens)
        self.time += self._seconds(batch.num_tokens)


def calibrated(runner: TimedRunner, budget_s: float = 0.4) -> Estimators:
    estimators = Estimators()
    calibrate(RunnerExecutor(runner, [], runner, 512), estimators, runner, budget_s=budget_s)
    return estimators


def large(rows: int) -> float:
    return 0.045 + 0.003 * rows


def test_a_small_model_is_measured_at_every_size() -> None:
    runner = TimedRunner(lambda rows: large(rows) / 500)
    times = calibrated(runner).times
    assert max(runner.steps) == 256
    assert len(set(runner.steps)) == 15
    assert [times.target(rows) for rows in (1, 5, 96, 256)] == pytest.approx(
        [large(rows) / 500 for rows in (1, 5, 96, 256)]
    )


def test_a_large_model_is_measured_for_as_long_as_allowed() -> None:
    runner = TimedRunner(large)
    times = calibrated(runner).times
    assert runner.time < 0.4
    assert {1, 8, 32} <= set(runner.steps)
    assert max(runner.steps) == 32
    # Between them and beyond, the line that they lie on.
    for rows in (1, 2, 5, 20, 100):
        assert times.target(rows) == pytest.approx(large(rows))
        assert times.profile.linear(rows) == pytest.approx(large(rows))


def test_what_a_row_costs_is_known_however_large_the_model() -> None:
    runner = TimedRunner(lambda rows: 20 * large(rows))
    times = calibrated(runner).times
    assert len(runner.steps) == 3  # one to warm up
    assert times.target(4) == pytest.approx(20 * large(4))


def test_a_slow_spell_in_one_pass_is_forgotten() -> None:
    runner = TimedRunner(lambda rows: large(rows) / 500 * (9 if len(runner.steps) < 8 else 1))
    times = calibrated(runner).times
    for rows in (1, 3, 8, 32, 128):
        assert times.target(rows) == pytest.approx(large(rows) / 500)


@pytest.mark.parametrize(
    ("verify", "draft", "may_gain"),
    [
        (lambda rows: 0.02, lambda batch: 0.001, False),  # half a batch takes as long as all
        (lambda rows: 1e-4 * rows, lambda batch: 1e-7, False),  # nothing to hide
        (lambda rows: 1e-4 * rows, lambda batch: 5e-5 * batch, True),
    ],
)
def test_drafters_are_measured_beside_the_target_where_lanes_could_gain(
    verify: Callable[[int], float], draft: Callable[[int], float], may_gain: bool
) -> None:
    times = Estimators().times
    for size in (1, 8, 32, 128):
        times.target.add_measurement(size, verify(size))
        times.curve_of("d").add_measurement(size, draft(size))
    assert lanes_may_gain(times, "d") == may_gain


def test_a_large_model_is_not_measured_beside_another() -> None:
    """Its steps alone would take more than the second that start-up has for this."""
    times = Estimators().times
    times.target.add_measurement(20, 0.4)
    times.curve_of("d").add_measurement(4, 0.01)
    assert slowdowns_seconds(times, "d", 0.02) > 1
    assert slowdowns_seconds(Estimators().times, "d", 0.02) < 1
