"""One drafter for everybody: the Spin paper's Vanilla."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from penstock.core.state import Drafter, RequestState
from penstock.core.types import Verdict


class Single:
    """Every request that leaves the choice open gets the same drafter."""

    name: ClassVar[str] = "single"

    @dataclass(frozen=True, slots=True)
    class Options:
        """drafter: its name; None takes the first that is configured."""

        drafter: str | None = None

    def __init__(self, options: Options) -> None:
        self.options = options

    def select(
        self, states: Sequence[RequestState], drafters: Mapping[str, Drafter], now: float
    ) -> dict[str, str | None]:
        name = self.options.drafter or next(iter(drafters), None)
        drafter = drafters.get(name) if name is not None else None
        chosen = name if drafter is not None and drafter.up else None
        return dict.fromkeys((s.request.id for s in states), chosen)

    def observe(self, state: RequestState, verdict: Verdict) -> None:
        """A fixed choice learns nothing."""


POLICY = Single
