"""The drafter that is best over all requests, or sometimes a random one (Spin, section VI-B2)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from lab.rivals import by_preference
from penstock.core.policies.base import SelectionPolicy, View
from penstock.core.policies.options import Range, Seed
from penstock.core.policies.selection.parts.goodput import ObservedGoodput, RoundTimes, model_of
from penstock.core.policies.selection.parts.places import Places
from penstock.core.state import Drafter, Outcome, RequestState


class EpsilonGreedy(SelectionPolicy):
    """Each request explores a random drafter in a round, or uses the best on average."""

    name: ClassVar[str] = "epsilon_greedy"

    @dataclass(frozen=True, slots=True)
    class Options:
        # Probability of a random drafter; the paper's ε = 0.2 is 0.8 here.
        explore: Annotated[float, Range(at_least=0, at_most=1)] = 0.2
        seed: Seed = 0

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._rng = random.Random(options.seed)
        self._observed = ObservedGoodput()

    def select(self, states: Sequence[RequestState], view: View) -> dict[str, str | None]:
        places = Places(states, view)
        names = list(places.drafters)
        if not names:
            return {s.request.id: None for s in states}
        best = self._best_first(places.drafters, view, len(states))
        chosen: dict[str, str | None] = {}
        for state in states:
            if self._rng.random() < self.options.explore:
                first = self._rng.randrange(len(names))
                name = places.first_with_room(names[first:] + names[:first])
            else:
                name = by_preference(places, state, best)
            chosen[state.request.id] = name
        return chosen

    def _best_first(
        self, drafters: Mapping[str, Drafter], view: View, num_requests: int
    ) -> list[str]:
        """Return the models that beat no drafting by observation, the unobserved ones first."""
        seen = self._observed.by_model
        alone = RoundTimes(view, num_requests).alone
        models = dict.fromkeys(map(model_of, drafters.values()))
        worth = {m: seen[m].value if m in seen else float("inf") for m in models}
        return sorted((m for m in worth if worth[m] >= alone), key=worth.__getitem__, reverse=True)

    def on_step(self, outcomes: Sequence[Outcome], view: View) -> None:
        self._observed.on_step(outcomes, view)

    def release_request(self, request_id: str) -> None:
        self._observed.release_request(request_id)


POLICY = EpsilonGreedy
