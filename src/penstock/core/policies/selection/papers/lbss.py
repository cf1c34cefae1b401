"""Learning-based selection (Spin, Algorithms 1 and 2): explore in chunks, then exploit for twice as
long as the time before.

Algorithm 2 as printed never advances its clock, draws once for all of its chunks, and drops
requests that find no room. Here every chunk draws again, and they go to the next drafter with room.
Each request has epochs of its own, and a slot is one of its rounds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from penstock.core.policies.base import ReplayProposal, SelectionPolicy, View, usable
from penstock.core.policies.options import NonNegativeFloat, PositiveInt, Seed
from penstock.core.policies.selection.parts.goodput import ObservedGoodput, RoundTimes, model_of
from penstock.core.policies.selection.parts.places import Places, assign
from penstock.core.state import Drafter, Outcome, RequestState


@dataclass(slots=True)
class _Course:
    """Where a request is. `epoch` counts from 1 (k in the paper). Until round `until` it keeps its
    drafter, to explore or to exploit; `chunks_left` are those of the exploration that follow.
    `drawn`: for the next chunk."""

    epoch: int = 0
    exploring: bool = False
    chunks_left: int = 0
    until: int = 0
    drawn: str | None = None


class Lbss(SelectionPolicy):
    """Per request: α slots of exploration in chunks of β, then 2^k slots with the drafter that a
    matching of the estimates gives it, then the next epoch."""

    name: ClassVar[str] = "lbss"

    @dataclass(frozen=True, slots=True)
    class Options:
        """alpha: rounds of an exploration; beta: rounds of its chunks. switching_weight: λ of
        eq. 6, the price of the tokens that are lost while a new drafter reads the text.
        fast_switch: have drafters of their own lane read it before the switch. seed: of the
        draws."""

        alpha: PositiveInt = 6
        beta: PositiveInt = 2
        switching_weight: NonNegativeFloat = 1.0
        fast_switch: bool = True
        seed: Seed = 0

        def __post_init__(self) -> None:
            if self.alpha % self.beta:
                raise ValueError(
                    f"alpha must be a multiple of beta, not {self.alpha} against {self.beta}"
                )

    options: Options

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._rng = random.Random(options.seed)
        self._observed = ObservedGoodput()
        self._courses: dict[str, _Course] = {}

    # --- choosing -------------------------------------------------------------------------------

    def select(self, states: Sequence[RequestState], view: View) -> dict[str, str | None]:
        places = Places(states, view)
        chosen: dict[str, str | None] = {}
        exploring: list[RequestState] = []
        exploiting: list[RequestState] = []
        for state in states:
            course = self._courses.setdefault(state.request.id, _Course())
            if state.round < course.until and places.take(state.drafter):
                chosen[state.request.id] = state.drafter
                continue
            if state.round >= course.until:
                self._next_stage(course, state.round)
            (exploring if course.exploring else exploiting).append(state)
        for state in exploring:
            chosen[state.request.id] = self._explore(state, places)
        if exploiting:
            self._exploit(exploiting, places, view, chosen)
        return chosen

    def _next_stage(self, course: _Course, now: int) -> None:
        """The next chunk, or the exploitation after the last, or the next epoch's first chunk.
        Round 0 computes the prompt and drafts nothing."""
        first = max(now, 1)
        if course.chunks_left:
            course.chunks_left -= 1
        elif course.exploring:
            course.exploring = False
            course.until = first + 2**course.epoch
            return
        else:
            course.epoch += 1
            course.exploring = True
            course.chunks_left = self.options.alpha // self.options.beta - 1
        course.until = first + self.options.beta

    def _explore(self, state: RequestState, places: Places) -> str | None:
        """A random drafter, or the next that has room; another instance of the model that the
        request has would teach nothing."""
        course = self._courses[state.request.id]
        drawn = course.drawn if course.drawn in places.drafters else self._draw(places)
        course.drawn = self._draw(places)
        if drawn is None:
            return None
        own = places.drafters.get(state.drafter or "")
        if own is not None and model_of(own) == model_of(places.drafters[drawn]):
            drawn = own.name
        names = list(places.drafters)
        first = names.index(drawn)
        return places.first_with_room(names[first:] + names[:first])

    def _exploit(
        self,
        states: Sequence[RequestState],
        places: Places,
        view: View,
        chosen: dict[str, str | None],
    ) -> None:
        """Eq. 10, for the requests whose exploration has just ended."""
        others = sum(view.loads.values()) - sum(s.drafter is not None for s in states)
        times = RoundTimes(view, len(states) + max(0, others))
        drafters = list(places.drafters.values())
        values = np.array([[self._worth(s, d, times) for d in drafters] for s in states])
        values = values.reshape(len(states), len(drafters))
        room = places.room(places.drafters)
        for state, index in zip(states, assign(values, room, times.alone), strict=True):
            name = None if index is None else drafters[index].name
            places.take(name)
            chosen[state.request.id] = name
            self._courses[state.request.id].drawn = self._draw(places)

    def _draw(self, places: Places) -> str | None:
        names = list(places.drafters)
        return self._rng.choice(names) if names else None

    def _worth(self, state: RequestState, drafter: Drafter, times: RoundTimes) -> float:
        """Estimated goodput less λ times what the switch loses of it, over the stage's slots."""
        estimate = self._observed.estimate(state.request.id, model_of(drafter))
        slots = 2 ** self._courses[state.request.id].epoch
        slot = times.verify(0)[0]
        kept = 1 - times.reading(state, drafter) / (slots * slot) if slot else 1.0
        return estimate * (1 - self.options.switching_weight * (1 - kept))

    # --- fast switch ----------------------------------------------------------------------------

    def replays(self, states: Sequence[RequestState], view: View) -> list[ReplayProposal]:
        """In the last rounds of a stage, the drafter of the next. Inside a step there is no idle
        time: reading early would cost what it saves."""
        beside = {n: d for n, d in usable(view.drafters).items() if view.is_beside(d)}
        if not beside or not self.options.fast_switch:
            return []
        proposals = []
        for state in states:
            course = self._courses.get(state.request.id)
            if course is None or course.until - state.round > self.options.beta:
                continue
            name = self._destination(state, course, beside)
            if name is not None and name != state.drafter:
                proposals.append((course.until - state.round, ReplayProposal(state, name)))
        proposals.sort(key=lambda proposal: proposal[0])
        return [proposal for _, proposal in proposals]

    def _destination(
        self, state: RequestState, course: _Course, drafters: dict[str, Drafter]
    ) -> str | None:
        """What was drawn for the next chunk; before a matching, whose outcome nobody knows, the
        drafter with the highest estimate (section IV-C)."""
        if course.chunks_left or not course.exploring:
            return course.drawn if course.drawn in drafters else None
        worth = {
            n: self._observed.estimate(state.request.id, model_of(d)) for n, d in drafters.items()
        }
        return max(worth, key=worth.__getitem__)

    # --- learning -------------------------------------------------------------------------------

    def observe(self, outcomes: Sequence[Outcome], view: View) -> None:
        self._observed.observe(outcomes, view)

    def forget(self, request_id: str) -> None:
        self._observed.forget(request_id)
        self._courses.pop(request_id, None)


POLICY = Lbss
