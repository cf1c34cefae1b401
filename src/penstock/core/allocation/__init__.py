"""How many tokens each request may draft in a round. One file a policy.

A policy has `name`, an `Options` dataclass, `allocate(candidates, work)`, which returns a draft
length for each candidate, and `reserve(state)`, the draft positions that admission should keep
free for a decoding request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from penstock.core.estimators import Estimators
from penstock.core.state import RequestState


class DraftCandidate(NamedTuple):
    """A request that could draft with `drafter`, at most `limit` tokens this round."""

    state: RequestState
    drafter: str
    limit: int


@dataclass(frozen=True, slots=True)
class StepWork:
    """What the step holds besides drafts: `budget` draft positions may join the `num_rows` target
    positions that are certain, of which `num_sampled` end in a token."""

    budget: int
    num_rows: int
    num_sampled: int
    estimators: Estimators


class AllocationPolicy(Protocol):
    name: ClassVar[str]

    def allocate(self, candidates: Sequence[DraftCandidate], work: StepWork) -> list[int]: ...

    def reserve(self, state: RequestState) -> int: ...
