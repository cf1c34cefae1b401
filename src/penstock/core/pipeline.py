"""When the target verifies, while drafters work beside it: rounds, or whatever is ready.

A pipeline looks at the drafts that are held and at those that are on their way, and says whether
the target should wait. It decides nothing else: who joins the step is admission's business.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.core.estimators import Estimators
from penstock.core.state import RequestState
from penstock.fluid.step_profile import StepWork

_OVERDUE = 0.25
"""Of the time that a draft has taken, once it is later than expected: how much is still to come."""


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
    """Verify what is ready, or wait for some of the drafts that are coming.

    Waiting delays those that are ready; going without the others makes each of them wait for the
    whole step that it has missed. Of all moments at which another draft is expected, and now, the
    one is taken that makes the sum of all delays smallest, each weighted with the tokens that its
    request can expect. Where a step costs little that is mostly now; where it costs much more than
    drafting, it is when the last draft has come: the barrier (design 4.4).
    """

    def hold_until(self, drafts: Drafts) -> float | None:
        if not drafts.ready:
            return None
        coming = sorted(self._coming(drafts, state) for state in drafts.pending)
        after, tokens, rows = np.array(coming).T
        first = [self._held(drafts.estimators, state) for state in drafts.ready]
        waits = np.concatenate(([0.0], after))
        joined = np.cumsum(np.concatenate(([sum(t for t, _ in first)], tokens)))
        positions = np.cumsum(np.concatenate(([sum(n for _, n in first)], rows)))
        delays = np.empty(len(waits))
        for i, wait in enumerate(waits):
            end = wait + _step_seconds(drafts.estimators, len(first) + i, positions[i])
            delays[i] = joined[i] * end
            if i < len(after):
                missed = positions[-1] - positions[i]
                next_step = _step_seconds(drafts.estimators, len(after) - i, missed)
                delays[i] += tokens[i:] @ (np.maximum(end, after[i:]) + next_step)
        best = int(np.argmin(delays))
        return drafts.now + float(waits[best]) if best else None

    def _coming(self, drafts: Drafts, state: RequestState) -> tuple[float, float, int]:
        """Seconds until a draft is here, the tokens it promises, and its positions."""
        order = state.draft_order
        assert order is not None
        elapsed = drafts.now - state.ordered_at
        left = drafts.estimators.links.seconds(order.drafter, order.max_draft_tokens) - elapsed
        if left <= 0:
            # The longer it is overdue, the longer it will still take.
            left = _OVERDUE * elapsed
        num = order.max_draft_tokens
        return left, expected_tokens(drafts.estimators, state, order.drafter, num), num + 1

    def _held(self, estimators: Estimators, state: RequestState) -> tuple[float, int]:
        """The tokens that a request promises, and its positions."""
        if state.held is None:
            return 1.0, 1
        num = state.held.num_draft_tokens
        return expected_tokens(estimators, state, state.held.drafter, num), num + 1


def expected_tokens(
    estimators: Estimators, state: RequestState, drafter: str, num_draft_tokens: int
) -> float:
    """Accepted + 1, by what is known of the request and the drafter."""
    rate = estimators.acceptance.mean(state.request.id, drafter)
    return (1 - rate ** (num_draft_tokens + 1)) / (1 - rate)


def _step_seconds(estimators: Estimators, num_requests: int, num_positions: float) -> float:
    drafted = int(num_positions) - num_requests
    return estimators.step_model.seconds(
        StepWork(num_decodes=num_requests, num_draft_tokens=drafted)
    )


PIPELINES: dict[str, type[Pipeline]] = {"off": Barrier, "async": Asynchronous}


def make_pipeline(name: str) -> Pipeline:
    """Raises: ValueError for an unknown name."""
    if name not in PIPELINES:
        raise ValueError(f"unknown pipeline {name!r}; choose from {', '.join(PIPELINES)}")
    return PIPELINES[name]()
