"""Phase 4: order drafts.

Drafts are ordered inside the target's step or in lanes beside it. In a lane a request is due,
ordered, held or skipped (`DraftStage`); then the target verifies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from penstock.core.context import Context
from penstock.core.policies.base import ReplayProposal
from penstock.core.state import (
    NO_DRAFT,
    SKIPPED,
    Drafter,
    DrafterKind,
    DraftRound,
    DraftStage,
    Grant,
    RequestState,
)
from penstock.core.step import Step
from penstock.core.table import DueDrafts
from penstock.core.types import (
    AUTO_DRAFTER,
    TARGET,
    DraftOrder,
)
from penstock.fluid.step_profile import StepWork


class CatchUp(NamedTuple):
    """Known tokens that a drafter has yet to read.

    start: position of the first. new_blocks: blocks that are new to the executor."""

    start: int
    num_tokens: int
    new_blocks: tuple[int, ...] = ()


def of_step(ctx: Context, step: Step, grants: Mapping[str, Grant]) -> dict[str, DraftOrder]:
    """Return orders by request for the drafts that are made inside the target's step.

    Without those of drafters that read a prompt in their lanes, for which the step would wait."""
    orders: dict[str, DraftOrder] = {}
    reading = {name for _, name in ctx.table.replays}
    for scheduled in step.scheduled.values():
        state = scheduled.state
        grant = grants.get(state.request.id, NO_DRAFT)
        if state.drafter in reading:
            continue
        if grant.num_draft_tokens and state.draft.stage is not DraftStage.HELD:
            known = scheduled.start + scheduled.num_tokens
            given = order(ctx, state, known, grant, state.looked_up(grant.num_looked_up))
            if given is not None:
                orders[state.request.id] = given
    return orders


def order(
    ctx: Context, state: RequestState, num_known: int, grant: Grant, front: tuple[int, ...]
) -> DraftOrder | None:
    """Return an order to catch up to `num_known` tokens, and to draft behind the `front`.

    None where there is nothing to do or no memory: a draft is never worth a preemption."""
    drafter = ctx.table.drafter_of(state)
    length = grant.num_draft_tokens
    if drafter is None or not length:
        return None
    catch_up: CatchUp | None
    if drafter.kind is DrafterKind.HEAD:
        # The target's pass has written the KV of all tokens before the last one.
        catch_up = CatchUp(num_known - 1, 1 + len(front))
    elif drafter.pool is None:
        catch_up = CatchUp(num_known + len(front), 0)
    else:
        catch_up = _catch_up(ctx, state, drafter, num_known + len(front), length)
    if catch_up is None:
        return None
    return _order(state, drafter, catch_up, grant, front)


def _order(
    state: RequestState,
    drafter: Drafter,
    catch_up: CatchUp,
    grant: Grant = NO_DRAFT,
    front: tuple[int, ...] = (),
) -> DraftOrder:
    return DraftOrder(
        state.request.id,
        state.epoch,
        state.round,
        drafter.name,
        catch_up.start,
        catch_up.num_tokens,
        grant.num_draft_tokens,
        catch_up.new_blocks,
        grant.min_survival,
        None,
        False,
        front,
    )


def _catch_up(
    ctx: Context,
    state: RequestState,
    drafter: Drafter,
    num_known: int,
    length: int,
    evict: bool = True,
) -> CatchUp | None:
    """Return a catch-up to `num_known` tokens, with room for `length` draft tokens behind it.

    None where there is nothing to read or no memory for it."""
    pool, memory = drafter.pool, ctx.table.memory
    assert pool is not None
    is_new = drafter.name not in state.kv
    kv = memory.start_from_cache(state, drafter.name)
    num_tokens = num_known - kv.num_computed_tokens
    missing = pool.blocks_for(num_known + max(length - 1, 0)) - len(kv.blocks)
    has_room = missing <= 0 or pool.can_allocate(missing)
    if not has_room and evict:
        has_room = _make_room(ctx, drafter, missing, state)
    if num_tokens <= 0 or not has_room:
        if is_new:
            # The executor does not know this block table yet.
            memory.release(state, [drafter.name])
        return None
    new_blocks = kv.grow(pool, missing) if missing > 0 else []
    return CatchUp(kv.num_computed_tokens, num_tokens, tuple(kv.blocks if is_new else new_blocks))


def _make_room(ctx: Context, drafter: Drafter, num_blocks: int, keep: RequestState) -> bool:
    """Take a drafter's KV, which is only a cache, from requests that do not draft with it now."""
    assert drafter.pool is not None
    for state in ctx.table.requests.values():
        if state is not keep and state.drafter != drafter.name:
            ctx.table.memory.release(state, [drafter.name])
        if drafter.pool.can_allocate(num_blocks):
            return True
    return False


# --- in a lane of its own ----------------------------------------------------------------------


def sort_due(ctx: Context) -> DueDrafts:
    """Sort the requests whose drafts are due by lane, once for each version of the table."""
    table = ctx.table
    due = table.due = DueDrafts(table.counters.version, {})
    for state in ctx.divide():
        is_due = not state.in_flight and state.draft.stage is DraftStage.CHOSEN
        if is_due and state.drafter is not None:
            due.by_lane.setdefault(state.drafter, []).append(state)
    return due


def of_lane(
    ctx: Context, lane: str, grants: Mapping[str, Grant], plan_id: int, now: float
) -> tuple[DraftOrder, ...]:
    """Return orders for requests of a lane whose next draft is due, as the pipeline chooses."""
    due = ctx.table.due
    waiting, drafter = due.by_lane.get(lane, []), ctx.table.drafters[lane]
    chosen = ctx.pipeline.next_drafts(lane, waiting)
    taken = {s.request.id for s in chosen}
    due.by_lane[lane] = [s for s in waiting if s.request.id not in taken]
    orders = []
    for state in chosen:
        given = _begin(ctx, state, drafter, grants.get(state.request.id, NO_DRAFT), now)
        if given is not None:
            if not drafter.is_remote:
                state.plans[plan_id] = (lane,)
            orders.append(given)
    return tuple(orders)


def _begin(
    ctx: Context, state: RequestState, drafter: Drafter, grant: Grant, now: float
) -> DraftOrder | None:
    """Hold a draft that is at hand, sent ahead or looked up, or return an order for one."""
    at_hand = _at_hand(ctx, state, drafter.name, grant.num_draft_tokens)
    if at_hand:
        state.hold(Grant(len(at_hand)), at_hand, drafter.name)
        return None
    front = state.looked_up(grant.num_looked_up)
    given = _lane_order(ctx, state, drafter, grant, front, now)
    if given is not None:
        state.draft = DraftRound(DraftStage.ORDERED, given, now)
    elif front:
        state.hold(Grant(0, num_looked_up=len(front)), front)
    else:
        state.draft = SKIPPED
    return given


def _at_hand(ctx: Context, state: RequestState, drafter: str, granted: int) -> tuple[int, ...]:
    """Return tokens sent ahead; fewer than granted only if waiting for all would be slower."""
    tokens = state.at_hand(drafter)[:granted]
    if not tokens or len(tokens) == granted:
        return tokens
    learn = ctx.learn
    step = learn.times.step_seconds(StepWork(num_decodes=len(ctx.table.running)))
    request_id = state.request.id
    now = learn.acceptance.expected_tokens(request_id, drafter, len(tokens)) / step
    later = learn.acceptance.expected_tokens(request_id, drafter, granted)
    return tokens if now >= later / (step + learn.links.seconds(drafter, granted)) else ()


def _lane_order(
    ctx: Context,
    state: RequestState,
    drafter: Drafter,
    grant: Grant,
    front: tuple[int, ...],
    now: float,
) -> DraftOrder | None:
    given = order(ctx, state, state.num_known_tokens, grant, front)
    if given is None or not drafter.is_remote:
        return given
    if ctx.table.sent_ahead.get(state.request.id) == drafter.name:
        del ctx.table.sent_ahead[state.request.id]
    patience = ctx.learn.links.patience(drafter.name, given.max_draft_tokens)
    return given._replace(deadline=now + patience)


def prompts(ctx: Context, lane: str, plan_id: int) -> tuple[DraftOrder, ...]:
    """Return and register orders to read prompts that the target is still reading.

    Of requests that will draft with this lane's drafter: their first drafts then wait for less.
    Only where no other request's draft would wait for it."""
    drafter = ctx.table.drafters[lane]
    mine = [s for s in ctx.table.running.values() if s.drafter == lane]
    if not drafter.is_up or any(s.num_output_tokens for s in mine):
        return ()
    given = (_read(ctx, ReplayProposal(s, lane), drafter, plan_id) for s in mine)
    return tuple(order for order in given if order is not None)


# --- replays -----------------------------------------------------------------------------------


def replays(
    ctx: Context, lane: str, states: Iterable[RequestState], plan_id: int, now: float
) -> tuple[DraftOrder, ...]:
    """Return and register orders for the replays that the policy proposes in a lane.

    Drafters inside the step belong to the target's lane. Replays use only free memory, the most
    important first. A draft server gets the text of a request that may come to it, once."""
    if not ctx.selection.proposes_replays:
        return ()
    beside = ctx.beside
    drafters = {
        n: d
        for n, d in ctx.table.drafters.items()
        if lane == (n if n in beside else TARGET) and d.is_up
    }
    if not drafters:
        return ()
    free = [s for s in states if s.is_decoding and s.request.drafter == AUTO_DRAFTER]
    proposals = ctx.selection.replays(free, ctx.view(ctx.table.drafters, now)) if free else []
    orders = []
    for proposal in proposals:
        drafter = drafters.get(proposal.drafter)
        if drafter is None:
            continue
        given = _read(ctx, proposal, drafter, plan_id)
        if given is not None:
            orders.append(given)
    return tuple(orders)


def _read(
    ctx: Context, proposal: ReplayProposal, drafter: Drafter, plan_id: int
) -> DraftOrder | None:
    """Return and register an order, or None where there is nothing to read now."""
    if drafter.is_remote:
        return _send_text(ctx, proposal, drafter)
    state, given = proposal.state, _replay(ctx, proposal, drafter)
    if given is not None:
        state.plans[plan_id] = (*state.plans.get(plan_id, ()), drafter.name)
    return given


def _send_text(ctx: Context, proposal: ReplayProposal, drafter: Drafter) -> DraftOrder | None:
    """Return an order to send a text, or None where it was sent or must not be."""
    state, sent = proposal.state, ctx.table.sent_ahead
    tenant = ctx.table.tenants[state.request.tenant]
    may_see = drafter.takes_assignments and drafter.may_serve(tenant) and drafter.can_read(state)
    if proposal.evaluate or not may_see or sent.get(state.request.id) == drafter.name:
        return None
    sent[state.request.id] = drafter.name
    return _order(state, drafter, CatchUp(state.num_known_tokens, 0))


def _replay(ctx: Context, proposal: ReplayProposal, drafter: Drafter) -> DraftOrder | None:
    """Return an order, or None where nothing can be read or the drafter works on the request."""
    state, name = proposal.state, drafter.name
    is_busy = any(name in pools for pools in state.plans.values())
    if is_busy or not (drafter.can_replay and drafter.can_read(state)):
        return None
    num_known = state.num_known_tokens
    if drafter.pool is None:
        catch_up = CatchUp(num_known, 0) if proposal.evaluate else None
    else:
        catch_up = _catch_up(ctx, state, drafter, num_known, 0, evict=False)
    if catch_up is None:
        return None
    given = _order(state, drafter, catch_up)._replace(evaluate=proposal.evaluate)
    ctx.table.replays[state.request.id, name] = (given, state.kv.get(name))
    return given
