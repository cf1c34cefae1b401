"""Phase 5: the known and draft tokens that the target computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.core.context import Context
from penstock.core.groups import decode_run
from penstock.core.policies.base import MOST_DRAFT_TOKENS
from penstock.core.state import CHOSEN, NO_DRAFT, DraftStage, Grant
from penstock.core.step import ScheduledTokens, Step
from penstock.core.types import (
    LOOK_UP,
    PREDICTION,
    TARGET,
    DecodeRun,
    DraftOrder,
    DraftSource,
    StateCopy,
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


def copies(ctx: Context, items: tuple[VerifyItem, ...]) -> Iterator[StateCopy]:
    """Yield copies to be made of states behind prompts, for the next turns of conversations.

    A state can stop before rows that fit into a draft. It does before the last full block, as the
    next turn may have another end of this prompt: the template's for the answer."""
    pool = ctx.table.memory.pools[TARGET]
    for item in items if pool.num_snapshots is not None else ():
        state = ctx.table.requests[item.request_id]
        num_blocks = (state.num_known_tokens - 1) // pool.block_size - 1
        stop, end = num_blocks * pool.block_size, item.start + item.num_scheduled_tokens
        if not item.start < stop <= end or num_blocks > len(state.block_hashes):
            continue
        is_alone = state.request.sampling.num_prompt_logprobs is not None
        fits = not is_alone and end + item.num_draft_tokens - stop <= MOST_DRAFT_TOKENS + 1
        block_hash = state.block_hashes[num_blocks - 1]
        if fits and block_hash not in pool.snapshots:
            yield StateCopy(item.request_id, pool.snapshot(block_hash), stop, is_saved=True)


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
