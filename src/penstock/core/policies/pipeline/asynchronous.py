"""Asynchronous pipeline: verify what is ready, or wait for some pending drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from penstock.core.learn import Estimators
from penstock.core.policies.base import Pipeline, View
from penstock.core.state import DraftStage, RequestState
from penstock.fluid.step_profile import StepWork

_OVERDUE = 0.25  # remaining share of the elapsed time of an overdue draft; chosen by hand


class Asynchronous(Pipeline):
    """Starts the target when the sum of all delays is smallest.

    Waiting delays the ready requests; going without the others delays each of them by a step. The
    candidates are now and each moment at which another draft is expected. Delays are weighted with
    the tokens that the request can expect."""

    name: ClassVar[str] = "async"

    def hold_until(
        self, ready: Sequence[RequestState], pending: Sequence[RequestState], view: View
    ) -> float | None:
        if not ready or not pending:
            return None
        coming = sorted(self._coming(view, state) for state in pending)
        after, tokens, rows = np.array(coming).T
        first = [self._held(view.learn, state) for state in ready]
        waits = np.concatenate(([0.0], after))
        joined = np.cumsum(np.concatenate(([sum(t for t, _ in first)], tokens)))
        positions = np.cumsum(np.concatenate(([sum(n for _, n in first)], rows)))
        delays = np.empty(len(waits))
        for i, wait in enumerate(waits):
            end = wait + _step_seconds(view.learn, len(first) + i, positions[i])
            delays[i] = joined[i] * end
            if i < len(after):
                missed = positions[-1] - positions[i]
                next_step = _step_seconds(view.learn, len(after) - i, missed)
                delays[i] += tokens[i:] @ (np.maximum(end, after[i:]) + next_step)
        best = int(np.argmin(delays))
        return view.now + float(waits[best]) if best else None

    def _coming(self, view: View, state: RequestState) -> tuple[float, float, int]:
        """Return a pending draft's seconds to arrival, expected tokens and positions."""
        order = state.draft.order
        assert order is not None
        elapsed = view.now - state.draft.ordered_at
        left = view.learn.links.seconds(order.drafter, order.max_draft_tokens) - elapsed
        if left <= 0:
            left = _OVERDUE * elapsed
        num = order.max_draft_tokens
        acceptance = view.learn.acceptance
        return left, acceptance.expected_tokens(state.request.id, order.drafter, num), num + 1

    def _held(self, estimators: Estimators, state: RequestState) -> tuple[float, int]:
        """Return a ready request's expected tokens and positions."""
        if state.draft.stage is not DraftStage.HELD or state.drafter is None:
            return 1.0, 1
        num = state.draft.num_draft_tokens
        acceptance = estimators.acceptance
        return acceptance.expected_tokens(state.request.id, state.drafter, num), num + 1


def _step_seconds(estimators: Estimators, num_requests: int, num_positions: float) -> float:
    drafted = int(num_positions) - num_requests
    return estimators.times.step_seconds(
        StepWork(num_decodes=num_requests, num_draft_tokens=drafted)
    )


POLICY = Asynchronous
