"""Phase 3: allocate drafts: tokens that look-up finds, then a drafter's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile

from penstock.core.context import Context
from penstock.core.policies.base import DraftCandidate, Room
from penstock.core.state import NO_DRAFT, Drafter, DraftStage, Grant, RequestState
from penstock.core.step import ScheduledTokens, Step
from penstock.core.types import NO_DRAFTER, TARGET, Match
from penstock.fluid.step_profile import StepWork


def of_step(ctx: Context, step: Step) -> dict[str, Grant]:
    """Return drafts by request, for which the target has memory.

    Held ones within the step's budget, then new ones, of drafters inside the step and look-up."""
    scheduled = list(step.scheduled.values())
    if not (ctx.may_draft or any([_is_drafted(s.state) for s in scheduled])):
        return {}
    num_rows = step.num_tokens
    budget = ctx.admission.draft_budget(num_rows)
    beside = ctx.beside
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
            is_inside = drafter is not None and drafter.name not in beside
            others.append((s.state, drafter if is_inside else None))
    num_sampled = sum([s.samples for s in scheduled])
    room = Room(max(0, budget), num_rows, num_sampled)
    grants |= _granted(ctx, others, room, step.now)
    for s in scheduled:
        grant = grants.get(s.state.request.id, NO_DRAFT)
        num_tokens = grant.num_tokens
        if num_tokens and (length := _grow(ctx, s, num_tokens)) < num_tokens:
            grants[s.state.request.id] = grant.cut(length)
    return grants


def of_lanes(ctx: Context, now: float) -> dict[str, Grant]:
    """Return drafts by request of the drafters beside the target, once for each version.

    All that speculate share the positions that may join them in a step."""
    due = ctx.table.due
    if due.grants is None:
        states = ctx.divide()
        num = len(states)
        room = Room(ctx.admission.draft_budget(num), num, num)
        proposers = [(s, ctx.table.drafter_of(s)) for s in states]
        due.grants = _granted(ctx, proposers, room, now)
    return due.grants


def _is_drafted(state: RequestState) -> bool:
    """Return whether a request has a draft, or may have one, without drafters and look-up."""
    return state.draft.stage is DraftStage.HELD or state.prediction is not None


def _granted(
    ctx: Context, proposers: Iterable[tuple[RequestState, Drafter | None]], room: Room, now: float
) -> dict[str, Grant]:
    """Ask the policy for all requests that may draft.

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


def _grow(ctx: Context, scheduled: ScheduledTokens, length: int) -> int:
    """Return the length of a draft that fits the target's free blocks, and take them."""
    pool, kv = ctx.table.memory.pools[TARGET], scheduled.state.kv_of(TARGET)
    end = scheduled.start + scheduled.num_tokens
    if end + length <= kv.num_blocks * pool.block_size:
        return length
    length = min(length, (kv.num_blocks + pool.num_free_blocks) * pool.block_size - end)
    scheduled.new_blocks += kv.grow(pool, pool.blocks_for(end + length) - kv.num_blocks)
    return length


def _candidate(ctx: Context, state: RequestState, drafter: Drafter | None) -> DraftCandidate | None:
    """Return what a request could draft; None where that is nothing."""
    most = min(state.most_draft_tokens, ctx.max_draft_tokens)
    match = _match(ctx, state) if most else None
    if drafter is None:
        if match is None:
            return None
        found = ctx.learn.acceptance.matches.survival(state.request.id, match)[:most]
        return DraftCandidate(state, None, 0, survival=found, most=most) if found else None
    longest = drafter.longest_draft(state)
    at_hand = min(len(state.at_hand(drafter.name)), longest) if state.ahead else 0
    survival: list[float] = []
    if match is not None:
        survival = ctx.learn.acceptance.matches.survival(state.request.id, match)[:most]
        if drafter.is_remote:
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
    if ctx.look_up is None and state.prediction is None:
        return None
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
        state.match = matches[-1] if matches else None
        # What both say counts for the prediction, which its client asks about.
        if len({m.token_ids[0] for m in matches}) > 1:
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
