"""An executor that only takes time: no model, synthetic tokens, seeded acceptance."""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.core.ports import Clock
from penstock.core.types import (
    DraftOrder,
    DraftReady,
    DraftTime,
    PhaseTimes,
    StepPlan,
    StepResult,
    Verdict,
    VerifyItem,
)


class StepTimeModel(Protocol):
    """Seconds that the parts of a step take."""

    def verify(self, items: Sequence[VerifyItem]) -> float:
        """One target step over `items`, drafts included."""
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

    def verify(self, items: Sequence[VerifyItem]) -> float:
        rows = sum(i.num_scheduled_tokens + i.num_draft_tokens for i in items)
        return self.verify_fixed + self.verify_per_row * rows

    def draft(self, drafter: str, orders: Sequence[DraftOrder]) -> float:
        steps = max(1, *(o.max_draft_tokens for o in orders))
        rows = sum(o.num_catch_up_tokens + max(0, o.max_draft_tokens - 1) for o in orders)
        return self.draft_fixed * steps + self.draft_per_row * rows


class AcceptanceModel(Protocol):
    def num_accepted(self, item: VerifyItem) -> int:
        """How many of an item's draft tokens the target keeps."""
        ...


@dataclass(frozen=True, slots=True)
class GeometricAcceptance:
    """Every draft token is accepted with the same probability, by drafter, up to the first
    rejection. One draw for each (seed, request, round): neither the order of events nor the batch
    changes it."""

    rates: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0

    def num_accepted(self, item: VerifyItem) -> int:
        if not item.num_draft_tokens or item.drafter is None:
            return 0
        rate = self.rates[item.drafter]
        if rate <= 0 or rate >= 1:
            return item.num_draft_tokens if rate >= 1 else 0
        key = f"{self.seed}/{item.request_id}/{item.round}/{item.drafter}".encode()
        draw = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
        run = math.log((draw + 1) / 2**64) / math.log(rate)
        return min(item.num_draft_tokens, int(run))


class SimulatedExecutor:
    """Each lane carries out one plan at a time. Completions are ordered by (time, sequence), which
    is a total order, so a run depends on nothing but its inputs."""

    def __init__(self, clock: Clock, times: StepTimeModel, acceptance: AcceptanceModel) -> None:
        self._clock = clock
        self._times = times
        self._acceptance = acceptance
        self._busy: set[str] = set()
        self._completions: list[tuple[float, int, StepResult]] = []
        self._num_submitted = 0

    @property
    def next_completion(self) -> float | None:
        """When the next plan ends; None while every lane is idle."""
        return self._completions[0][0] if self._completions else None

    def ready(self, lane: str) -> bool:
        return lane not in self._busy

    def submit(self, plan: StepPlan) -> None:
        if plan.is_empty:
            return
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
        draft_times = self._draft_times(plan)
        draft = sum(t.seconds for t in draft_times)
        verify = self._times.verify(plan.items) if plan.items else 0.0
        started_at = self._clock.now()
        return StepResult(
            plan_id=plan.id,
            lane=plan.lane,
            started_at=started_at,
            finished_at=started_at + draft + verify,
            verdicts=tuple(self._verdict(item) for item in plan.items),
            drafts=tuple(
                DraftReady(o.request_id, o.epoch, o.round, o.drafter, o.max_draft_tokens)
                for o in plan.drafts
            ),
            phases=PhaseTimes(draft=draft, verify=verify),
            draft_times=draft_times,
            num_rows=plan.num_rows,
        )

    def _draft_times(self, plan: StepPlan) -> tuple[DraftTime, ...]:
        """Drafters inside one step run one after the other."""
        orders: dict[str, list[DraftOrder]] = {}
        for order in (*plan.drafts, *(i.draft for i in plan.items if i.draft is not None)):
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
        accepted = self._acceptance.num_accepted(item)
        first = item.start + item.num_scheduled_tokens
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
