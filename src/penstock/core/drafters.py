"""Drafters that come, go and are late."""

from __future__ import annotations

from penstock.core.context import Context
from penstock.core.state import SKIPPED, Drafter, DrafterKind, DrafterStatus, DraftStage
from penstock.core.types import DrafterUp


def up(ctx: Context, event: DrafterUp) -> None:
    """Take in that a known drafter is back, or that a draft server has connected."""
    drafters = ctx.table.drafters
    ctx.table.beside.clear()
    drafter = drafters.setdefault(event.drafter, Drafter(event.drafter, kind=DrafterKind.SERVER))
    if drafter.is_remote:
        drafter.max_draft_tokens, drafter.tenant = event.max_draft_tokens, event.tenant
        drafter.takes_assignments = event.takes_assignments
        drafter.max_num_seqs = event.max_num_seqs or drafter.max_num_seqs
    drafter.status = DrafterStatus.UP
    if event.round_trip_s is not None:
        ctx.learn.links.add_round_trip(event.drafter, event.round_trip_s)


def down(ctx: Context, name: str) -> None:
    """Drop the KV and drafts of a lost drafter; its requests finish their round without a draft."""
    table = ctx.table
    drafter = table.drafters.get(name)
    if drafter is None:
        return
    drafter.status = DrafterStatus.DOWN
    for state in table.requests.values():
        if state.drafter == name and state.draft.stage in (DraftStage.ORDERED, DraftStage.HELD):
            state.draft = SKIPPED
        if state.ahead is not None and state.ahead.drafter == name:
            state.ahead = None
        table.memory.release(state, [name])
    table.memory.drop_cache(name)
    table.sent_ahead = {i: n for i, n in table.sent_ahead.items() if n != name}
    if drafter.kind is DrafterKind.SERVER:
        del table.drafters[name]
        table.beside.clear()
        ctx.learn.links.drop_drafter(name)


def expire(ctx: Context, now: float) -> None:
    """Give up overdue drafts.

    A draft server that misses a deadline gets no more orders until it is heard from, so that it
    delays the others once and not in every round."""
    table = ctx.table
    ordered = [(s, s.draft.order) for s in table.running.values() if s.draft.order is not None]
    for state, given in ordered:
        if given.deadline is not None and given.deadline <= now:
            table.drafters[given.drafter].status = DrafterStatus.SILENT
            # It takes as long at least: a patience too short would else never be measured.
            elapsed = now - state.draft.ordered_at
            ctx.learn.links.add_transfer(given.drafter, given.max_draft_tokens, elapsed)
    for state, given in ordered:
        if table.drafters[given.drafter].status is DrafterStatus.SILENT:
            state.draft = SKIPPED
