"""Explanation of one request of a run: what it got in every step, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from penstock.core.loop import Instrument
from penstock.core.scheduler import Scheduler
from penstock.core.state import RequestState
from penstock.core.types import TARGET, Output, Status, StepPlan, StepResult
from penstock.sim.workloads import WorkloadError

COLUMNS = (
    "time", "step", "steps", "state", "drafter", "saved_seconds", "acceptance", "draft_tokens",
    "accepted", "price_of_second", "token_value", "next_worth", "next_price", "tokens", "why",
)  # fmt: skip
"""Columns. A row is a step, or `steps` that left the request out for one reason; None: unknown.

next_worth, next_price: value of the first draft token that was not granted, by its survival, and
the price of its seconds. A plan may hold for some steps, so that they are not always in order."""


def check_request(name: str, num_requests: int, num_runs: int) -> None:
    """Check that there is one run, with this request. Raises: WorkloadError."""
    if num_runs > 1:
        raise WorkloadError("--explain shows one run: take it without --seeds")
    if name not in map(str, range(num_requests)):
        last = num_requests - 1
        raise WorkloadError(f"--explain takes a request from 0 to {last}, not {name!r}")


@dataclass(slots=True)
class Explanation(Instrument):
    """Records a row for each step of the target while the request is there.

    _verified: rows by plan, until its result. _left_out: kind of the last row's reason, if any."""

    scheduler: Scheduler
    request_id: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    _verified: dict[int, dict[str, Any]] = field(default_factory=dict)
    _num_steps: int = 0
    _left_out: str = ""

    def on_plan(self, plan: StepPlan) -> None:
        self._num_steps += plan.lane == TARGET
        state = self.scheduler.table.requests.get(self.request_id)
        if plan.lane != TARGET or state is None:
            return
        if not self.rows:
            request = state.request
            why = f"prompt {request.prompt_len}, output up to {request.max_tokens}"
            self._add(request.arrival_time, "arrived", why=why, step=None)
        item = next((i for i in plan.items if i.request_id == self.request_id), None)
        kind, tokens = "", state.num_output_tokens
        if item is None:
            kind, why = _why_left_out(self.scheduler, state)
            # Memory is short in the steps, too, that give the last of it to others.
            if kind in (self._left_out, "turn" if self._left_out in ("memory", "kept") else None):
                self.rows[-1]["steps"] += 1
                return
            self._add(plan.created_at, state.status, why=why, tokens=tokens)
        elif state.is_decoding:
            known = self._drafting(state, item.num_draft_tokens)
            self._verified[plan.id] = self._add(plan.created_at, "decode", tokens=tokens, **known)
        else:
            end = item.start + item.num_scheduled_tokens
            why = f"{end} of {state.num_known_tokens} known tokens read"
            row = self._add(plan.created_at, "prefill", tokens=tokens, why=why)
            self._verified[plan.id] = row
        self._left_out = kind

    def on_result(self, plan: StepPlan, result: StepResult) -> None:
        row = self._verified.pop(plan.id, None)
        verdict = next((v for v in result.verdicts if v.request_id == self.request_id), None)
        if row is not None and verdict is not None:
            row["accepted"] = None if row["drafter"] is None else verdict.num_accepted
            row["tokens"] += len(verdict.token_ids)

    def on_output(self, output: Output) -> None:
        if output.request_id == self.request_id and output.error is not None:
            self._add(None, output.finish_reason, why=output.error)

    def _add(self, time: float | None, state: str | None, **known: Any) -> dict[str, Any]:
        own = {"time": time, "step": self._num_steps, "steps": 1, "state": state, "tokens": 0}
        self.rows.append(dict.fromkeys(COLUMNS) | own | known)
        return self.rows[-1]

    def _drafting(self, state: RequestState, num_draft_tokens: int) -> dict[str, Any]:
        """Return what is known of a draft, and of the token behind it that was not granted."""
        drafter, name = state.drafter, state.request.id
        if drafter is None:
            return {"why": "no drafter"} if self.scheduler.table.drafters else {}
        gauges, acceptance = self.scheduler.gauges, self.scheduler.learn.acceptance
        own = {
            "drafter": drafter,
            "saved_seconds": gauges.get("saved_seconds", {}).get(name),
            "acceptance": acceptance.mean(name, drafter),
            "draft_tokens": num_draft_tokens,
            "price_of_second": gauges.get("price_of_second"),
            "token_value": gauges.get("token_value", {}).get(name),
        }
        survival = acceptance.survival(name, drafter, num_draft_tokens + 1)
        seconds = gauges.get("draft_token_seconds", {}).get(drafter)
        if own["token_value"] and seconds is not None and len(survival) > num_draft_tokens:
            found = acceptance.found(name, drafter)
            own["next_worth"] = own["token_value"] * found * survival[-1]
            own["next_price"] = own["price_of_second"] * seconds
        return own


def _why_left_out(scheduler: Scheduler, state: RequestState) -> tuple[str, str]:
    """Return the kind of reason why the request is not in the step that was planned, and a text."""
    table, pool = scheduler.table, scheduler.pool
    if state.status is Status.RUNNING:
        reasons = {
            "its last step is not finished": state.in_flight,
            "its draft is on its way": state.draft.order is not None,
            "paused for other tenants": state.request.id in table.accounts.paused,
            "its prompt has no room in the step": not state.is_decoding,
        }
        return (next((text for text, holds in reasons.items() if holds), "not in this step"),) * 2
    ahead = next((i for i, s in enumerate(table.waiting) if s is state), 0)
    queue = f"{ahead} before it" if ahead else "it is next"
    needed = pool.blocks_for(state.num_known_tokens) * pool.block_size
    free = pool.num_free_blocks * pool.block_size
    if needed > free:
        return "memory", f"{queue}; needs {needed} KV tokens, {free} are free"
    if scheduler.gauges.get("kv_reserved_tokens"):
        return "kept", f"{queue}; {free} free KV tokens kept for running requests"
    return "turn", f"{queue}; admission took no more"
