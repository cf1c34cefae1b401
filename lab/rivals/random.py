"""Random draft lengths (GoodSpeed's baseline Random-S)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import ClassVar

from penstock.core.policies.allocation.parts.gradient import draft_budget
from penstock.core.policies.base import AllocationPolicy, DraftCandidate, View
from penstock.core.policies.options import MaxDraftTokens, NonNegativeInt, Seed
from penstock.core.state import Grant


class RandomLengths(AllocationPolicy):
    """Draws lengths evenly from all whose sum is at most the budget, then cuts them to limits."""

    name: ClassVar[str] = "random"

    @dataclass(frozen=True, slots=True)
    class Options:
        total: NonNegativeInt | None = None  # draft tokens a round (C); None: by step times
        k_max: MaxDraftTokens = 16  # most draft tokens for one request
        seed: Seed = 0

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._random = Random(options.seed)

    def allocate(self, candidates: Sequence[DraftCandidate], view: View) -> list[Grant]:
        most = [min(c.limit, self.options.k_max) for c in candidates]
        # Budget that limits would cut is not drawn.
        budget = min(draft_budget(self.options.total, view), sum(most))
        bars = sorted(self._random.sample(range(budget + len(candidates)), len(candidates)))
        lengths = [b - a - 1 for a, b in pairwise((-1, *bars))]
        return [Grant(min(n, m)) for n, m in zip(lengths, most, strict=True)]


POLICY = RandomLengths
