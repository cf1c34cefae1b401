"""Phase 5: the known and draft tokens that the target computes."""

from __future__ import annotations

from penstock.core import draft
from penstock.core.allocate import grants_of_step
from penstock.core.context import Context
from penstock.core.groups import decode_run
from penstock.core.kv import BlockPool
from penstock.core.state import CHOSEN, NO_DRAFT, DraftStage, Grant, RequestState
from penstock.core.step import ScheduledTokens, Step
from penstock.core.types import (
    LOOK_UP,
    PREDICTION,
    TARGET,
    DecodeRun,
    DraftSource,
    VerifyItem,
)


def items(ctx: Context, step: Step, plan_id: int) -> tuple[VerifyItem, ...]:
    """Return an item for every scheduled request, with its draft and KV blocks."""
    scheduled = list(step.scheduled.values())
    grants = {}
    if ctx.may_draft or any([_is_drafted(s.state) for s in scheduled]):
        grants = grants_of_step(ctx, step, scheduled)
    written = [(s, _item(ctx, s, grants.get(s.state.request.id, NO_DRAFT))) for s in scheduled]
    for s, item in written:
        s.state.in_flight = True
        order = item.draft
        s.state.plans[plan_id] = (TARGET,) if order is None else (TARGET, order.drafter)
    return tuple([item for _, item in written])


def _is_drafted(state: RequestState) -> bool:
    """Return whether a request has a draft, or may have one, without drafters and look-up."""
    return state.draft.stage is DraftStage.HELD or state.prediction is not None


def decodes(ctx: Context, step: Step, plan_id: int) -> DecodeRun:
    """Return the step of decode groups, repeated as long as nothing else happens."""
    repeatable = not step.scheduled and _is_steady(ctx, step)
    return decode_run(step.decoding, step.pool, plan_id, repeatable, step.wake_at)


def _item(ctx: Context, scheduled: ScheduledTokens, grant: Grant) -> VerifyItem:
    state, held = scheduled.state, scheduled.state.draft
    is_held = held.stage is DraftStage.HELD
    grant = grant.cut(_grow_for_draft(ctx, scheduled, grant.num_tokens))
    source, order, drafter = DraftSource.NONE, None, state.drafter
    known: tuple[int, ...] = ()
    if is_held:
        known, drafter = held.token_ids[: grant.num_tokens], held.drafter
        source = DraftSource.HELD if grant.num_tokens > len(known) else DraftSource.KNOWN
        if not held.num_looked_up and drafter is not None:
            ctx.table.counters.ahead_used += len(known)
        state.draft = CHOSEN
    elif grant.num_tokens:
        known = state.looked_up(grant.num_looked_up)
        num_known = scheduled.start + scheduled.num_tokens
        order = draft.order(ctx, state, num_known, grant, known)
        if order is None:
            grant = Grant(0, num_looked_up=len(known))
        source = DraftSource.KNOWN if order is None else DraftSource.INLINE
    is_looked_up = grant.num_looked_up == grant.num_tokens > 0
    if is_looked_up:
        assert state.match is not None
        drafter = PREDICTION if state.match.source == PREDICTION else LOOK_UP
    return VerifyItem(
        request_id=state.request.id,
        epoch=state.epoch,
        round=state.round,
        start=scheduled.start,
        num_scheduled_tokens=scheduled.num_tokens,
        samples=scheduled.samples,
        source=source if grant.num_tokens else DraftSource.NONE,
        drafter=drafter if grant.num_tokens else None,
        num_draft_tokens=grant.num_tokens,
        draft=order,
        new_blocks=tuple(scheduled.new_blocks),
        token_ids=known,
        num_looked_up=grant.num_looked_up,
    )


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
