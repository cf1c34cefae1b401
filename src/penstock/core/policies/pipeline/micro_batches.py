"""Micro-batches: while the target verifies one group, drafters draft for the next."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from penstock.core.policies.base import Pipeline, View
from penstock.core.policies.options import Range
from penstock.core.policies.pipeline.parts.division import Division
from penstock.core.state import RequestState


class MicroBatches(Pipeline):
    """Divides requests into groups that are drafted for and verified in turn (Spin, section V-B).

    A group is verified when all its drafts are there. Each drafter's batch is split evenly:
    requests between two rounds move to the smallest group. One group is rounds (`off`; GoodSpeed,
    section III-A): the target waits for all drafts."""

    name: ClassVar[str] = "micro_batches"

    @dataclass(frozen=True, slots=True)
    class Options:
        num: Annotated[int, Range(at_least=1, at_most=64)] = 2

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.num = options.num
        self._group: dict[str, int] = {}
        self._next_in_lane: dict[str, int] = {}
        self._next_verified = 0
        self._verified: int | None = None

    def group_of(self, state: RequestState) -> int | None:
        """Return the micro-batch of a request that drafts in a lane."""
        return self._group.get(state.request.id)

    def divide(self, states: Sequence[RequestState]) -> None:
        if self.num == 1:
            return
        division = Division(self.num)
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
        """Return the due requests of one group, in turn."""
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
        """Wait for the next whole group; without pending drafts take the largest partial group."""
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
        """Return whether the request is in the verified group, or in none."""
        return self._group.get(state.request.id, self._verified) == self._verified

    def _turn(self, group: int) -> int:
        return (group - self._next_verified) % self.num


POLICY = MicroBatches
