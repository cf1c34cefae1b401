"""Phase 3: allocate draft lengths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.core.context import Context
from penstock.core.policies.base import DraftCandidate, Room
from penstock.core.state import (
    Drafter,
    DraftStage,
    Grant,
    RequestState,
)
from penstock.core.step import ScheduledTokens, Step


def allocate(
    ctx: Context, states: Iterable[RequestState], room: Room, now: float
) -> dict[str, Grant]:
    """Return grants by request id; a request that may not draft is left out."""
    candidates = []
    for state in states:
        drafter = ctx.table.drafter_of(state)
        if drafter is None or not state.is_decoding:
            continue
        most = limit(state, drafter)
        at_hand = min(len(state.at_hand(drafter.name)), most)
        candidates.append(DraftCandidate(state, drafter.name, most, at_hand))
    if not candidates:
        return {}
    view = ctx.view(ctx.table.drafters, now, room)
    grants = ctx.allocation.allocate(candidates, view)
    if ctx.trials is not None and ctx.allocation.weighs_time:
        grants = ctx.trials.grant(candidates, grants, view)
    return {c.state.request.id: g for c, g in zip(candidates, grants, strict=True)}


def grants_of_step(
    ctx: Context, step: Step, scheduled: Sequence[ScheduledTokens]
) -> dict[str, Grant]:
    """Return draft lengths by request: held drafts within the step's budget, then new ones."""
    num_rows = step.num_tokens
    budget = ctx.admission.draft_budget(num_rows)
    grants: dict[str, Grant] = {}
    inside = []
    for s in scheduled:
        drafter = ctx.table.drafter_of(s.state)
        if s.state.draft.stage is DraftStage.HELD:
            length = min(s.state.draft.num_draft_tokens, budget)
            grants[s.state.request.id] = Grant(length)
            budget -= length
            num_rows += length
        elif drafter is not None and not ctx.is_beside(drafter):
            inside.append(s.state)
    num_sampled = sum([s.samples for s in scheduled])
    room = Room(max(0, budget), num_rows, num_sampled)
    return grants | allocate(ctx, inside, room, step.now)


def reserve(ctx: Context, state: RequestState) -> int:
    """Return the draft positions that admission keeps free for a running request."""
    if state.draft.stage is DraftStage.HELD:
        return state.draft.num_draft_tokens
    drafter = ctx.table.drafter_of(state)
    if drafter is None or not state.is_decoding:
        return 0
    return min(ctx.allocation.reserve(state), limit(state, drafter))


def limit(state: RequestState, drafter: Drafter) -> int:
    """Return the longest draft that could still be of use.

    The target adds one token itself, and the drafter reads all of its draft but the last token. 0
    if all that is left may be on its way already."""
    most = min(state.num_remaining_tokens - 1, drafter.max_draft_tokens)
    if drafter.max_len is not None:
        most = min(most, drafter.max_len - state.num_known_tokens + 1)
    if state.request.max_draft_tokens is not None:
        most = min(most, state.request.max_draft_tokens)
    return max(0, most)
