"""Who runs in a step, and with how many known tokens. One file a policy.

A policy has `name`, an `Options` dataclass, and two methods: `compose(step)` schedules, admits
and preempts; `draft_budget(num_tokens)` says how many draft positions may join a step of that
many known tokens.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from penstock.core.step import Step


class AdmissionPolicy(Protocol):
    name: ClassVar[str]

    def compose(self, step: Step) -> None: ...

    def draft_budget(self, num_tokens: int) -> int: ...
