"""Policies that know more than they could, or are misled: what others are measured against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from penstock.core.policies.base import AllocationPolicy, DraftCandidate, SelectionPolicy, View
from penstock.core.policies.registry import policies, register
from penstock.core.state import Grant, Outcome, RequestState


@contextmanager
def assigned(drafters: Mapping[str, str]) -> Iterator[str]:
    """The name of a policy that gives every request the drafter that it has here, by id."""

    class Assigned(SelectionPolicy):
        name: ClassVar[str] = "assigned"

        @dataclass(frozen=True, slots=True)
        class Options:
            """There are none."""

        def __init__(self, options: Options) -> None:
            pass

        def select(self, states: Sequence[RequestState], view: View) -> dict[str, str | None]:
            return {s.request.id: drafters[s.request.id] for s in states}

    register("selection", Assigned)
    try:
        yield Assigned.name
    finally:
        del policies("selection")[Assigned.name]


class Misled(AllocationPolicy):
    """A policy that is told of every client what the next one did: a control, since whoever gains
    by learning must lose by learning this."""

    def __init__(self, policy: AllocationPolicy) -> None:
        self._policy = policy

    def allocate(self, candidates: Sequence[DraftCandidate], view: View) -> list[Grant]:
        return self._policy.allocate(candidates, view)

    def reserve(self, state: RequestState) -> int:
        return self._policy.reserve(state)

    def on_step(self, outcomes: Sequence[Outcome], now: float) -> None:
        verdicts = [o.verdict for o in outcomes]
        turned = zip(outcomes, verdicts[1:] + verdicts[:1], strict=True)
        self._policy.on_step([Outcome(o.state, verdict) for o, verdict in turned], now)
