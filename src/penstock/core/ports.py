"""What the core asks of the world: a clock, an executor, and optionally somebody who watches."""

from __future__ import annotations

from typing import Protocol

from penstock.core.types import Output, StepPlan, StepResult


class Clock(Protocol):
    def now(self) -> float:
        """Seconds from an arbitrary origin; never goes back."""
        ...


class Executor(Protocol):
    """Carries out plans, each lane by itself. Results may come back in any order."""

    def ready(self, lane: str) -> bool:
        """Whether the lane can take another plan now. One whose results nobody has collected yet
        should not: its next plan would go without those requests."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Take a plan. Its news (`released`, then `forgotten`, then `new_requests`) hold from now
        on, but plans that are already inside keep what they read. An empty plan is only news: it
        gets no result."""
        ...

    def wait(self, timeout: float | None) -> None:
        """Return when a plan that is inside may have ended, or after `timeout` seconds (None: as
        late as it likes)."""
        ...

    def collect(self) -> list[StepResult]:
        """Results that have become available since the last call, one for each plan."""
        ...


class Instrument(Protocol):
    """Watches the loop without taking part: metrics, traces, tests."""

    def on_plan(self, plan: StepPlan) -> None: ...

    def on_result(self, plan: StepPlan, result: StepResult) -> None: ...

    def on_output(self, output: Output) -> None: ...
