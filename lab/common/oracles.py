"""Policies that know more than they could, or are misled: what others are measured against."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from lab.common.fair_path import expected_goodput
from lab.common.rounds import BarrierTimes, FloatArray
from penstock.core.policies.allocation.papers.goodspeed import GoodSpeed
from penstock.core.policies.base import AllocationPolicy, DraftCandidate, SelectionPolicy, View
from penstock.core.policies.registry import policies, register
from penstock.core.state import Grant, Outcome, RequestState
from penstock.fluid.fair import geometric_lengths


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


class Told(GoodSpeed):
    """GoodSpeed that knows acceptance, [rounds, clients]."""

    def __init__(self, rates: Iterable[Sequence[float] | FloatArray], **options: Any) -> None:
        super().__init__(GoodSpeed.Options(**options))
        self._rates = iter(rates)

    def allocate(self, candidates: Sequence[DraftCandidate], view: View) -> list[Grant]:
        for candidate, rate in zip(candidates, next(self._rates), strict=True):
            client = self._client(candidate.state.request.tenant)
            client.acceptance, client._idle = float(rate), 0
        return super().allocate(candidates, view)


class Fastest(AllocationPolicy):
    """Most expected tokens per second of a round, by known acceptance, [rounds, clients]."""

    def __init__(self, rates: FloatArray, times: BarrierTimes, budget: int) -> None:
        self._rates, self._times, self._budget = iter(map(tuple, rates.tolist())), times, budget
        self._known: dict[tuple[float, ...], list[Grant]] = {}

    def allocate(self, candidates: Sequence[DraftCandidate], view: View) -> list[Grant]:
        rates = next(self._rates)
        if rates not in self._known:
            self._known[rates] = self._best(rates)
        return self._known[rates]

    def _best(self, rates: tuple[float, ...]) -> list[Grant]:
        """Try every time that the slowest drafter could be waited for."""
        times, best = self._times, (0.0, [0] * len(rates))
        for longest in range(self._budget + 1):
            limits = (longest * times.per_token.max() / times.per_token + 1e-9).astype(int)
            lengths, _ = geometric_lengths(np.ones(len(rates)), rates, self._budget, limits)
            seconds = times.drafts(lengths).max() + times.verify(len(rates) + int(lengths.sum()))
            best = max(best, (float(expected_goodput(rates, lengths).sum()) / seconds, [*lengths]))
        return [Grant(int(n)) for n in best[1]]
