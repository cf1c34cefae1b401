"""One turn of the loop: events in, plans out, results in, outputs out.

The live engine and the simulator call the same turn; they differ in clock and executor only. The
simulator, which knows when all lanes are busy, skips what could have no effect then."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from penstock.core.scheduler import Scheduler
from penstock.core.types import Event, Output, StepPlan, StepResult


class Clock(Protocol):
    """Source of time."""

    def now(self) -> float:
        """Return seconds from an arbitrary origin; never goes back."""
        ...


class Executor(Protocol):
    """Carries out plans, each lane by itself. Results may come back in any order."""

    def ready(self, lane: str) -> bool:
        """Return True if the lane can take a plan and its last results were collected."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Take a plan; an empty one carries only updates and gets no result.

        Its updates (`released`, then `forgotten`, then `new_requests`) hold from now on, but plans
        in flight keep what they read."""
        ...

    def wait(self, timeout: float | None) -> None:
        """Return when a plan may have ended, or after `timeout` seconds (None: no limit)."""
        ...

    def collect(self) -> list[StepResult]:
        """Return results that have become available since the last call, one for each plan."""
        ...


class Instrument(Protocol):
    """Watches the loop without changing it, called in the loop's thread.

    A subclass has the methods that it needs; the others do nothing."""

    def on_plan(self, plan: StepPlan) -> None:
        return

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        return

    def on_output(self, output: Output) -> None:
        return


class Turn(NamedTuple):
    """Result of one turn.

    wake_at: time of the next turn if nothing happens before; None: only an event or a result gives
    new work. stalled: reason why no request can run again, if so."""

    outputs: tuple[Output, ...]
    submitted: int
    collected: int
    wake_at: float | None
    stalled: str | None = None


class Loop:
    """Ties a scheduler to an executor under a clock.

    own_events: events since the last turn that come from no host, such as drafts of servers."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: Clock,
        instruments: Sequence[Instrument] = (),
        own_events: Callable[[], Iterable[Event]] = tuple,
    ) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._instruments = instruments
        self._own_events = own_events
        self._plans: dict[int, StepPlan] = {}

    @property
    def num_plans_in_flight(self) -> int:
        return len(self._plans)

    def turn(self, events: Iterable[Event]) -> Turn:
        """Apply the events, start what the lanes can take, then take in finished results."""
        now = self._clock.now()
        outputs: list[Output] = []
        for event in (*events, *self._own_events()):
            outputs += self.scheduler.apply(event, now)
        submitted, wake_at, stalled = self._submit(now)
        collected = self._collect(outputs)
        return Turn(tuple(outputs), submitted, collected, wake_at, stalled)

    def take_in(self, events: Iterable[Event]) -> int:
        """Apply events and results while no lane can take a plan; returns the number of results."""
        outputs: list[Output] = []
        for event in events:
            outputs += self.scheduler.apply(event, self._clock.now())
        return self._collect(outputs)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until a plan in flight may have ended; at most `timeout` seconds."""
        self._executor.wait(timeout)

    def _collect(self, outputs: list[Output]) -> int:
        """Take in finished results, and announce all `outputs`."""
        results = self._executor.collect()
        for result in results:
            plan = self._plans.pop(result.plan_id, None)
            if plan is None:
                # A result that was repeated counts once.
                continue
            outputs += self.scheduler.update(plan, result)
            for instrument in self._instruments:
                instrument.on_result(plan, result)
        if outputs:
            for instrument in self._instruments:
                for output in outputs:
                    instrument.on_output(output)
        return len(results)

    def _submit(self, now: float) -> tuple[int, float | None, str | None]:
        submitted = 0
        wake_at: float | None = None
        stalled: str | None = None
        scheduler, executor = self.scheduler, self._executor
        for lane in scheduler.lanes:
            if not executor.ready(lane):
                continue
            plan = scheduler.schedule(now, lane)
            if plan.wake_at is not None:
                wake_at = plan.wake_at if wake_at is None else min(wake_at, plan.wake_at)
            stalled = stalled or plan.stalled
            if not plan.is_empty:
                self._plans[plan.id] = plan
                submitted += 1
                for instrument in self._instruments:
                    instrument.on_plan(plan)
            elif not plan.has_updates:
                continue
            executor.submit(plan)
        return submitted, wake_at, stalled
