"""Policies that decide now and then: a request keeps its drafter for a stage of some rounds, and
those whose stage has ended are matched with what room there is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import numpy as np

from penstock.core.policies.selection import SelectionPolicy
from penstock.core.policies.selection.parts.goodput import RoundTimes
from penstock.core.policies.selection.parts.matching import assign
from penstock.core.policies.selection.parts.places import Places
from penstock.core.state import Drafter, RequestState
from penstock.core.view import View


class StagedPolicy(SelectionPolicy):
    """Says what each drafter is worth to a request, in tokens per second, and for how long."""

    def __init__(self) -> None:
        self._until: dict[str, int] = {}

    @abstractmethod
    def worth(
        self, state: RequestState, drafters: Sequence[Drafter], times: RoundTimes
    ) -> list[float]:
        """Of each drafter, to be compared with `times.alone`."""

    @abstractmethod
    def rounds(self, state: RequestState, drafter: Drafter | None) -> int:
        """Length of the stage that begins now, at least 1."""

    def select(self, states: Sequence[RequestState], view: View) -> dict[str, str | None]:
        places = Places(states, view)
        chosen: dict[str, str | None] = {}
        due = []
        for state in states:
            if state.round < self._until.get(state.request.id, 0) and places.take(state.drafter):
                chosen[state.request.id] = state.drafter
            else:
                due.append(state)
        if due:
            self._decide(due, places, step_times(due, view), chosen)
        return chosen

    def _decide(
        self,
        states: Sequence[RequestState],
        places: Places,
        times: RoundTimes,
        chosen: dict[str, str | None],
    ) -> None:
        drafters = list(places.drafters.values())
        values = np.array([self.worth(s, drafters, times) for s in states])
        values = values.reshape(len(states), len(drafters))
        room = places.room(places.drafters)
        for state, index in zip(states, assign(values, room, times.alone), strict=True):
            drafter = None if index is None else drafters[index]
            chosen[state.request.id] = None if drafter is None else drafter.name
            # Round 0 computes the prompt and drafts nothing.
            length = self.rounds(state, drafter) + (state.round == 0)
            self._until[state.request.id] = state.round + length

    def forget(self, request_id: str) -> None:
        self._until.pop(request_id, None)


def step_times(states: Sequence[RequestState], view: View) -> RoundTimes:
    """Rounds of a step that `states` share with all that draft already."""
    others = sum(view.loads.values()) - sum(s.drafter is not None for s in states)
    return RoundTimes(view, len(states) + max(0, others), view.loads)


def rounds_ahead(state: RequestState) -> int:
    """Rounds that a switch is for. How many are to come nobody knows; as many again as there were
    is a fair guess, once there were a few."""
    return max(1, min(max(state.round, _MIN_ROUNDS_AHEAD), state.num_remaining_tokens))


_MIN_ROUNDS_AHEAD = 16


def kept(state: RequestState, drafter: Drafter, times: RoundTimes, rounds: int) -> float:
    """Share of the next `rounds` rounds that a switch leaves for making tokens; below 0 where it
    takes longer than they do."""
    slot = times.verify(0)[0]
    return 1 - times.reading(state, drafter) / (rounds * slot) if slot else 1.0
