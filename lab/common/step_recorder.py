"""Measured steps, as the file that `penstock profile fit` reads."""

from __future__ import annotations

import csv
from pathlib import Path

from penstock.core.loop import Clock, Instrument
from penstock.core.types import StepPlan, StepResult
from penstock.fluid.step_profile import StepWork


class StepRecorder(Instrument):
    """Keeps what every target step computed, and the seconds it took.

    They are those of the whole turn, from the arrivals that it took in to the end of its update:
    scheduling, batching and bookkeeping are part of a step as clients know it. Drafting is left
    out, because a simulated step adds it by itself. For an executor that carries out one plan at a
    time; plans that wait for each other would count the wait.
    """

    def __init__(self, clock: Clock) -> None:
        self.steps: list[tuple[StepWork, float]] = []
        self._clock = clock

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        if result.work is not None:
            seconds = self._clock.now() - plan.created_at - result.phases.draft
            self.steps.append((result.work, seconds))

    def write(self, path: Path) -> None:
        """Write the steps as CSV: the fields of `StepWork`, and `seconds`."""
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow((*StepWork._fields, "seconds"))
            writer.writerows((*work, f"{seconds:.7f}") for work, seconds in self.steps)
