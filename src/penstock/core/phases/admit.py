"""Phase 1: take in arrivals, and choose the requests of the target's step."""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

from penstock.core.context import Context
from penstock.core.kv import hash_blocks
from penstock.core.state import DraftStage, RequestState
from penstock.core.step import Step, StepRules, newest
from penstock.core.types import (
    AUTO_DRAFTER,
    NO_DRAFTER,
    NO_TARGET,
    TARGET,
    FinishReason,
    Output,
    Request,
)


def arrive(ctx: Context, request: Request, now: float) -> list[Output]:
    """Let a request wait, or refuse it."""
    error = refusal(ctx, request)
    if error is not None:
        return [Output(request.id, finish_reason=FinishReason.REFUSED, error=error)]
    table = ctx.table
    order, epoch = table.counters.requests, table.next_epoch()
    state = RequestState(request, order, epoch, may_group=_may_group(ctx, request))
    ctx.learn.traffic.arrived(request, now)
    may_share = any(p.prefix_caching for p in table.memory.pools.values())
    if may_share and request.prompt_token_ids is not None and not state.block_hashes:
        block_size = table.memory.pools[TARGET].block_size
        hashes = hash_blocks(request.prompt_token_ids, block_size, request.tenant)
        state.block_hashes = list(hashes)
    table.arrive(state)
    return []


def refusal(ctx: Context, request: Request) -> str | None:
    """Return the reason why a request can never be served, in one line; None if it can."""
    pool = ctx.table.memory.pools[TARGET]
    total = request.prompt_len + request.max_tokens
    if request.id in ctx.table.requests:
        return f"a request with id {request.id!r} is already running"
    if request.prompt_len < 1 or request.max_tokens < (request.pooling is None):
        return "a request needs at least 1 prompt token and at least 1 token to make"
    if total > ctx.max_model_len:
        return (
            f"{request.prompt_len} prompt tokens and {request.max_tokens} to make are more "
            f"than the context of {ctx.max_model_len} tokens"
        )
    if total > pool.capacity_tokens:
        return (
            f"{request.prompt_len} prompt tokens and {request.max_tokens} to make are more "
            f"than the KV memory of {pool.capacity_tokens} tokens"
        )
    allowed = [AUTO_DRAFTER, NO_DRAFTER, *ctx.table.drafters]
    if ctx.look_up is not None:
        allowed.append(ctx.look_up.name)
    if request.drafter not in allowed:
        return f"unknown drafter {request.drafter!r}; choose from {', '.join(allowed)}"
    return None


def _may_group(ctx: Context, request: Request) -> bool:
    """Return True if a request's next tokens need nothing but its last one, or its length."""
    if not ctx.groups_decodes or request.latency != NO_TARGET:
        return False
    if request.prompt_token_ids is None:
        return (
            not (request.block_hashes and ctx.table.memory.pools[TARGET].prefix_caching)
            and not request.stop_token_ids
            and (request.drafter == NO_DRAFTER or not ctx.may_draft)
        )
    sampling = request.sampling
    return (
        not (request.prediction or request.stop or sampling.reads_text)
        and sampling.num_logprobs is None
        and sampling.num_prompt_logprobs is None
        and not ctx.may_draft
    )


def compose(ctx: Context, now: float) -> Step:
    """Wait for drafts, or let the admission policy choose the requests of a step."""
    table = ctx.table
    step = _new_step(ctx, now)
    if not table.drafters:
        _admit(ctx, step)
        return step
    table.counters.version += 1
    while ctx.uses_lanes:
        wait = _hold(ctx, now)
        step.wake_at = wait.deadline
        if wait.until is not None and wait.until > now:
            step.wake_at = _earlier(wait.until, wait.deadline)
            return step
        _admit(ctx, step)
        if step.scheduled or step.decoding or not step.num_preempted:
            break
        # The requests that were to join the step were preempted for each other's memory: the
        # others may be ready, and nothing else would ask for them.
        step = _new_step(ctx, now)
    else:
        _admit(ctx, step)
    return step


class _Hold(NamedTuple):
    """A wait for drafts.

    until: when it ends; None: no wait. deadline: of the first draft on its way."""

    until: float | None
    deadline: float | None


def _hold(ctx: Context, now: float) -> _Hold:
    """Ask the pipeline whether the target waits."""
    ctx.divide()
    table = ctx.table
    pending = [s for s in table.running.values() if s.draft.order is not None]
    ready = [s for s in table.solo.values() if s.is_decoding and ctx.is_ready(s)]
    until = ctx.pipeline.hold_until(ready, pending, ctx.view(table.drafters, now))
    deadlines = [s.draft.order.deadline for s in pending if s.draft.order is not None]
    return _Hold(until, min((d for d in deadlines if d is not None), default=None))


def _new_step(ctx: Context, now: float) -> Step:
    victim = newest if ctx.fairness is None else ctx.fairness.victim
    rules = StepRules(ctx.max_num_seqs, ctx.may_run, partial(_reserve, ctx), victim)
    return Step(ctx.table, ctx.learn, rules, now)


def _admit(ctx: Context, step: Step) -> None:
    """Let the admission policy compose the step."""
    woken = step.wake_at
    if ctx.fairness is None:
        ctx.admission.compose(step)
    else:
        # A drafter with a lane would wait for a paused request, not the target.
        ctx.fairness.compose(step, ctx.admission, may_pause=not ctx.uses_lanes)
    if woken is not None or step.wake_at is not None:
        step.wake_at = _earlier(step.wake_at, woken)


def _earlier(a: float | None, b: float | None) -> float | None:
    """Return the earlier of two times; None and infinity are never."""
    earliest = min(math.inf if a is None else a, math.inf if b is None else b)
    return None if earliest == math.inf else earliest


def _reserve(ctx: Context, state: RequestState) -> int:
    """Return the draft positions to keep free for a running request."""
    if state.draft.stage is DraftStage.HELD:
        return state.draft.num_draft_tokens
    drafter = ctx.table.drafter_of(state)
    if not state.is_decoding or (drafter is None and ctx.look_up is None):
        return 0
    most = state.most_draft_tokens if drafter is None else drafter.longest_draft(state)
    return min(ctx.allocation.reserve(state), most)
