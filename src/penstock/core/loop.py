"""One turn of the loop: events in, plans out, results in, outputs out.

The live engine and the simulator call the same turn; they differ in clock and executor only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock.core.ports import Clock, Executor, Instrument
from penstock.core.scheduler import Scheduler
from penstock.core.types import Event, Output, StepPlan, StepResult


class Turn(NamedTuple):
    """What one turn came to. `wake_at`: when to turn again even if nothing happens before;
    None: only an event or a result gives new work. `stalled`: why nothing can ever run again, if
    the scheduler says so."""

    outputs: tuple[Output, ...]
    submitted: int
    collected: int
    wake_at: float | None
    stalled: str | None = None


class Loop:
    """Ties a scheduler to an executor under a clock."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        instruments: Sequence[Instrument] = (),
    ) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._instruments = instruments
        self._plans: dict[int, StepPlan] = {}

    @property
    def num_plans_in_flight(self) -> int:
        return len(self._plans)

    def turn(self, events: Iterable[Event]) -> Turn:
        """Apply the events, start what the lanes can take, then take in finished results."""
        outputs: list[Output] = []
        now = self._clock.now()
        for event in events:
            outputs += self.scheduler.apply(event, now)
        submitted, wake_at, stalled = self._submit(now)
        results = self._executor.collect()
        for result in results:
            outputs += self._finish(result)
        for instrument in self._instruments:
            for output in outputs:
                instrument.on_output(output)
        return Turn(tuple(outputs), submitted, len(results), wake_at, stalled)

    def wait(self, timeout: float | None = None) -> None:
        """Until a plan in flight may have ended; at most `timeout` seconds."""
        self._executor.wait(timeout)

    def _submit(self, now: float) -> tuple[int, float | None, str | None]:
        submitted = 0
        wake_at: float | None = None
        stalled: str | None = None
        for lane in self.scheduler.lanes:
            if not self._executor.ready(lane):
                continue
            plan = self.scheduler.schedule(now, lane)
            if plan.wake_at is not None:
                wake_at = plan.wake_at if wake_at is None else min(wake_at, plan.wake_at)
            stalled = stalled or plan.stalled
            if plan.is_empty and not plan.has_news:
                continue
            if not plan.is_empty:
                self._plans[plan.id] = plan
                submitted += 1
                for instrument in self._instruments:
                    instrument.on_plan(plan)
            self._executor.submit(plan)
        return submitted, wake_at, stalled

    def _finish(self, result: StepResult) -> list[Output]:
        """Take in a result, once: a repeated one is ignored."""
        plan = self._plans.pop(result.plan_id, None)
        if plan is None:
            return []
        outputs = self.scheduler.update(plan, result)
        for instrument in self._instruments:
            instrument.on_result(plan, result)
        return outputs
