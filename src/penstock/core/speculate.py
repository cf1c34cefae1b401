"""Phases 2 and 3: which drafter a request has for the round, and how many tokens it may draft."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.core.context import Context
from penstock.core.policies.allocation import Grant
from penstock.core.state import CHOSEN, Drafter, DraftStage, RequestState
from penstock.core.step import ScheduledTokens, Step
from penstock.core.types import AUTO_DRAFTER, NO_DRAFTER
from penstock.core.view import DraftCandidate, Room, View


def select(ctx: Context, states: Iterable[RequestState], now: float) -> None:
    """The drafter that a request names, or the policy's choice, once a round: lanes that asked
    again could each be told of another."""
    if not ctx.table.drafters:
        return
    free = []
    for state in states:
        if state.draft.stage is not DraftStage.OPEN:
            continue
        ctx.trials.before_choice(state)
        state.draft = CHOSEN
        wanted = state.request.drafter
        if wanted == NO_DRAFTER or state.request.max_draft_tokens == 0:
            state.drafter = None
        elif wanted != AUTO_DRAFTER:
            state.drafter = wanted if _is_open(ctx, wanted, state) else None
        else:
            free.append(state)
    if free:
        _choose(ctx, free, now)


def _choose(ctx: Context, states: list[RequestState], now: float) -> None:
    """Ask the policy, once for all requests to which the same drafters are open."""
    drafters = ctx.table.drafters
    limited = [d for d in drafters.values() if d.is_limited]
    is_restricted = any(t.drafters is not None for t in ctx.table.tenants.values())
    if not (limited or is_restricted or any(d.remote for d in drafters.values())):
        _ask(ctx, states, ctx.view(drafters, now))
        return
    alike: dict[tuple[str, tuple[str, ...]], list[RequestState]] = {}
    for state in states:
        closed = tuple([d.name for d in limited if not d.can_read(state)])
        alike.setdefault((state.request.tenant, closed), []).append(state)
    for (name, closed), own in alike.items():
        tenant = ctx.table.tenants[name]
        open_to = {
            n: d
            for n, d in drafters.items()
            if d.takes_assignments and d.may_serve(tenant) and n not in closed
        }
        _ask(ctx, own, ctx.view(open_to, now))


def _ask(ctx: Context, states: list[RequestState], view: View) -> None:
    chosen = ctx.selection.select(states, view)
    for state in states:
        state.drafter = chosen[state.request.id]
    if ctx.selection.weighs_time:
        ctx.trials.after_choice(states, view)


def _is_open(ctx: Context, drafter: str, state: RequestState) -> bool:
    """A request cannot take its prompt where its tenant's may not go, even by name; nor to where
    it cannot be read; nor use what its tenant may not."""
    known = ctx.table.drafters.get(drafter)
    if known is None or not known.may_serve(ctx.table.tenants[state.request.tenant]):
        return False
    return known.can_read(state)


def allocate(
    ctx: Context, states: Iterable[RequestState], room: Room, now: float
) -> dict[str, Grant]:
    """Grants by request id; a request that may not draft is left out."""
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
    if ctx.allocation.weighs_time:
        grants = ctx.trials.grant(candidates, grants, view)
    return {c.state.request.id: g for c, g in zip(candidates, grants, strict=True)}


def grants_of_step(
    ctx: Context, step: Step, scheduled: Sequence[ScheduledTokens]
) -> dict[str, Grant]:
    """Draft lengths by request: drafts that are held, as far as the step's budget goes, then what
    drafts inside this step."""
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
    """Draft positions that admission keeps free for a running request."""
    if state.draft.stage is DraftStage.HELD:
        return state.draft.num_draft_tokens
    drafter = ctx.table.drafter_of(state)
    if drafter is None or not state.is_decoding:
        return 0
    return min(ctx.allocation.reserve(state), limit(state, drafter))


def limit(state: RequestState, drafter: Drafter) -> int:
    """Most draft tokens that could still be of use: the target adds one token itself. The drafter
    reads all of its draft but the last token. All that is left may be on its way already."""
    most = min(state.num_remaining_tokens - 1, drafter.max_draft_tokens)
    if drafter.max_len is not None:
        most = min(most, drafter.max_len - state.num_known_tokens + 1)
    if state.request.max_draft_tokens is not None:
        most = min(most, state.request.max_draft_tokens)
    return max(0, most)
