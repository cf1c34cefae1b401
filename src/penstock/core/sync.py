"""Takes over request states from a host that keeps its own, as vLLM does.

The scheduler advances requests by the results of its own plans. A host that may deviate from them
reports the truth before each plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from penstock.core.kv import CountedKV
from penstock.core.state import RequestState
from penstock.core.table import Table
from penstock.core.types import TARGET, Status


class HostRequest(NamedTuple):
    """A running request as its host counts it, as if steps in flight had ended."""

    request_id: str
    num_output_tokens: int  # made so far
    num_computed_tokens: int  # positions with computed KV
    num_blocks: int
    in_flight: bool = False  # cannot be scheduled before a step in flight ends


def sync(table: Table, running: Iterable[HostRequest], preempted: Iterable[str]) -> None:
    """Set requests to their host's states; see `Scheduler.sync`."""
    for told in running:
        state = table.requests.get(told.request_id)
        if state is None:
            continue
        if state.status is not Status.RUNNING:
            table.admit(state)
        _set(table, state, told)
    for request_id in preempted:
        state = table.running.get(request_id)
        if state is not None:
            state.plans.clear()
            table.preempt(state)


def _set(table: Table, state: RequestState, told: HostRequest) -> None:
    """Set one request; it stays in its decode group if counts agree and no plan has it."""
    if state.decode_group is not None:
        counted = (state.num_output_tokens, state.num_computed_tokens)
        is_same = counted == (told.num_output_tokens, told.num_computed_tokens)
        if is_same and state.decode_group.plan_id is None:
            return
        table.leave_group(state)
    state.num_output_tokens = told.num_output_tokens
    if state.kv_of(TARGET).num_blocks != told.num_blocks:
        state.kv[TARGET] = CountedKV(num_blocks=told.num_blocks)
    state.kv[TARGET].num_computed_tokens = told.num_computed_tokens
    state.plans.clear()
    state.in_flight = told.in_flight
