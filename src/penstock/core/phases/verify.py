"""Phase 5: the known and draft tokens that the target computes."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.core.context import Context
from penstock.core.groups import decode_run
from penstock.core.state import CHOSEN, NO_DRAFT, DraftStage, Grant
from penstock.core.step import ScheduledTokens, Step
from penstock.core.types import (
    LOOK_UP,
    PREDICTION,
    TARGET,
    DecodeRun,
    DraftOrder,
    DraftSource,
    VerifyItem,
)


def items(
    ctx: Context,
    step: Step,
    grants: Mapping[str, Grant],
    orders: Mapping[str, DraftOrder],
    plan_id: int,
) -> tuple[VerifyItem, ...]:
    """Return an item for every scheduled request, with its draft and KV blocks.

    orders: of drafts that are made inside the step."""
    found = []
    for scheduled in step.scheduled.values():
        state, request_id = scheduled.state, scheduled.state.request.id
        given = orders.get(request_id)
        found.append(_item(ctx, scheduled, grants.get(request_id, NO_DRAFT), given))
        state.in_flight = True
        state.plans[plan_id] = (TARGET,) if given is None else (TARGET, given.drafter)
    return tuple(found)


def decodes(ctx: Context, step: Step, plan_id: int) -> DecodeRun:
    """Return the step of decode groups, repeated as long as nothing else happens."""
    repeatable = not step.scheduled and _is_steady(ctx, step)
    return decode_run(step.decoding, step.pool, plan_id, repeatable, step.wake_at)


def _item(
    ctx: Context, scheduled: ScheduledTokens, grant: Grant, order: DraftOrder | None
) -> VerifyItem:
    state, held, num_tokens = scheduled.state, scheduled.state.draft, grant.num_tokens
    if not num_tokens and held.stage is not DraftStage.HELD:
        # Most items of a large batch: by position, which takes half as long as by keyword.
        return VerifyItem(
            state.request.id,
            state.epoch,
            state.round,
            scheduled.start,
            scheduled.num_tokens,
            scheduled.samples,
            DraftSource.NONE,
            None,
            0,
            None,
            tuple(scheduled.new_blocks),
        )
    source, drafter = DraftSource.NONE, state.drafter
    known: tuple[int, ...] = ()
    if held.stage is DraftStage.HELD:
        known, drafter = held.token_ids[:num_tokens], held.drafter
        source = DraftSource.HELD if num_tokens > len(known) else DraftSource.KNOWN
        if not held.num_looked_up and drafter is not None:
            ctx.table.counters.ahead_used += len(known)
        state.draft = CHOSEN
    elif num_tokens:
        known = state.looked_up(grant.num_looked_up)
        source = DraftSource.INLINE
        if order is None:
            grant, source = Grant(0, num_looked_up=len(known)), DraftSource.KNOWN
            num_tokens = len(known)
    if grant.num_looked_up == num_tokens > 0:
        assert state.match is not None
        drafter = PREDICTION if state.match.source == PREDICTION else LOOK_UP
    return VerifyItem(
        request_id=state.request.id,
        epoch=state.epoch,
        round=state.round,
        start=scheduled.start,
        num_scheduled_tokens=scheduled.num_tokens,
        samples=scheduled.samples,
        source=source if num_tokens else DraftSource.NONE,
        drafter=drafter if num_tokens else None,
        num_draft_tokens=num_tokens,
        draft=order,
        new_blocks=tuple(scheduled.new_blocks),
        token_ids=known,
        num_looked_up=grant.num_looked_up,
    )


def _is_steady(ctx: Context, step: Step) -> bool:
    """Return True if the next step would be composed alike unless a request comes or ends."""
    if ctx.fairness is not None and not ctx.fairness.is_steady(step):
        return False
    return ctx.admission.is_steady(step)
