"""When the target verifies, while drafters work beside it: rounds, or whatever is ready.

A pipeline looks at the drafts that are held and at those that are on their way, and says whether
the target should wait. It decides nothing else: who joins the step is admission's business.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.core.estimators import Estimators
from penstock.core.state import RequestState


@dataclass(frozen=True, slots=True)
class Drafts:
    """The moment at which the target could start. `ready`: decoding requests that it could verify,
    with or without a draft; `pending`: requests whose drafts are on their way."""

    now: float
    ready: Sequence[RequestState]
    pending: Sequence[RequestState]
    estimators: Estimators


class Pipeline(ABC):
    """Decides whether the target waits for drafts."""

    @abstractmethod
    def hold_until(self, drafts: Drafts) -> float | None:
        """Until when to wait, unless a draft comes or is given up before; None: verify now."""


class Barrier(Pipeline):
    """Rounds: nothing is verified while a draft is on its way (GoodSpeed, section III-A)."""

    def hold_until(self, drafts: Drafts) -> float | None:
        return math.inf if drafts.pending else None


class Asynchronous(Pipeline):
    """Verify what is ready, or wait a little where that yields more tokens a second."""

    def hold_until(self, drafts: Drafts) -> float | None:
        return None


PIPELINES: dict[str, type[Pipeline]] = {"off": Barrier, "async": Asynchronous}


def make_pipeline(name: str) -> Pipeline:
    """Raises: ValueError for an unknown name."""
    if name not in PIPELINES:
        raise ValueError(f"unknown pipeline {name!r}; choose from {', '.join(PIPELINES)}")
    return PIPELINES[name]()
