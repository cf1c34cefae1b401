"""Phase 3: allocate drafts: tokens that look-up finds, then a drafter's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from penstock.core.context import Context
from penstock.core.policies.base import DraftCandidate, Room
from penstock.core.state import (
    Drafter,
    DraftStage,
    Grant,
    RequestState,
)
from penstock.core.step import ScheduledTokens, Step
from penstock.core.types import NO_DRAFTER, Match
from penstock.fluid.step_profile import StepWork


def allocate(
    ctx: Context, proposers: Iterable[tuple[RequestState, Drafter | None]], room: Room, now: float
) -> dict[str, Grant]:
    """Return grants by request id; a request that may not draft is left out.

    proposers: requests with their drafters; all have look-up besides."""
    found = [_candidate(ctx, state, drafter) for state, drafter in proposers if state.is_decoding]
    candidates = [c for c in found if c is not None]
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
    """Return drafts by request: held ones within the step's budget, then new ones."""
    num_rows = step.num_tokens
    budget = ctx.admission.draft_budget(num_rows)
    grants: dict[str, Grant] = {}
    others: list[tuple[RequestState, Drafter | None]] = []
    for s in scheduled:
        drafter = ctx.table.drafter_of(s.state)
        held = s.state.draft
        if held.stage is DraftStage.HELD and s.samples:
            num_known = held.num_looked_up
            grant = Grant(held.num_draft_tokens - num_known, num_looked_up=num_known).cut(budget)
            grants[s.state.request.id] = grant
            budget -= grant.num_tokens
            num_rows += grant.num_tokens
        elif s.samples:
            is_inside = drafter is not None and not ctx.is_beside(drafter)
            others.append((s.state, drafter if is_inside else None))
    num_sampled = sum([s.samples for s in scheduled])
    room = Room(max(0, budget), num_rows, num_sampled)
    return grants | allocate(ctx, others, room, step.now)


def reserve(ctx: Context, state: RequestState) -> int:
    """Return the draft positions that admission keeps free for a running request."""
    if state.draft.stage is DraftStage.HELD:
        return state.draft.num_draft_tokens
    drafter = ctx.table.drafter_of(state)
    if not state.is_decoding or (drafter is None and ctx.look_up is None):
        return 0
    most = state.most_draft_tokens if drafter is None else limit(state, drafter)
    return min(ctx.allocation.reserve(state), most)


def limit(state: RequestState, drafter: Drafter) -> int:
    """Return the longest draft of a drafter that could still be of use.

    It reads all of its draft but the last token."""
    most = min(state.most_draft_tokens, drafter.max_draft_tokens)
    if drafter.max_len is not None:
        most = min(most, drafter.max_len - state.num_known_tokens + 1)
    return max(0, most)


def _candidate(ctx: Context, state: RequestState, drafter: Drafter | None) -> DraftCandidate | None:
    """Return what a request could draft; None where that is nothing."""
    most = min(state.most_draft_tokens, ctx.max_draft_tokens)
    match = _match(ctx, state) if most else None
    if drafter is None:
        if match is None:
            return None
        found = ctx.learn.acceptance.matches.survival(state.request.id, match)[:most]
        return DraftCandidate(state, None, 0, survival=found, most=most)
    longest = limit(state, drafter)
    at_hand = min(len(state.at_hand(drafter.name)), longest)
    survival: list[float] = []
    if match is not None:
        survival = ctx.learn.acceptance.matches.survival(state.request.id, match)[:most]
        if drafter.remote:
            if _is_better(ctx, state, drafter, survival, longest, at_hand):
                longest = at_hand = 0
            else:
                survival = []
        elif drafter.vocab_size is not None:
            # A tenant's earlier output may have tokens that only the target has.
            vocab = drafter.vocab_size
            survival = survival[: sum(1 for _ in takewhile(lambda t: t < vocab, match.token_ids))]
    return DraftCandidate(state, drafter.name, longest, at_hand, survival, most)


def _match(ctx: Context, state: RequestState) -> Match | None:
    """Return what follows the same words as a request's text, asked once for each text."""
    known = state.num_known_tokens
    if state.matched_at != known:
        state.matched_at, state.match = known, None
        if state.request.drafter == NO_DRAFTER:
            return None
        most, found = ctx.max_draft_tokens, []
        if ctx.look_up is not None:
            found.append(ctx.look_up.match(state, most))
        if state.prediction is not None:
            found.append(state.prediction.match(most))
        matches = [m for m in found if m is not None]
        state.match = matches[0] if matches else None
        if len(matches) > 1:
            survival = ctx.learn.acceptance.matches.survival
            state.match = max(matches, key=lambda m: sum(survival(state.request.id, m)))
    return state.match


def _is_better(
    ctx: Context,
    state: RequestState,
    drafter: Drafter,
    survival: Sequence[float],
    longest: int,
    num_at_hand: int,
) -> bool:
    """Return whether look-up makes more tokens a second than a draft server would.

    A server cannot continue looked-up tokens: it would learn of them a round trip later."""
    learn, request_id = ctx.learn, state.request.id
    step = learn.times.step_seconds(StepWork(num_decodes=len(ctx.table.running)))
    expected = learn.acceptance.expected_tokens
    best = expected(request_id, drafter.name, num_at_hand) / step
    later = step + learn.links.seconds(drafter.name, longest)
    best = max(best, expected(request_id, drafter.name, longest) / later)
    return (1 + sum(survival)) / step >= best
