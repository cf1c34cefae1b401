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
        """drafter: its name; None takes the first that is configured, or of several draft servers
        the one with the fewest requests."""

        drafter: str | None = None

    def __init__(self, options: Options) -> None:
        self.options = options

    def select(
        self, states: Sequence[RequestState], drafters: Mapping[str, Drafter], now: float
    ) -> dict[str, str | None]:
        if self.options.drafter is None and any(d.remote for d in drafters.values()):
            return _spread(states, [d for d in drafters.values() if d.up and not d.silent])
        name = self.options.drafter or next(iter(drafters), None)
        drafter = drafters.get(name) if name is not None else None
        chosen = name if drafter is not None and drafter.up else None
        return dict.fromkeys((s.request.id for s in states), chosen)

    def observe(self, state: RequestState, verdict: Verdict) -> None:
        """A fixed choice learns nothing."""


def _spread(states: Sequence[RequestState], drafters: Sequence[Drafter]) -> dict[str, str | None]:
    """Keep to the server that holds a request's text, else take the least loaded one."""
    loads = {d.name: d.num_requests for d in drafters}
    chosen: dict[str, str | None] = {}
    for state in states:
        name = state.drafter
        if name not in loads:
            name = min(loads, key=lambda n: loads[n], default=None)
            if name is not None:
                loads[name] += 1
        chosen[state.request.id] = name
    return chosen


POLICY = Single
