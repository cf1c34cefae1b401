"""When drafters draft and the target verifies. One file a policy.

A pipeline says for whom a lane drafts next, whether the target should wait, and whose drafts it
verifies together. Who joins the step is admission's business."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from penstock.core.state import RequestState
from penstock.core.types import StepResult
from penstock.core.view import View


class Pipeline(ABC):
    """Decides whom a lane drafts for, whether the target waits for drafts, and for which."""

    name: ClassVar[str]

    @dataclass(frozen=True, slots=True)
    class Options:
        """None."""

    def __init__(self, options: Any = None) -> None:
        self.options = options

    @property
    def drafts_beside(self) -> bool:
        """Whether the drafters of this machine that have lanes use them; else they draft inside the
        target's step. It may change when a step has ended."""
        return True

    def divide(self, states: Sequence[RequestState]) -> None:  # noqa: B027
        """Take in who drafts in a lane now: decoding requests with their drafters."""

    def next_drafts(self, lane: str, due: Sequence[RequestState]) -> Sequence[RequestState]:
        """For whom a lane drafts in its next step, of those whose drafts are due."""
        return due

    @abstractmethod
    def hold_until(
        self, ready: Sequence[RequestState], pending: Sequence[RequestState], view: View
    ) -> float | None:
        """Until when to wait, unless a draft comes or is given up before; None: verify now.

        ready: decoding requests that the target could verify, with or without a draft; pending:
        those whose drafts are on their way."""

    def joins(self, state: RequestState) -> bool:
        """Whether a request may be verified in the step that `hold_until` let start."""
        return True

    def stepped(  # noqa: B027
        self, running: Iterable[RequestState], view: View, result: StepResult
    ) -> None:
        """A target step has ended."""
