"""Upper confidence bounds on goodput, per request: optimism in place of phases.

UCB2 (Auer, Cesa-Bianchi and Fischer, 2002) plays an arm for exponentially longer stages each time
it is chosen, so that switches grow with the logarithm of the rounds. What other requests have seen
of a drafter stands in for what this one has not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from penstock.core.policies.options import NonNegativeFloat, PositiveFloat, Range
from penstock.core.policies.selection.parts.goodput import (
    Mean,
    ObservedGoodput,
    RoundTimes,
    model_of,
)
from penstock.core.policies.selection.parts.staged import StagedPolicy, kept, rounds_ahead
from penstock.core.state import Drafter, Outcome, RequestState
from penstock.core.view import View


class Ucb(StagedPolicy):
    """The drafter that could be best, as far as a switch to it pays."""

    name: ClassVar[str] = "ucb"

    @dataclass(frozen=True, slots=True)
    class Options:
        """optimism: standard errors, times √ln of the rounds, that are added to a mean. growth: of
        the stages of a drafter, each time it is chosen. prior_rounds: of its own rounds, what the
        mean of all requests counts as."""

        optimism: NonNegativeFloat = 0.5
        growth: Annotated[float, Range(above=0, at_most=10)] = 1.0
        prior_rounds: PositiveFloat = 4.0

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        self._observed = ObservedGoodput()
        self._stages: dict[str, Counter[str | None]] = {}

    def worth(
        self, state: RequestState, drafters: Sequence[Drafter], times: RoundTimes
    ) -> list[float]:
        ahead = rounds_ahead(state)
        return [self._bound(state, d, times) * kept(state, d, times, ahead) for d in drafters]

    def _bound(self, state: RequestState, drafter: Drafter, times: RoundTimes) -> float:
        seen, model = self._observed.by_model, model_of(drafter)
        own = self._observed.of(state.request.id).get(model, _NOTHING)
        others = seen.get(model, _NOTHING)
        # Somebody has to be the first, and again when what was seen has faded.
        hope = max([2 * times.alone, *(m.value for m in seen.values())])
        prior = (others.total + hope) / (others.count + 1)
        strength = min(self.options.prior_rounds, others.count + 1)
        mean = (own.total + strength * prior) / (own.count + strength)
        deviation = math.sqrt(_variance(seen.values()))
        width = math.sqrt(math.log(2 + state.round) / (own.count + strength))
        return mean + self.options.optimism * deviation * width

    def rounds(self, state: RequestState, drafter: Drafter | None) -> int:
        stages = self._stages.setdefault(state.request.id, Counter())
        arm = None if drafter is None else model_of(drafter)
        stages[arm] += 1
        return self._length(stages[arm] - 1)

    def _length(self, stage: int) -> int:
        """τ(r + 1) − τ(r), with τ(r) = ⌈(1 + growth)^r⌉; no longer than means stay fresh."""
        base, stage = 1 + self.options.growth, min(stage, 60)
        length = math.ceil(base ** (stage + 1)) - math.ceil(base**stage)
        return min(max(1, length), _LONGEST_STAGE)

    def observe(self, outcomes: Sequence[Outcome], view: View) -> None:
        self._observed.observe(outcomes, view)

    def forget(self, request_id: str) -> None:
        super().forget(request_id)
        self._observed.forget(request_id)
        self._stages.pop(request_id, None)


def _variance(means: Collection[Mean]) -> float:
    """Of goodput around its mean, over all drafters."""
    count = sum(m.count for m in means)
    return sum(m.count * m.variance for m in means) / count if count else 0.0


_NOTHING = Mean()
_LONGEST_STAGE = 256

POLICY = Ucb
