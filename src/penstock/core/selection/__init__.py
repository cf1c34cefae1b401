"""Which drafter a request gets. One file a policy.

A policy has `name`, an `Options` dataclass, `select(states, drafters, now)`, which maps request ids
to a drafter's name or None, and `observe(state, verdict)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

from penstock.core.state import Drafter, RequestState
from penstock.core.types import Verdict


class SelectionPolicy(Protocol):
    name: ClassVar[str]

    def select(
        self, states: Sequence[RequestState], drafters: Mapping[str, Drafter], now: float
    ) -> dict[str, str | None]: ...

    def observe(self, state: RequestState, verdict: Verdict) -> None: ...
