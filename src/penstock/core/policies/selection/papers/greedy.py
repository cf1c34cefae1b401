"""By prompt length (Spin, section VI-B2): shorter prompts to smaller drafters."""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from penstock.core.policies.base import SelectionPolicy, View
from penstock.core.policies.options import PositiveInt
from penstock.core.policies.selection.parts.goodput import model_of
from penstock.core.policies.selection.parts.places import Places
from penstock.core.state import Drafter, RequestState

_MEMORY = 512
"""Prompts whose lengths are divided: quantiles of so many are good to about 2%."""


class Greedy(SelectionPolicy):
    """Each request keeps the drafter that its prompt's length gives it. Where that is full or gone
    it gets the next larger one that has room, else the next smaller."""

    name: ClassVar[str] = "greedy"

    @dataclass(frozen=True, slots=True)
    class Options:
        """order: models from the smallest on; empty orders them by the measured time of a draft
        token. boundaries: prompt lengths, in tokens, from which on the next model is taken, one
        fewer than models; empty divides the lengths of the last 512 prompts evenly."""

        order: tuple[str, ...] = ()
        boundaries: tuple[PositiveInt, ...] = ()

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
            if state.drafter is not None and places.take(state.drafter):
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
            chosen[state.request.id] = places.by_preference(state, models)
        return chosen

    def _order(self, drafters: Mapping[str, Drafter], view: View) -> list[str]:
        """Models from the smallest on."""
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
        """Which model, counted from the smallest, a prompt is for."""
        if not num_models:
            return 0
        if self.options.boundaries:
            return min(bisect.bisect_right(self.options.boundaries, prompt_len), num_models - 1)
        shorter = bisect.bisect_left(self._sorted, prompt_len)
        longer = len(self._sorted) - bisect.bisect_right(self._sorted, prompt_len)
        share = (len(self._sorted) + shorter - longer) / (2 * max(1, len(self._sorted)))
        return min(int(share * num_models), num_models - 1)


POLICY = Greedy
