"""Asynchronous pipeline: verify what is ready, or wait for some pending drafts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from penstock.core.learn import Estimators
from penstock.core.policies.base import Pipeline, View
from penstock.core.state import DraftStage, RequestState
from penstock.fluid.step_profile import StepWork

_OVERDUE = 0.25  # remaining share of the elapsed time of an overdue draft; chosen by hand
_ROUNDING_S = 1e-6  # an overdue draft's remaining time as predicted, rounding included


class Asynchronous(Pipeline):
    """Starts the target when the sum of all delays is smallest.

    Waiting delays the ready requests; going without the others delays each of them by a step, and
    the next round of these by what is left of the others' step when their drafts are back. The
    candidates are now and each moment at which another draft is expected. Delays are weighted with
    the tokens that the request can expect."""

    name: ClassVar[str] = "async"

    def hold_until(
        self, ready: Sequence[RequestState], pending: Sequence[RequestState], view: View
    ) -> float | None:
        if not ready or not pending:
            return None
        coming = sorted((_remaining(view, state), *_draft(view.learn, state)) for state in pending)
        first = [(0.0, *_draft(view.learn, state)) for state in ready]
        arrivals, tokens, rows, again = np.array(first + coming).T
        joined, positions = np.cumsum(tokens), np.cumsum(rows)
        delays: dict[float, float] = {}
        for num in range(len(ready), len(arrivals) + 1):
            wait = float(arrivals[num - 1])
            end = wait + _step_seconds(view.learn, num, positions[num - 1])
            delay = joined[num - 1] * end
            if num < len(arrivals):
                missed = positions[-1] - positions[num - 1]
                next_step = _step_seconds(view.learn, len(arrivals) - num, missed)
                delay += tokens[num:] @ (np.maximum(end, arrivals[num:]) + next_step)
                if arrivals[-1] <= end:
                    delay += tokens[:num] @ np.maximum(0.0, next_step - again[:num])
            delays[wait] = min(delay, delays.get(wait, math.inf))
        best = min(delays, key=delays.__getitem__)
        return view.now + best if best else None


def _remaining(view: View, state: RequestState) -> float:
    """Return the seconds until a pending draft arrives."""
    order = state.draft.order
    assert order is not None
    elapsed = view.now - state.draft.ordered_at
    left = view.learn.links.seconds(order.drafter, order.max_draft_tokens) - elapsed
    # Where a draft is due just now, going without it would be the dearest of all choices.
    return left if left > _ROUNDING_S else _OVERDUE * elapsed


def _draft(learn: Estimators, state: RequestState) -> tuple[float, int, float]:
    """Return a request's expected tokens and positions, and the seconds of such a draft.

    Without a draft a request is ready for the next step anyway: it waits for no draft's return."""
    order, drafter, num = state.draft.order, state.drafter, state.draft.num_draft_tokens
    if order is not None:
        drafter, num = order.drafter, order.max_draft_tokens
    elif state.draft.stage is not DraftStage.HELD or drafter is None:
        return 1.0, 1, math.inf
    expected = learn.acceptance.expected_tokens(state.request.id, drafter, num)
    return expected, num + 1, learn.links.seconds(drafter, num)


def _step_seconds(learn: Estimators, num_requests: int, num_positions: float) -> float:
    drafted = int(num_positions) - num_requests
    return learn.times.step_seconds(StepWork(num_decodes=num_requests, num_draft_tokens=drafted))


POLICY = Asynchronous
