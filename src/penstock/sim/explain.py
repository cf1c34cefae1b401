"""Explanation of one request of a run: what it got in every step, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock.core.scheduler import Scheduler
from penstock.core.state import RequestState
from penstock.core.types import TARGET, Output, Status, StepPlan, StepResult, VerifyItem
from penstock.sim.workloads import WorkloadError

Row = dict[str, Any]
"""A step, or several in a row that left the request out for one reason (`steps`); None: unknown.

next_worth, next_price: value of the first draft token that was not granted, by its survival, and
the price of its seconds. A plan may hold for some steps, so that they are not always in order."""

COLUMNS = (
    "time", "step", "steps", "state", "why", "drafter", "saved_seconds", "acceptance",
    "draft_tokens", "accepted", "price_of_second", "token_value", "next_worth", "next_price",
    "tokens",
)  # fmt: skip


def check_request(name: str, num_requests: int) -> None:
    """Check that a run of so many requests has this one. Raises: WorkloadError."""
    if not name.isdecimal() or str(int(name)) != name or int(name) >= num_requests:
        last = num_requests - 1
        raise WorkloadError(f"--explain takes a request from 0 to {last}, not {name!r}")


@dataclass(slots=True)
class Explanation:
    """Instrument that records a row for each step of the target while the request is there."""

    scheduler: Scheduler
    request_id: str
    rows: list[Row] = field(default_factory=list)
    _verified: dict[int, Row] = field(default_factory=dict)
    """Rows by plan, until its result is there."""
    _num_steps: int = 0
    _left_out: str = ""
    """Reason of the last row, if the request was left out."""

    def on_plan(self, plan: StepPlan) -> None:
        if plan.lane != TARGET:
            return
        self._num_steps += 1
        state = self.scheduler.table.requests.get(self.request_id)
        if state is None:
            return
        if not self.rows:
            request = state.request
            why = f"prompt {request.prompt_len}, output up to {request.max_tokens}"
            self._add(request.arrival_time, "arrived", why, step=None, tokens=0)
        item = next((i for i in plan.items if i.request_id == self.request_id), None)
        if item is not None:
            self._left_out = ""
            self._verify(plan, state, item)
            return
        kind, why = _why_left_out(self.scheduler, state)
        # Memory is short in the steps, too, that give the last of it to others.
        if kind in (self._left_out, "turn" if self._left_out in ("memory", "kept") else ""):
            self.rows[-1]["steps"] += 1
        else:
            self._add(plan.created_at, state.status, why, tokens=state.num_output_tokens)
            self._left_out = kind

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        row = self._verified.pop(plan.id, None)
        verdict = next((v for v in result.verdicts if v.request_id == self.request_id), None)
        if row is not None and verdict is not None:
            row["accepted"] = None if row["drafter"] is None else verdict.num_accepted
            row["tokens"] += len(verdict.token_ids)

    def on_output(self, output: Output) -> None:
        if output.request_id == self.request_id and output.error is not None:
            self._add(None, output.finish_reason, output.error, tokens=0)

    def _add(self, time: float | None, state: str | None, why: str = "", **known: Any) -> Row:
        own = {"time": time, "step": self._num_steps, "steps": 1, "state": state, "why": why}
        self.rows.append(dict.fromkeys(COLUMNS) | own | known)
        return self.rows[-1]

    def _verify(self, plan: StepPlan, state: RequestState, item: VerifyItem) -> None:
        num_tokens, known = state.num_output_tokens, state.num_known_tokens
        if state.is_decoding:
            drafting = self._drafting(state, item.num_draft_tokens)
            row = self._add(plan.created_at, "decode", tokens=num_tokens, **drafting)
        else:
            why = f"{item.start + item.num_scheduled_tokens} of {known} known tokens read"
            row = self._add(plan.created_at, "prefill", why, tokens=num_tokens)
        self._verified[plan.id] = row

    def _drafting(self, state: RequestState, num_draft_tokens: int) -> Row:
        """Return what is known of a draft, and of the token behind it that was not granted."""
        drafter, name = state.drafter, state.request.id
        if drafter is None:
            return {"why": "no drafter"} if self.scheduler.table.drafters else {}
        prices, acceptance = self.scheduler.prices, self.scheduler.learn.acceptance
        price, value = prices.get("price_of_second"), prices.get("token_value", {}).get(name)
        seconds = prices.get("draft_token_seconds", {}).get(drafter)
        survival = acceptance.survival(name, drafter, num_draft_tokens + 1)
        worth = None
        if value is not None and len(survival) > num_draft_tokens:
            worth = value * acceptance.found(name, drafter) * survival[-1]
        return {
            "drafter": drafter,
            "saved_seconds": prices.get("saved_seconds", {}).get(name),
            "acceptance": acceptance.mean(name, drafter),
            "draft_tokens": num_draft_tokens,
            "price_of_second": price,
            "token_value": value,
            "next_worth": worth,
            "next_price": None if price is None or seconds is None else price * seconds,
        }


def _why_left_out(scheduler: Scheduler, state: RequestState) -> tuple[str, str]:
    """Return the kind of reason why the request is not in the step that was planned, and a text."""
    table, pool, name = scheduler.table, scheduler.pool, state.request.id
    if state.status is Status.RUNNING:
        reasons = {
            "its last step is not finished": state.in_flight,
            "its draft is on its way": state.draft.order is not None,
            "paused for other tenants": name in table.accounts.paused,
            "its prompt has no room in the step": not state.is_decoding,
        }
        text = next((text for text, holds in reasons.items() if holds), "not in this step")
        return text, text
    ahead = next((i for i, s in enumerate(table.waiting) if s is state), 0)
    queue = f"{ahead} before it" if ahead else "it is next"
    needed = pool.blocks_for(state.num_known_tokens) * pool.block_size
    free = pool.num_free_blocks * pool.block_size
    if needed > free:
        return "memory", f"{queue}; needs {needed} KV tokens, {free} are free"
    if scheduler.prices.get("kv_reserved_tokens"):
        return "kept", f"{queue}; {free} KV tokens are free, kept for running requests to grow"
    return "turn", f"{queue}; admission took no more"
