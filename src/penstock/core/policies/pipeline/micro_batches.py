"""Requests in groups: while the target verifies one, the drafters draft for the next."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from penstock.core.policies.base import Pipeline, View
from penstock.core.policies.options import Range
from penstock.core.policies.pipeline.parts.division import Division
from penstock.core.policies.pipeline.parts.planner import PipelineSetting
from penstock.core.state import RequestState


class MicroBatches(Pipeline):
    """Requests are divided into groups; while the target verifies one, the drafters draft for the
    next (Spin, section V-B). A group is verified when all its drafts are there. The batch on each
    drafter is split evenly: requests between two rounds move to where there are fewest."""

    name: ClassVar[str] = "micro_batches"

    @dataclass(frozen=True, slots=True)
    class Options:
        """num: micro-batches."""

        num: Annotated[int, Range(at_least=2, at_most=64)] = 2

    def __init__(self, options: Options, share: float | None = None) -> None:
        """share: of the first of two, if they are not to be even."""
        super().__init__(options)
        self.num = options.num
        self._shares = PipelineSetting(options.num, share).shares
        self._group: dict[str, int] = {}
        self._next_in_lane: dict[str, int] = {}
        self._next_verified = 0
        self._verified: int | None = None

    def group_of(self, state: RequestState) -> int | None:
        """The micro-batch of a request that drafts in a lane."""
        return self._group.get(state.request.id)

    def divide(self, states: Sequence[RequestState]) -> None:
        division = Division(self._shares)
        newcomers = []
        for state in states:
            group = self._group.get(state.request.id)
            if group is None:
                newcomers.append(state)
            else:
                division.put(state, group)
        for state in newcomers:
            division.put(state, division.emptiest(state.drafter or ""))
        division.balance()
        self._group = division.groups()

    def next_drafts(self, lane: str, due: Sequence[RequestState]) -> Sequence[RequestState]:
        """Those of one group, in turn."""
        first = self._next_in_lane.get(lane, 0)
        groups = [self._group.get(s.request.id, 0) for s in due]
        if not groups:
            return due
        chosen = min(groups, key=lambda g: (g - first) % self.num)
        self._next_in_lane[lane] = (chosen + 1) % self.num
        return [s for s, group in zip(due, groups, strict=True) if group == chosen]

    def hold_until(
        self, ready: Sequence[RequestState], pending: Sequence[RequestState], view: View
    ) -> float | None:
        """Wait for the next whole group. With no draft on its way nothing more will come soon, and
        the largest part of a group will do."""
        num_ready = Counter(self._group.get(s.request.id) for s in ready)
        sizes = Counter(self._group.values())
        whole = [g for g, size in sizes.items() if num_ready[g] == size]
        self._verified = min(whole, key=self._turn, default=None)
        if self._verified is None:
            if pending:
                return math.inf
            parts = [g for g in sizes if num_ready[g]]
            self._verified = min(parts, key=lambda g: (-num_ready[g], self._turn(g)), default=None)
        if self._verified is not None:
            self._next_verified = (self._verified + 1) % self.num
        return None

    def joins(self, state: RequestState) -> bool:
        """Its own group, and requests without a group."""
        return self._group.get(state.request.id, self._verified) == self._verified

    def _turn(self, group: int) -> int:
        return (group - self._next_verified) % self.num


POLICY = MicroBatches
