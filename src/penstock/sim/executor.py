"""An executor that only takes time: no model, synthetic tokens, seeded acceptance."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.core.ports import Clock
from penstock.core.types import (
    DecodeRun,
    DraftOrder,
    DraftReady,
    DraftTime,
    PhaseTimes,
    StepPlan,
    StepResult,
    Verdict,
    VerifyItem,
)
from penstock.core.work import step_work
from penstock.fluid.step_profile import StepProfile, StepWork
from penstock.sim.acceptance import AcceptanceModel, GeometricAcceptance
from penstock.sim.links import RemoteDrafting


class StepTimeModel(Protocol):
    """Seconds that the parts of a step take."""

    def verify(self, work: StepWork) -> float:
        """One target step, drafts included."""
        ...

    def draft(self, drafter: str, orders: Sequence[DraftOrder]) -> float:
        """All of one drafter's orders of a step: catching up and drafting."""
        ...


@dataclass(frozen=True, slots=True)
class LinearStepTimes:
    """A fixed cost for each step and one for each row, in seconds; a drafter pays its own once for
    each token of its longest draft."""

    verify_fixed: float
    verify_per_row: float = 0.0
    draft_fixed: float = 0.0
    draft_per_row: float = 0.0

    def verify(self, work: StepWork) -> float:
        rows = work.num_prefill_tokens + work.num_decodes + work.num_draft_tokens
        return self.verify_fixed + self.verify_per_row * rows

    def draft(self, drafter: str, orders: Sequence[DraftOrder]) -> float:
        steps = max(1, *(o.max_draft_tokens for o in orders))
        rows = sum(o.num_catch_up_tokens + max(0, o.max_draft_tokens - 1) for o in orders)
        return self.draft_fixed * steps + self.draft_per_row * rows


class ProfiledStepTimes:
    """Step times of a profile; a drafter takes `draft_share` of the target's smallest step for each
    token of its longest draft."""

    def __init__(self, profile: StepProfile, draft_share: float = 0.0) -> None:
        self.verify = profile.seconds
        self._draft_seconds = draft_share * profile.linear(1)

    def draft(self, drafter: str, orders: Sequence[DraftOrder]) -> float:
        return self._draft_seconds * max(1, *(o.max_draft_tokens for o in orders))


class SimulatedExecutor:
    """Each lane carries out one plan at a time. Completions are ordered by (time, sequence), which
    is a total order, so a run depends on nothing but its inputs.

    A decode run is repeated until something happens: `next_arrival` and `next_event` say when the
    scheduler will next hear of a request, and of anything else. An arrival waits for the step in
    which it falls; before any other event all that has ended must have been reported.
    """

    def __init__(
        self,
        clock: Clock,
        times: StepTimeModel,
        acceptance: AcceptanceModel | None = None,
        remote: RemoteDrafting | None = None,
    ) -> None:
        self.next_arrival = math.inf
        self.next_event = math.inf
        self._clock = clock
        self._times = times
        self._acceptance = acceptance or GeometricAcceptance()
        self.remote = remote or RemoteDrafting(())
        self._prompt_len: dict[str, int] = {}
        self._busy: set[str] = set()
        self._completions: list[tuple[float, int, StepResult]] = []
        self._num_submitted = 0

    @property
    def next_completion(self) -> float | None:
        """When the next plan ends; None while every lane is idle."""
        return self._completions[0][0] if self._completions else None

    @property
    def num_busy(self) -> int:
        """Lanes that carry out a plan."""
        return len(self._busy)

    def ready(self, lane: str) -> bool:
        """A draft server takes orders at any time."""
        return lane not in self._busy or self.remote.serves(lane)

    def submit(self, plan: StepPlan) -> None:
        for request_id in plan.forgotten:
            del self._prompt_len[request_id]
        for request in plan.new_requests:
            self._prompt_len[request.id] = request.prompt_len
        if plan.is_empty:
            return
        if self.remote.serves(plan.lane):
            # Sent is all that there is to say; the drafts come as events.
            now = self._clock.now()
            self.remote.order(plan.drafts, now)
            result = StepResult(plan.id, plan.lane, now, now)
        else:
            result = self._result(plan)
        self._busy.add(plan.lane)
        heapq.heappush(self._completions, (result.finished_at, self._num_submitted, result))
        self._num_submitted += 1

    def collect(self) -> list[StepResult]:
        results = []
        while self._completions and self._completions[0][0] <= self._clock.now():
            _, _, result = heapq.heappop(self._completions)
            self._busy.discard(result.lane)
            results.append(result)
        return results

    def _result(self, plan: StepPlan) -> StepResult:
        started_at = self._clock.now()
        draft_times = self._draft_times(plan)
        draft = sum(t.seconds for t in draft_times) if draft_times else 0.0
        work = step_work(plan)
        verify = self._times.verify(work) if plan.items or plan.decodes else 0.0
        finished_at = started_at + draft + verify
        repeats, verify_all = 1, verify
        if plan.decodes is not None and plan.decodes.max_repeats > 1:
            repeats, finished_at = self._repeat(plan.decodes, work, finished_at)
            verify_all = finished_at - started_at
        return StepResult(
            plan.id,
            plan.lane,
            started_at,
            finished_at,
            tuple(map(self._verdict, plan.items)),
            tuple(
                DraftReady(o.request_id, o.epoch, o.round, o.drafter, o.max_draft_tokens)
                for o in plan.drafts
            ),
            phases=PhaseTimes(draft, 0.0, verify_all),
            draft_times=draft_times,
            num_rows=plan.num_rows,
            repeats=repeats,
            work=work if plan.items or plan.decodes else None,
            work_seconds=verify,
        )

    def _repeat(self, run: DecodeRun, work: StepWork, time: float) -> tuple[int, float]:
        """Go on from the first step's end while nothing happens; returns the steps and the end."""
        repeats = 1
        until = self.next_arrival if run.until is None else min(self.next_arrival, run.until)
        prefill, context, decodes, kv, drafts = work
        while repeats < run.max_repeats and time < until:
            kv += decodes
            end = time + self._times.verify(StepWork(prefill, context, decodes, kv, drafts))
            if end > self.next_event:
                break
            time = end
            repeats += 1
        return repeats, time

    def _draft_times(self, plan: StepPlan) -> tuple[DraftTime, ...]:
        """Drafters inside one step run one after the other."""
        orders: dict[str, list[DraftOrder]] = {}
        inline = [i.draft for i in plan.items if i.draft is not None]
        for order in (*plan.drafts, *inline):
            orders.setdefault(order.drafter, []).append(order)
        return tuple(
            DraftTime(
                drafter=name,
                batch=len(mine),
                steps=max(o.max_draft_tokens for o in mine),
                num_catch_up_tokens=sum(o.num_catch_up_tokens for o in mine),
                seconds=self._times.draft(name, mine),
            )
            for name, mine in orders.items()
        )

    def _verdict(self, item: VerifyItem) -> Verdict:
        if not item.samples:
            return Verdict(item.request_id, item.epoch, item.round)
        first = item.start + item.num_scheduled_tokens
        position = first - self._prompt_len[item.request_id]
        accepted = self._acceptance.num_accepted(item, position)
        if self.remote.serves(item.drafter or "") and accepted == item.num_draft_tokens:
            longer = item._replace(num_draft_tokens=item.num_draft_tokens + 1)
            self.remote.verified(item, self._acceptance.num_accepted(longer, position))
        return Verdict(
            item.request_id,
            item.epoch,
            item.round,
            token_ids=tuple(range(first, first + accepted + 1)),
            drafter=item.drafter if item.num_draft_tokens else None,
            num_proposed=item.num_draft_tokens,
            num_accepted=accepted,
            num_decided=min(accepted + 1, item.num_draft_tokens),
            evidence=float(accepted),
        )
