"""Who runs in a step, and with how many known tokens. One file a policy.

A policy has `name`, an `Options` dataclass and `compose(step)`, which schedules, admits and
preempts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import ClassVar

from penstock.core.state import RequestState
from penstock.core.step import Step


class AdmissionPolicy(ABC):
    """What an admission policy may say besides."""

    name: ClassVar[str]

    @abstractmethod
    def compose(self, step: Step) -> None:
        """Schedule the step."""

    def draft_budget(self, num_tokens: int) -> int:
        """Draft positions that may join a step of so many known tokens."""
        return 0

    def queue_of(self, state: RequestState) -> Hashable:
        """Key of the queue in which a request waits."""
        return None
