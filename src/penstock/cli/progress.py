"""Progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.core.types import Output, StepPlan, StepResult


@contextmanager
def progress(total: int | None, what: str) -> Iterator[Callable[[int], None]]:
    """A bar on standard error, where that is a terminal; yields what moves it on."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda num: bar.advance(task, num)


@dataclass(slots=True)
class FinishedRequests:
    """An instrument of a run that moves a bar on, a hundred requests at a time."""

    advance: Callable[[int], None]
    _num: int = 0

    def on_plan(self, plan: StepPlan) -> None:
        """Nothing finishes here."""

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        """Outputs say more."""

    def on_output(self, output: Output) -> None:
        self._num += output.finish_reason is not None
        if self._num == 100:
            self.advance(100)
            self._num = 0
