"""Schedulers that know more than they could: what policies are measured against."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from penstock.core.policies.allocation.goodspeed_adaptive import GoodSpeedAdaptive
from penstock.core.policies.base import AllocationPolicy, DraftCandidate, SelectionPolicy, View
from penstock.core.policies.registry import policies, register
from penstock.core.state import Grant, Outcome, RequestState

FloatArray = npt.NDArray[np.float64]

# --- who choose drafters --------------------------------------------------------------------------


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


class KnowsRates(GoodSpeedAdaptive):
    """The same policy, told the acceptance of every round: rates, [rounds, clients]."""

    def __init__(self, rates: FloatArray) -> None:
        super().__init__(GoodSpeedAdaptive.Options())
        self._truth = iter(rates.tolist())

    def rates(self, candidates: Sequence[DraftCandidate]) -> Sequence[float]:
        known: list[float] = next(self._truth)
        return known


class BestFilter(GoodSpeedAdaptive):
    """The same policy with the best filter there can be for `jumping_rates`: told both levels of
    every client, the first, and the dwell, it has only the outcomes to tell where a client is."""

    def __init__(self, rates: FloatArray, dwell: int) -> None:
        super().__init__(GoodSpeedAdaptive.Options())
        self._low, self._high = rates.min(axis=0), rates.max(axis=0)
        self._is_high = (rates[0] == self._high).astype(float)
        self._jump = 1 / dwell

    def rates(self, candidates: Sequence[DraftCandidate]) -> Sequence[float]:
        mixed: list[float] = (self._low + self._is_high * (self._high - self._low)).tolist()
        return mixed

    def on_step(self, outcomes: Sequence[Outcome], now: float) -> None:
        super().on_step(outcomes, now)
        accepted = np.array([o.verdict.num_accepted for o in outcomes])
        rejected = np.array([o.verdict.num_decided for o in outcomes]) - accepted
        high = self._is_high * self._high**accepted * (1 - self._high) ** rejected
        low = (1 - self._is_high) * self._low**accepted * (1 - self._low) ** rejected
        now_high = high / (high + low)
        self._is_high = now_high + self._jump * (1 - 2 * now_high)


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
