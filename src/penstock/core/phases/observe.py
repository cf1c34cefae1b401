"""Phase 6: take in the result of a plan: advance or roll back, free blocks, learn."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.core.ahead import LinesAhead
from penstock.core.context import Context
from penstock.core.groups import DecodeGroup, num_later_blocks
from penstock.core.state import SKIPPED, Grant, Outcome, RequestState
from penstock.core.types import (
    LOOK_UP,
    PREDICTION,
    TARGET,
    DecodeRun,
    DraftAhead,
    DraftOrder,
    DraftReady,
    FinishReason,
    Output,
    StepPlan,
    StepResult,
    Verdict,
    VerifyItem,
)


def observe(ctx: Context, plan: StepPlan, result: StepResult) -> list[Output]:
    """Take in the result of a plan in flight and return the outputs."""
    table = ctx.table
    parts: tuple[DraftOrder | VerifyItem, ...] = (*plan.drafts, *plan.items)
    for part in parts:
        state = table.requests.get(part.request_id)
        if state is not None:
            state.plans.pop(plan.id, None)
    table.memory.plan_ended(plan.id)
    times = ctx.learn.times
    if ctx.may_draft:
        times.on_result(result, may_wait=ctx.uses_lanes)
        times.observe_drafting(result)
        if ctx.trials is not None:
            ctx.trials.on_result(result)
    else:
        times.on_result(result, may_wait=False)
    if result.failed_drafters:
        _lose_kv(ctx, plan, result.failed_drafters)
    if plan.drafts or result.drafts:
        _end_orders(ctx, plan, result)
    outputs: list[Output] = []
    if plan.items:
        outputs, outcomes = _judge(ctx, plan, result)
        ctx.allocation.on_step(outcomes, result.finished_at)
        if table.drafters:
            view = ctx.view(table.drafters, result.finished_at)
            ctx.selection.on_step(outcomes, view)
            ctx.pipeline.stepped(table.running.values(), view, result)
    if plan.decodes is not None:
        outputs += _advance_groups(ctx, plan.decodes, result)
    return outputs


# --- verdicts -----------------------------------------------------------------------------------


def _judge(ctx: Context, plan: StepPlan, result: StepResult) -> tuple[list[Output], list[Outcome]]:
    """Advance requests by their verdicts; return outputs, and what policies learn from."""
    verdicts = {v.request_id: v for v in result.verdicts}
    failures = {f.request_id: f.reason for f in result.failures} if result.failures else {}
    outputs, outcomes = [], []
    for item in plan.items:
        state = ctx.table.requests.get(item.request_id)
        if state is None or state.epoch != item.epoch:
            continue
        state.in_flight = False
        verdict = verdicts.get(item.request_id)
        if verdict is None or item.request_id in failures:
            reason = failures.get(item.request_id, "the executor gave no answer")
            if plan.copies:
                ctx.table.memory.drop_cache(TARGET)
            outputs.append(finish(ctx, state, FinishReason.ERROR, reason))
        else:
            is_read = item.request_id not in result.unread
            output = _advance(ctx, state, item, verdict, result.finished_at, is_read)
            if output is not None:
                outputs.append(output)
                # What had to come tells nothing.
                if item.samples and (item.drafter is not None or not item.token_ids):
                    outcomes.append(Outcome(state, verdict))
    return outputs, outcomes


def _advance(
    ctx: Context, state: RequestState, item: VerifyItem, verdict: Verdict, now: float, is_read: bool
) -> Output | None:
    """Advance a request by its verdict.

    is_read: the drafter of this step's draft has read the text."""
    known = item.start + item.num_scheduled_tokens
    if item.draft is not None and is_read:
        _drafted(state, item.draft, verdict.num_proposed - item.num_looked_up)
    if len(state.kv) > 1:
        # Roll back: positions of rejected drafts are written over in the next round.
        verified = state.num_known_tokens + verdict.num_accepted
        for kv in state.kv.values():
            if kv.num_computed_tokens > verified:
                kv.num_computed_tokens = verified
    target = state.kv[TARGET]
    target.num_computed_tokens = known + verdict.num_accepted
    memory, accounts = ctx.table.memory, ctx.table.accounts
    if not item.samples:
        memory.commit(state)
        is_whole = state.request.pooling is not None and known >= state.num_known_tokens
        return _embedded(ctx, state, verdict) if is_whole else None
    first = not state.num_output_tokens
    is_decode = item.num_scheduled_tokens == 1 and not first
    if is_decode and accounts.are_kept:
        accounts.charge_decode(state, known, verdict.num_proposed)
    state.next_round()
    ctx.learn.acceptance.on_verdict(verdict)
    is_asked = item.num_draft_tokens > item.num_looked_up
    if item.drafter is not None and is_asked and verdict.num_drafted <= item.num_looked_up:
        ctx.learn.acceptance.observe_empty(state.request.id, item.drafter)
    if first:
        state.first_token_at = now
    if is_decode:
        ctx.learn.lengths.stepped(len(verdict.token_ids))
    num_new = _append(ctx, state, verdict)
    reason = verdict.finish_reason
    if reason is None and state.num_remaining_tokens <= 0:
        reason = FinishReason.LENGTH
    if reason is not None:
        ctx.learn.lengths.ended(state.num_output_tokens)
        _forget(ctx, state)
    # By position: keywords would add 9% to the time of planning and observing a step.
    return Output(
        state.request.id,
        verdict.token_ids,
        num_new,
        reason,
        None,
        verdict.drafter,
        verdict.num_proposed,
        verdict.num_accepted,
        target.num_cached_tokens if first else 0,
        verdict.logprobs,
        verdict.prompt_logprobs,
        state.admitted_at - state.request.arrival_time if first else 0.0,
        state.num_preemptions if reason is not None else 0,
        verdict.num_stop_chars,
        verdict.num_looked_up,
        _looked_up_in(state) if verdict.num_looked_up else None,
    )


def _embedded(ctx: Context, state: RequestState, verdict: Verdict) -> Output:
    """End a request whose prompt is computed, with its embedding."""
    if not verdict.embedding:
        return finish(ctx, state, FinishReason.ERROR, "the executor gives no embeddings")
    num_cached_tokens = state.kv[TARGET].num_cached_tokens
    _forget(ctx, state)
    return Output(
        state.request.id,
        finish_reason=FinishReason.STOP,
        num_cached_tokens=num_cached_tokens,
        queued_s=state.admitted_at - state.request.arrival_time,
        num_preemptions=state.num_preemptions,
        embedding=verdict.embedding,
    )


def _looked_up_in(state: RequestState) -> str:
    """Return the name of what the last match was found in."""
    is_predicted = state.match is not None and state.match.source == PREDICTION
    return PREDICTION if is_predicted else LOOK_UP


def _append(ctx: Context, state: RequestState, verdict: Verdict) -> int:
    """Append a verdict's tokens and hold what comes next, if known; return the number to report."""
    if state.match is not None and state.matched_at == state.num_known_tokens:
        ctx.learn.acceptance.matches.learn(state.request.id, state.match, verdict.token_ids)
    state.append(verdict.token_ids)
    if state.is_counted:
        return state.announce()
    ctx.table.memory.commit(state)
    if verdict.forced_token_ids:
        forced = verdict.forced_token_ids[: state.most_draft_tokens]
        if forced:
            state.hold(Grant(len(forced)), forced)
    return len(verdict.token_ids)


def _advance_groups(ctx: Context, run: DecodeRun, result: StepResult) -> list[Output]:
    """Give the members of groups their tokens."""
    table = ctx.table
    groups = [table.groups[key] for key in run.groups]
    if result.repeats > 1:
        table.memory.pools[TARGET].count(num_later_blocks(groups, result.repeats))
    return [output for group in groups for output in _advance_group(ctx, group, result)]


def _advance_group(ctx: Context, group: DecodeGroup, result: StepResult) -> list[Output]:
    """Return an output of each member; where only lengths are known, of those that have ended."""
    outputs, tokens = [], result.decoded
    assert group.is_counted or tokens is not None
    if tokens is not None:
        outputs = group.append(tokens)
        for state in group.filled():
            ctx.table.memory.commit(state)
    group.plan_id = None
    ended = [s for s in _left(ctx, group.advance(result.repeats)) if s.num_remaining_tokens <= 0]
    if tokens is None:
        for state in ended:
            ctx.learn.lengths.ended(state.num_output_tokens)
        return [finish(ctx, state, FinishReason.LENGTH) for state in ended]
    ends = {s.request.id: FinishReason.LENGTH for s in ended}
    ends.update(dict.fromkeys(tokens.stopped, FinishReason.STOP))
    if not (ends or tokens.failures):
        return outputs
    failed = tokens.failures.get
    return [_ended(ctx, o, ends.get(o.request_id), failed(o.request_id)) for o in outputs]


def _ended(
    ctx: Context, output: Output, reason: FinishReason | None, failure: str | None
) -> Output:
    """Return a member's output, after its end if there is a reason."""
    if reason is None and failure is None:
        return output
    state = ctx.table.requests[output.request_id]
    if failure is not None:
        return finish(ctx, state, FinishReason.ERROR, failure)
    ctx.table.leave_group(state)
    ctx.learn.lengths.ended(state.num_output_tokens)
    _forget(ctx, state)
    return output._replace(finish_reason=reason, num_preemptions=state.num_preemptions)


def _left(ctx: Context, states: list[RequestState]) -> list[RequestState]:
    """Put members that have left their group among the others; return them as they came."""
    if len(states) > 1:
        # In the order of admission, as they would end one by one.
        ids = {state.request.id: state for state in states}
        states = [ids[i] for i in ctx.table.running if i in ids]
    for state in states:
        ctx.table.solo[state.request.id] = state
    return states


# --- ends ---------------------------------------------------------------------------------------


def finish(
    ctx: Context, state: RequestState, reason: FinishReason, error: str | None = None
) -> Output:
    """End a request without new tokens, except those not yet announced."""
    ctx.table.leave_group(state)
    num_tokens = state.announce() if state.is_counted else 0
    _forget(ctx, state)
    ended = state.request.id
    return Output(ended, num_tokens=num_tokens, finish_reason=reason, error=error)


def _forget(ctx: Context, state: RequestState) -> None:
    ctx.table.release_request(state)
    if ctx.look_up is not None:
        ctx.look_up.release_request(state)
    if ctx.trials is not None:
        ctx.trials.release_request(state)
    ctx.learn.acceptance.release_request(state.request.id)
    ctx.selection.release_request(state.request.id)
    ctx.allocation.release_request(state.request.id)


# --- drafts -------------------------------------------------------------------------------------


def draft_ready(ctx: Context, event: DraftReady, now: float, *, is_read: bool = True) -> None:
    """Hold a draft, once: a late, repeated or superseded one only shows that its drafter lives.

    is_read: the drafter has read the text."""
    drafter = ctx.table.drafters.get(event.drafter)
    if drafter is not None:
        drafter.answered()
        if drafter.is_remote:
            ctx.learn.times.draft_ended(now)
    state = ctx.table.requests.get(event.request_id)
    if state is None or (event.epoch, event.round) != (state.epoch, state.round):
        return
    order, ordered_at = state.draft.order, state.draft.ordered_at
    if order is None or order.drafter != event.drafter:
        return
    if event.is_reading:
        state.draft = SKIPPED
        return
    num_draft_tokens = max(0, min(event.num_draft_tokens, order.max_draft_tokens))
    took_s = max(0.0, now - ordered_at - event.waited_s)
    ctx.learn.links.add_transfer(event.drafter, num_draft_tokens, took_s)
    if drafter is not None and drafter.is_remote and ctx.trials is not None:
        ctx.trials.measured(event.drafter)
    if is_read:
        _drafted(state, order, num_draft_tokens)
    if not num_draft_tokens:
        ctx.learn.acceptance.observe_empty(state.request.id, event.drafter)
    front = order.front_token_ids
    if num_draft_tokens or front:
        state.hold(Grant(num_draft_tokens, num_looked_up=len(front)), front, event.drafter)
    else:
        state.draft = SKIPPED


def draft_ahead(ctx: Context, event: DraftAhead) -> None:
    """Keep a draft that was sent without an order; it shows that its server lives."""
    drafter = ctx.table.drafters.get(event.drafter)
    state = ctx.table.requests.get(event.request_id)
    if drafter is None or state is None or state.drafter not in (None, event.drafter):
        return
    drafter.answered()
    if state.ahead is None or state.ahead.drafter != event.drafter:
        state.ahead = LinesAhead(event.drafter)
    ctx.table.counters.ahead += state.ahead.add_pieces(event.pieces, state.text)


def _drafted(state: RequestState, order: DraftOrder, num_proposed: int) -> None:
    """Note the drafter's KV after an order was carried out."""
    kv = state.kv.get(order.drafter)
    if kv is not None:
        computed = order.start + order.num_catch_up_tokens + max(num_proposed - 1, 0)
        kv.num_computed_tokens = computed


def _end_orders(ctx: Context, plan: StepPlan, result: StepResult) -> None:
    """Settle a plan's own orders; those of draft servers are answered later."""
    _end_replays(ctx, plan, result)
    for ready in result.drafts:
        is_read = ready.request_id not in result.unread
        draft_ready(ctx, ready, result.finished_at, is_read=is_read)
    failed = {f.request_id for f in result.failures}
    for order in plan.drafts:
        state = _of(ctx, order)
        drafter = ctx.table.drafters.get(order.drafter)
        if state is None or (drafter is not None and drafter.is_remote):
            continue
        if order.request_id in failed:
            # Nothing is known of its KV.
            ctx.table.memory.release(state, [order.drafter])
        if state.draft.order == order:
            state.draft = SKIPPED


def _end_replays(ctx: Context, plan: StepPlan, result: StepResult) -> None:
    """Settle a plan's replays; those without an answer have failed."""
    answers = {(r.request_id, r.drafter): r for r in result.replays}
    replays = ctx.table.replays
    for order in plan.drafts:
        key = (order.request_id, order.drafter)
        if order.max_draft_tokens or replays.get(key, (None,))[0] is not order:
            continue
        _, kv = replays.pop(key)
        state, answer = _of(ctx, order), answers.get(key)
        if state is None or answer is None:
            continue
        if state.kv.get(order.drafter) is kv:
            _drafted(state, order, 0)
        ctx.selection.replayed(state, answer)


def _lose_kv(ctx: Context, plan: StepPlan, drafters: Iterable[str]) -> None:
    """Release the KV of drafters that failed in a target step."""
    for order in (*plan.drafts, *(i.draft for i in plan.items if i.draft is not None)):
        state = _of(ctx, order)
        if order.drafter in drafters and state is not None:
            ctx.table.memory.release(state, [order.drafter])


def _of(ctx: Context, order: DraftOrder) -> RequestState | None:
    """Return the request of an order, if its epoch is still that of the order."""
    state = ctx.table.requests.get(order.request_id)
    return state if state is not None and state.epoch == order.epoch else None
