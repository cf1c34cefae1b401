"""Phase 2: choose a drafter for every request whose round begins."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.core.context import Context
from penstock.core.policies.base import View
from penstock.core.state import (
    CHOSEN,
    DraftStage,
    RequestState,
)
from penstock.core.types import (
    AUTO_DRAFTER,
    NO_DRAFTER,
)


def select(ctx: Context, states: Iterable[RequestState], now: float) -> None:
    """Give each request whose round begins the drafter it names, or the policy's choice."""
    if not ctx.table.drafters:
        return
    look_up = None if ctx.look_up is None else ctx.look_up.name
    free = []
    for state in states:
        if state.draft.stage is not DraftStage.OPEN:
            continue
        if ctx.trials is not None:
            ctx.trials.before_choice(state)
        state.draft = CHOSEN
        wanted = state.request.drafter
        if wanted in (NO_DRAFTER, look_up) or state.request.max_draft_tokens == 0:
            state.drafter = None
        elif wanted != AUTO_DRAFTER:
            state.drafter = wanted if _is_open(ctx, wanted, state) else None
        else:
            free.append(state)
    if free:
        _choose(ctx, free, now)


def _choose(ctx: Context, states: list[RequestState], now: float) -> None:
    """Ask the policy once for all requests with the same permitted drafters."""
    drafters = ctx.table.drafters
    is_restricted = any([t.drafters is not None for t in ctx.table.tenants.values()])
    if not (is_restricted or any([d.is_remote or d.is_limited for d in drafters.values()])):
        _ask(ctx, states, ctx.view(drafters, now))
        return
    limited = [d for d in drafters.values() if d.is_limited]
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
    if ctx.trials is not None and ctx.selection.weighs_time:
        ctx.trials.after_choice(states, view)


def _is_open(ctx: Context, drafter: str, state: RequestState) -> bool:
    """Return True if the drafter may see the prompt, serve the tenant, and read the text."""
    known = ctx.table.drafters.get(drafter)
    if known is None or not known.may_serve(ctx.table.tenants[state.request.tenant]):
        return False
    return known.can_read(state)
