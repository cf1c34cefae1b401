"""Selection by prompt length (Spin, section VI-B2): shorter prompts to smaller drafters."""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from lab.rivals import by_preference
from penstock.core.policies.base import SelectionPolicy, View
from penstock.core.policies.options import PositiveInt
from penstock.core.policies.selection.parts.goodput import model_of
from penstock.core.policies.selection.parts.places import Places
from penstock.core.state import Drafter, RequestState

_MEMORY = 512  # prompts whose lengths are divided: their quantiles are good to about 2%


class Greedy(SelectionPolicy):
    """Each request keeps the drafter for its prompt's length, or the next one with room."""

    name: ClassVar[str] = "greedy"

    @dataclass(frozen=True, slots=True)
    class Options:
        order: tuple[str, ...] = ()  # models from the smallest on; empty: by measured times
        boundaries: tuple[PositiveInt, ...] = ()  # prompt lengths between models; empty: quantiles

        def __post_init__(self) -> None:
            if len(set(self.order)) < len(self.order):
                raise ValueError(f"order names a model twice: {', '.join(self.order)}")
            if any(b <= a for a, b in itertools.pairwise(self.boundaries)):
                raise ValueError(f"boundaries must rise, not {self.boundaries}")
            if self.order and self.boundaries and len(self.boundaries) + 1 != len(self.order):
                raise ValueError("there must be one boundary fewer than models in order")

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._recent: deque[int] = deque()
        self._sorted: list[int] = []

    def select(self, states: Sequence[RequestState], view: View) -> dict[str, str | None]:
        places = Places(states, view)
        chosen: dict[str, str | None] = {}
        undecided = []
        for state in states:
            if state.drafter is not None and places.reserve(state.drafter):
                chosen[state.request.id] = state.drafter
            else:
                undecided.append(state)
        if not undecided:
            return chosen
        order = self._order(places.drafters, view)
        for state in undecided:
            if state.round == 0:
                self._remember(state.request.prompt_len)
            rank = self._rank(state.request.prompt_len, len(order))
            models = [*order[rank:], *reversed(order[:rank])]
            chosen[state.request.id] = by_preference(places, state, models)
        return chosen

    def _order(self, drafters: Mapping[str, Drafter], view: View) -> list[str]:
        curve_of = view.learn.times.curve_of
        seconds: dict[str, float] = {}
        for drafter in drafters.values():
            model = model_of(drafter)
            step = curve_of(drafter.name)(1)
            seconds[model] = min(step, seconds.get(model, step))
        if self.options.order:
            return [m for m in self.options.order if m in seconds]
        return sorted(seconds, key=seconds.__getitem__)

    def _remember(self, prompt_len: int) -> None:
        self._recent.append(prompt_len)
        bisect.insort(self._sorted, prompt_len)
        if len(self._recent) > _MEMORY:
            oldest = self._recent.popleft()
            del self._sorted[bisect.bisect_left(self._sorted, oldest)]

    def _rank(self, prompt_len: int, num_models: int) -> int:
        """Return the model's rank by size for a prompt."""
        if not num_models:
            return 0
        if self.options.boundaries:
            return min(bisect.bisect_right(self.options.boundaries, prompt_len), num_models - 1)
        shorter = bisect.bisect_left(self._sorted, prompt_len)
        longer = len(self._sorted) - bisect.bisect_right(self._sorted, prompt_len)
        share = (len(self._sorted) + shorter - longer) / (2 * max(1, len(self._sorted)))
        return min(int(share * num_models), num_models - 1)


POLICY = Greedy
