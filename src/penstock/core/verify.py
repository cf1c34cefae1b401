"""Phase 5: the known and draft tokens that the target computes."""

from __future__ import annotations

from penstock.core import draft
from penstock.core.allocate import grants_of_step
from penstock.core.context import Context
from penstock.core.groups import decode_run
from penstock.core.kv import BlockPool
from penstock.core.state import CHOSEN, DraftStage, Grant
from penstock.core.step import ScheduledTokens, Step
from penstock.core.types import (
    PREDICTION,
    TARGET,
    DecodeRun,
    DraftOrder,
    DraftSource,
    VerifyItem,
)

_NOTHING = Grant(0)


def items(ctx: Context, step: Step, plan_id: int) -> tuple[VerifyItem, ...]:
    """Return an item for every scheduled request, with its draft and KV blocks."""
    scheduled = list(step.scheduled.values())
    grants = {}
    if ctx.table.drafters or any(s.state.draft.stage is DraftStage.HELD for s in scheduled):
        grants = grants_of_step(ctx, step, scheduled)
    written = [(s, _item(ctx, s, grants.get(s.state.request.id, _NOTHING))) for s in scheduled]
    for s, item in written:
        s.state.in_flight = True
        order = item.draft
        s.state.plans[plan_id] = (TARGET,) if order is None else (TARGET, order.drafter)
    return tuple([item for _, item in written])


def decodes(ctx: Context, step: Step, plan_id: int) -> DecodeRun:
    """Return the step of decode groups, repeated as long as nothing else happens."""
    repeatable = not step.scheduled and _is_steady(ctx, step)
    return decode_run(step.decoding, step.pool, plan_id, repeatable, step.wake_at)


def _item(ctx: Context, scheduled: ScheduledTokens, grant: Grant) -> VerifyItem:
    length = 0
    state = scheduled.state
    source, order, drafter = DraftSource.NONE, None, None
    is_held = state.draft.stage is DraftStage.HELD
    if is_held and scheduled.samples:
        length = _grow_for_draft(ctx, scheduled, grant.num_draft_tokens)
        if length:
            is_ahead = bool(state.draft.ahead_token_ids)
            source = DraftSource.AHEAD if is_ahead else DraftSource.HELD
            drafter = state.draft.drafter
    elif state.drafter:
        order = _order_inside(ctx, scheduled, grant)
        length = order.max_draft_tokens if order is not None else 0
        if length:
            source, drafter = DraftSource.INLINE, state.drafter
    ahead = state.draft.ahead_token_ids[:length] if is_held else ()
    if drafter not in (None, PREDICTION):
        ctx.table.counters.ahead_used += len(ahead)
    if is_held:
        state.draft = CHOSEN
    return VerifyItem(
        state.request.id,
        state.epoch,
        state.round,
        scheduled.start,
        scheduled.num_tokens,
        scheduled.samples,
        source,
        drafter,
        length,
        order,
        tuple(scheduled.new_blocks),
        ahead,
    )


def _order_inside(ctx: Context, scheduled: ScheduledTokens, grant: Grant) -> DraftOrder | None:
    """Return an order for a draft inside the step.

    The drafter reads the prompt only then: many requests never draft with it."""
    state = scheduled.state
    drafter = ctx.table.drafter_of(state)
    if drafter is None or ctx.is_beside(drafter) or not grant.num_draft_tokens:
        return None
    length = _grow_for_draft(ctx, scheduled, grant.num_draft_tokens)
    known = scheduled.start + scheduled.num_tokens
    return draft.order(ctx, state, known, grant._replace(num_draft_tokens=length))


def _grow_for_draft(ctx: Context, scheduled: ScheduledTokens, length: int) -> int:
    """Return the length of a draft that fits the target's free blocks, and take them."""
    pool = ctx.table.memory.pools[TARGET]
    num_blocks = scheduled.state.kv_of(TARGET).num_blocks
    end = scheduled.start + scheduled.num_tokens
    if end + length <= num_blocks * pool.block_size:
        return length
    length = min(length, (num_blocks + pool.num_free_blocks) * pool.block_size - end)
    _grow(pool, scheduled, end + length)
    return length


def _grow(pool: BlockPool, scheduled: ScheduledTokens, num_tokens: int) -> None:
    kv = scheduled.state.kv_of(TARGET)
    scheduled.new_blocks += kv.grow(pool, pool.blocks_for(num_tokens) - kv.num_blocks)


def _is_steady(ctx: Context, step: Step) -> bool:
    """Return True if the next step would be composed alike unless a request comes or ends."""
    if ctx.fairness is not None and not ctx.fairness.is_steady(step):
        return False
    return ctx.admission.is_steady(step)
