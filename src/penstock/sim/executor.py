"""Simulated executor: step times without a model, synthetic tokens, seeded acceptance."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from penstock.core.learn.times import step_work
from penstock.core.loop import Clock
from penstock.core.state import Drafter
from penstock.core.types import (
    MOST_EVALUATED,
    TARGET,
    DecodeRun,
    DraftOrder,
    DraftReady,
    DraftTime,
    PhaseTimes,
    Replayed,
    StepPlan,
    StepResult,
    Verdict,
    VerifyItem,
)
from penstock.fluid.step_profile import DrafterProfile, StepProfile, StepWork
from penstock.sim.acceptance import AcceptanceModel, GeometricAcceptance
from penstock.sim.links import RemoteDrafting

_DRAFT_SHARE = 0.05
"""Assumed step of a drafter without a profile, in smallest steps of the target."""


class StepTimeModel(Protocol):
    """Seconds of the parts of a step."""

    def verify(self, work: StepWork) -> float:
        """Return the seconds of one target step, drafts included."""
        ...

    def decoding(self, num_decodes: int) -> tuple[float, float]:
        """Return the seconds of a step that only decodes: fixed, and for each context token."""
        ...

    def draft(self, drafter: str, orders: Sequence[DraftOrder]) -> float:
        """Return the seconds of one drafter's orders of a step: catching up and drafting."""
        ...


class ProfiledStepTimes:
    """Step times of a profile and its drafters. profiles: by name, if not the profile's own.

    A drafter makes one step for each token of its longest draft, over the requests that want that
    many tokens; catch-up beyond one token each is charged by token. Without a profile each of its
    steps takes `_DRAFT_SHARE` of the target's smallest step."""

    def __init__(
        self,
        profile: StepProfile,
        profiles: Mapping[str, DrafterProfile] | None = None,
    ) -> None:
        self.verify = profile.seconds
        self.decoding = profile.decoding
        self._draft_seconds = _DRAFT_SHARE * profile.linear(1)
        self._profiles = {d.name: d for d in profile.drafters} if profiles is None else profiles

    def draft(self, drafter: str, orders: Sequence[DraftOrder]) -> float:
        lengths = [max(1, o.max_draft_tokens) for o in orders]
        profile = self._profiles.get(drafter)
        if profile is None:
            return self._draft_seconds * max(lengths)
        steps = range(1, max(lengths) + 1)
        drafting = sum(profile.seconds(sum(n >= k for n in lengths), 1) for k in steps)
        reading = sum(max(0, o.num_catch_up_tokens - 1) for o in orders)
        return drafting + profile.per_catch_up_token * reading


class SimulatedExecutor:
    """Executor whose lanes take one plan at a time. Completions are ordered by (time, sequence).

    A decode run repeats until something happens: `next_arrival` and `next_event` are the times of
    the next request and of the next other event. An arrival waits for the end of the step in which
    it falls; another event waits until all results before it are reported.

    profiles: of drafters that slow the target, or are slowed by it, when both work. The plan that
    begins second is slowed throughout, the other one not at all. Of several drafters beside the
    target the largest slowdown counts; drafters do not slow each other."""

    def __init__(
        self,
        clock: Clock,
        times: StepTimeModel,
        acceptance: AcceptanceModel | None = None,
        remote: RemoteDrafting | None = None,
        drafters: Sequence[Drafter] = (),
        profiles: Mapping[str, DrafterProfile] | None = None,
    ) -> None:
        self.next_arrival = math.inf
        self.next_event = math.inf
        self._clock = clock
        self._times = times
        self._acceptance = acceptance or GeometricAcceptance()
        self.remote = remote or RemoteDrafting(())
        self._models = {d.name: d.model for d in drafters if d.model is not None}
        self._profiles = profiles or {}
        self._prompt_len: dict[str, int] = {}
        self._num_read: dict[str, dict[str, int]] = {}
        self._busy: set[str] = set()
        self._completions: list[tuple[float, int, StepResult]] = []
        self._num_submitted = 0

    @property
    def next_completion(self) -> float | None:
        """End of the next plan in seconds; None while every lane is idle."""
        return self._completions[0][0] if self._completions else None

    @property
    def num_busy(self) -> int:
        """Number of lanes with a plan."""
        return len(self._busy)

    def ready(self, lane: str) -> bool:
        """Return whether a lane takes a plan; a draft server always does."""
        return lane not in self._busy or self.remote.serves(lane)

    def submit(self, plan: StepPlan) -> None:
        for request_id in plan.forgotten:
            del self._prompt_len[request_id]
            self._num_read.pop(request_id, None)
        for request in plan.new_requests:
            self._prompt_len[request.id] = request.prompt_len
        if plan.is_empty:
            return
        if self.remote.serves(plan.lane):
            # The result only reports the sending; drafts come as events.
            now = self._clock.now()
            self.remote.order(plan.drafts, now)
            result = StepResult(plan.id, plan.lane, now, now)
        else:
            result = self._result(plan)
        self._busy.add(plan.lane)
        heapq.heappush(self._completions, (result.finished_at, self._num_submitted, result))
        self._num_submitted += 1

    def wait(self, timeout: float | None) -> None:
        """Return at once: nothing ends while the virtual clock stands."""

    def collect(self) -> list[StepResult]:
        results: list[StepResult] = []
        completions = self._completions
        if not completions:
            return results
        now = self._clock.now()
        while completions and completions[0][0] <= now:
            _, _, result = heapq.heappop(completions)
            self._busy.discard(result.lane)
            results.append(result)
        return results

    def _result(self, plan: StepPlan) -> StepResult:
        started_at = self._clock.now()
        slowdown = self._slowdown(plan.lane) if self._profiles else 1.0
        orders = _orders(plan)
        draft_times = self._draft_times(orders, slowdown) if orders else ()
        draft = sum(t.seconds for t in draft_times) if draft_times else 0.0
        work, verify = None, 0.0
        if plan.items or plan.decodes is not None:
            work = step_work(plan)
            verify = self._times.verify(work) * slowdown
        finished_at = started_at + draft + verify
        repeats, verify_all = 1, verify
        if plan.decodes is not None and plan.decodes.max_repeats > 1:
            repeats, finished_at = self._repeat(plan.decodes, finished_at)
            verify_all = finished_at - started_at
        return StepResult(
            plan.id,
            plan.lane,
            started_at,
            finished_at,
            tuple(map(self._verdict, plan.items)),
            _ready(plan.drafts) if plan.drafts else (),
            self._read(orders) if orders else (),
            (),
            PhaseTimes(draft, 0.0, verify_all),
            draft_times,
            plan.num_rows,
            repeats,
            work,
            verify,
        )

    def _slowdown(self, lane: str) -> float:
        """Return the factor on the time of a plan that begins now."""
        if lane == TARGET:
            beside = [self._profiles[n] for n in self._busy if n in self._profiles]
            return max((p.target_slowdown for p in beside), default=1.0)
        profile = self._profiles.get(lane)
        return 1.0 if profile is None or TARGET not in self._busy else profile.slowdown

    def _repeat(self, run: DecodeRun, time: float) -> tuple[int, float]:
        """Repeat a decode step until something happens; return the number of steps and the end."""
        repeats, most, next_event = 1, run.max_repeats, self.next_event
        until = self.next_arrival if run.until is None else min(self.next_arrival, run.until)
        decodes, kv = run.num_requests, run.num_kv_tokens
        alone, per_kv_token = self._times.decoding(decodes)
        while repeats < most and time < until:
            kv += decodes
            end = time + (alone + per_kv_token * kv)
            if end > next_event:
                break
            time = end
            repeats += 1
        return repeats, time

    def _draft_times(self, orders: Sequence[DraftOrder], slowdown: float) -> tuple[DraftTime, ...]:
        """Return the times of drafters inside one step, in sequence, those that only read last."""
        batches: dict[tuple[bool, str], list[DraftOrder]] = {}
        for order in orders:
            batches.setdefault((not order.max_draft_tokens, order.drafter), []).append(order)
        return tuple(
            DraftTime(
                drafter=name,
                batch=len(mine),
                steps=max(o.max_draft_tokens for o in mine),
                num_catch_up_tokens=sum(o.num_catch_up_tokens for o in mine),
                seconds=self._times.draft(name, mine) * slowdown,
            )
            for (_, name), mine in sorted(batches.items(), key=lambda entry: entry[0][0])
        )

    def _read(self, orders: Sequence[DraftOrder]) -> tuple[Replayed, ...]:
        """Note the tokens that drafters have read, and answer the orders without a draft."""
        replays = []
        for order in orders:
            read = self._num_read.setdefault(order.request_id, {})
            known = order.start + order.num_catch_up_tokens
            if not order.max_draft_tokens:
                first = max(
                    self._prompt_len[order.request_id],
                    read.get(order.drafter, 0),
                    known - MOST_EVALUATED,
                )
                replays.append(self._replayed(order, range(first, known)))
            read[order.drafter] = known
        return tuple(replays)

    def _replayed(self, order: DraftOrder, tokens: range) -> Replayed:
        """Evaluate `tokens`: positions in the request's text that the drafter reads first now."""
        answer = Replayed(order.request_id, order.epoch, order.drafter)
        if not order.evaluate:
            return answer
        before = self._prompt_len[order.request_id]
        positions = range(tokens.start - before, tokens.stop - before)
        if order.drafter in self._models:
            order = order._replace(drafter=self._models[order.drafter])
        num_matched = self._acceptance.num_matched(order, positions)
        return answer._replace(num_tokens=len(positions), num_matched=num_matched)

    def _verdict(self, item: VerifyItem) -> Verdict:
        if not item.samples:
            return Verdict(item.request_id, item.epoch, item.round)
        first = item.start + item.num_scheduled_tokens
        if not item.num_draft_tokens:
            return Verdict(item.request_id, item.epoch, item.round, (first,))
        position = first - self._prompt_len[item.request_id]
        known = item.token_ids
        accepted = next((i for i, t in enumerate(known) if t != first + i), len(known))
        num_drafted = item.num_draft_tokens - len(known)
        behind = item._replace(num_draft_tokens=num_drafted)
        if item.drafter in self._models:
            behind = behind._replace(drafter=self._models[item.drafter])
        reached = accepted == len(known)
        if num_drafted and reached:
            accepted += self._acceptance.num_accepted(behind, position + len(known))
        if self.remote.serves(item.drafter or "") and accepted == item.num_draft_tokens:
            longer = item._replace(num_draft_tokens=item.num_draft_tokens + 1)
            self.remote.verified(item, self._acceptance.num_accepted(longer, position))
        num_looked_up = item.num_looked_up
        right = max(0, accepted - num_looked_up)
        right_behind = 0
        if item.num_draft_tokens > num_looked_up and reached:
            whole = behind._replace(num_draft_tokens=item.num_draft_tokens - num_looked_up)
            at = position + num_looked_up
            right_behind = self._acceptance.num_right_behind(whole, at, right)
        return Verdict(
            item.request_id,
            item.epoch,
            item.round,
            token_ids=tuple(range(first, first + accepted + 1)),
            drafter=item.drafter,
            num_proposed=item.num_draft_tokens,
            num_accepted=accepted,
            num_decided=max(0, min(accepted + 1, item.num_draft_tokens) - num_looked_up),
            evidence=float(right),
            evidence_all=float(right + right_behind),
            num_looked_up=num_looked_up,
        )


def _orders(plan: StepPlan) -> tuple[DraftOrder, ...]:
    if not plan.items:
        return plan.drafts
    return (*plan.drafts, *[i.draft for i in plan.items if i.draft is not None])


def _ready(orders: Sequence[DraftOrder]) -> tuple[DraftReady, ...]:
    return tuple(
        DraftReady(o.request_id, o.epoch, o.round, o.drafter, o.max_draft_tokens)
        for o in orders
        if o.max_draft_tokens
    )
