"""Learning-based selection (Spin, Algorithms 1 and 2): explore in chunks, then exploit.

Algorithm 2 as printed never advances its clock, draws once for all of its chunks, and drops
requests that find no room. Here every chunk draws again, and they go to the next drafter with room.
Each request has epochs of its own, and a slot is one of its rounds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import numpy as np

from penstock.core.policies.base import Gauges, ReplayProposal, SelectionPolicy, View, usable
from penstock.core.policies.declared import Gauge
from penstock.core.policies.options import PositiveInt, Seed
from penstock.core.policies.selection.parts.goodput import ObservedGoodput, RoundTimes, model_of
from penstock.core.policies.selection.parts.places import Places, assign
from penstock.core.state import Drafter, Outcome, RequestState

Correction = Literal["fading", "modelled_time", "no_drafter", "switching"]


@dataclass(slots=True)
class _Course:
    """Stage of a request."""

    epoch: int = 0  # k in the paper, from 1
    exploring: bool = False
    chunks_left: int = 0  # of the exploration
    until: int = 0  # round until which it keeps its drafter
    drawn: str | None = None  # for the next chunk


class Lbss(SelectionPolicy):
    """Per request: α slots of exploration in chunks of β, then 2^k slots of exploitation.

    The drafter to exploit is from a matching of the estimates. Then the next epoch begins."""

    name: ClassVar[str] = "lbss"
    metrics = (
        Gauge("drafter_goodput_estimate", "Spin: mean tokens per second of a round.", "drafter"),
    )

    @dataclass(frozen=True, slots=True)
    class Options:
        alpha: PositiveInt = 6  # rounds of an exploration
        beta: PositiveInt = 2  # rounds of its chunks
        # Additions to the paper, none in the bundle `spin`: old rewards fade; a reward's seconds
        # are those of a round in which all chose alike; the matching may choose no drafter; it
        # charges the tokens lost while a new drafter reads (λ of eq. 6).
        corrections: tuple[Correction, ...] = get_args(Correction)
        fast_switch: bool = True  # drafters with own lanes read before the switch
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
        self._adds = frozenset(options.corrections)
        self._observed = ObservedGoodput("fading" in self._adds, "modelled_time" in self._adds)
        self._courses: dict[str, _Course] = {}

    # --- choosing -------------------------------------------------------------------------------

    def select(self, states: Sequence[RequestState], view: View) -> dict[str, str | None]:
        places = Places(states, view)
        chosen: dict[str, str | None] = {}
        exploring: list[RequestState] = []
        exploiting: list[RequestState] = []
        for state in states:
            course = self._courses.setdefault(state.request.id, _Course())
            if state.round < course.until and places.reserve(state.drafter):
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
        """Begin the next chunk, the exploitation after the last, or the next epoch."""
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
        """Return a random drafter with room, not another one with the present model."""
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
        """Match the requests whose exploration has just ended (eq. 10)."""
        others = sum(view.loads.values()) - sum(s.drafter is not None for s in states)
        times = RoundTimes(view, len(states) + max(0, others))
        drafters = list(places.drafters.values())
        values = np.array([[self._worth(s, d, times) for d in drafters] for s in states])
        values = values.reshape(len(states), len(drafters))
        room = places.room(places.drafters)
        alone = times.alone if "no_drafter" in self._adds else -np.inf
        for state, index in zip(states, assign(values, room, alone), strict=True):
            name = None if index is None else drafters[index].name
            places.reserve(name)
            chosen[state.request.id] = name
            self._courses[state.request.id].drawn = self._draw(places)

    def _draw(self, places: Places) -> str | None:
        names = list(places.drafters)
        return self._rng.choice(names) if names else None

    def _worth(self, state: RequestState, drafter: Drafter, times: RoundTimes) -> float:
        """Return the estimated goodput, less the loss by a switch over the stage's slots."""
        estimate = self._observed.estimate(state.request.id, model_of(drafter))
        seconds: float = 2 ** self._courses[state.request.id].epoch * times.verify(0)[0]
        if not seconds or "switching" not in self._adds:
            return estimate
        return estimate * (1 - times.reading(state, drafter) / seconds)

    # --- fast switch ----------------------------------------------------------------------------

    def replays(self, states: Sequence[RequestState], view: View) -> list[ReplayProposal]:
        """Return replays by next drafters outside the step, in the last rounds of a stage."""
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
        """Return the next chunk's drawn drafter, or before a matching the best (section IV-C)."""
        if course.chunks_left or not course.exploring:
            return course.drawn if course.drawn in drafters else None
        worth = {
            n: self._observed.estimate(state.request.id, model_of(d)) for n, d in drafters.items()
        }
        return max(worth, key=worth.__getitem__)

    # --- learning -------------------------------------------------------------------------------

    @property
    def gauges(self) -> Gauges:
        means = self._observed.by_model
        return {"drafter_goodput_estimate": {name: means[name].value for name in means}}

    def on_step(self, outcomes: Sequence[Outcome], view: View) -> None:
        self._observed.on_step(outcomes, view)

    def release_request(self, request_id: str) -> None:
        self._observed.release_request(request_id)
        self._courses.pop(request_id, None)


POLICY = Lbss
