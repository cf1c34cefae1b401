"""One drafter for all requests: the Spin paper's Vanilla."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from penstock.core.policies.base import SelectionPolicy, View, usable
from penstock.core.state import Drafter, RequestState


class Single(SelectionPolicy):
    """Gives every request that leaves the choice open the same drafter."""

    name: ClassVar[str] = "single"

    @dataclass(frozen=True, slots=True)
    class Options:
        drafter: str | None = None  # name or model; None: the first, or least loaded server

    def select(self, states: Sequence[RequestState], view: View) -> dict[str, str | None]:
        wanted = self.options.drafter
        if wanted is None and not any(d.is_remote for d in view.drafters.values()):
            first = next(iter(view.drafters.values()), None)
            wanted = None if first is None else first.model or first.name
        open_to = usable(view.drafters)
        if wanted is not None:
            open_to = {n: d for n, d in open_to.items() if wanted in (n, d.model)}
        return _spread(states, open_to, view.loads)


def _spread(
    states: Sequence[RequestState], drafters: Mapping[str, Drafter], loads: Mapping[str, int]
) -> dict[str, str | None]:
    """Keep the drafter that has a request's KV, else take the least loaded one with room."""
    left = {n: loads.get(n, 0) for n in drafters}
    chosen: dict[str, str | None] = {}
    for state in states:
        name = state.drafter
        if name not in left:
            free = [n for n, d in drafters.items() if left[n] < (d.max_num_seqs or left[n] + 1)]
            name = min(free, key=left.__getitem__, default=None)
            if name is not None:
                left[name] += 1
        chosen[state.request.id] = name
    return chosen


POLICY = Single
