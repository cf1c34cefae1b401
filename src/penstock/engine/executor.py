"""Carries out plans with real models in this process: draft, verify in one ragged batch, sample.

A drafter's own lane has a thread of its own, and while one works the target's steps have one too.
Compiled kernels and PyTorch's operators let go of the interpreter, so that they really overlap.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from functools import partial

import torch

from penstock.core.loop import Clock
from penstock.core.types import (
    TARGET,
    DraftOrder,
    DraftReady,
    DraftSource,
    Failure,
    PhaseTimes,
    Replayed,
    StepPlan,
    StepResult,
)
from penstock.engine.batch import BatchWriter, RaggedBatch
from penstock.engine.drafters.base import Draft, LocalDrafter
from penstock.engine.gpu.streams import own_stream
from penstock.engine.lane_threads import LaneThreads, Turns
from penstock.engine.native.runner import NativeRunner
from penstock.engine.remote import HeldDrafts, RemoteOrders, Weights
from penstock.engine.runner import ModelRunner
from penstock.engine.sampling import Sampler, sample_coupled
from penstock.engine.sequences import BlockTables, TokenBuffer
from penstock.engine.steps import (
    Done,
    DraftsAtHand,
    Job,
    StepMarks,
    draft_time,
    orders_of,
    sampled_of,
    verdicts_of,
    verified,
)
from penstock.engine.verifier import Verifier

_MOST_FAILURES = 3
"""Steps of a drafter that may fail one after the other."""


class LocalExecutor:
    """Target and drafters of one process. num_threads: of the kernels, to be shared out among those
    that work at the same time. runs_ahead: it begins rounds before they are planned, for which a
    scheduler keeps blocks."""

    runs_ahead = False

    def __init__(
        self,
        target: ModelRunner,
        drafters: Sequence[LocalDrafter],
        clock: Clock,
        max_model_len: int,
        sample: Sampler = sample_coupled,
        num_threads: int = 1,
    ) -> None:
        self.target = target
        self.max_model_len = max_model_len
        self.drafters = {d.name: d for d in drafters}
        self._clock = clock
        self._verifier = Verifier(target, sample)
        self.num_threads = num_threads
        self._tables = BlockTables(-(-max_model_len // target.block_size) + 1)
        self._texts: dict[str, TokenBuffer] = {}
        self._held = HeldDrafts()
        self.remote = RemoteOrders()
        self._turns = {name: Turns() for name in (TARGET, *self.drafters)}
        self._threads: LaneThreads[Done] = LaneThreads()
        self._queue: deque[Job] = deque()
        self._sent: list[StepResult] = []
        self._failures: Counter[str] = Counter()
        self._broken: list[str] = []
        self.busy_s = 0.0
        """Seconds of target steps inside models and samplers; the rest of a turn is the host's."""
        self.phases = PhaseTimes()
        """Seconds of all target steps so far, by phase."""
        self.drafter_seconds = dict.fromkeys(self.drafters, 0.0)
        """Seconds that each drafter has drafted and read."""
        self.num_target_steps = 0

    def ready(self, lane: str) -> bool:
        return not self._queue and not self._threads.is_busy(lane)

    def submit(self, plan: StepPlan) -> None:
        for request_id, pool in plan.released:
            drop = self._tables.drop if pool == TARGET else self.drafters[pool].drop_table
            self._turns[pool].change(partial(drop, request_id))
        for request_id in plan.forgotten:
            self._forget(request_id)
        # Last, because an id may come back in the very plan that forgets it.
        for request in plan.new_requests:
            self._texts[request.id] = TokenBuffer(request)
        if plan.is_empty:
            return
        if plan.lane == TARGET:
            self._queue.append(self._job(plan))
        elif plan.lane in self.drafters:
            job = self._job(plan)
            job.num_threads = max(1, self.num_threads // (2 + self._threads.num_busy))
            self._threads.start(plan.lane, partial(self._draft_beside, job))
        else:
            self._send(plan)

    def wait(self, timeout: float | None) -> None:
        self._threads.wakeup.wait(timeout)

    def fileno(self) -> int:
        """Readable when a lane has ended: for whoever waits for other things, too."""
        return self._threads.wakeup.fileno()

    def take_broken(self) -> list[str]:
        """Drafters that have failed again and again, once each."""
        broken, self._broken = self._broken, []
        return broken

    def text_of(self, request_id: str) -> TokenBuffer | None:
        """A request's verified text, if there is such a request."""
        return self._texts.get(request_id)

    def hold_remote(
        self,
        request_id: str,
        epoch: int,
        round_: int,
        token_ids: Sequence[int],
        weights: Sequence[Weights] | None,
    ) -> None:
        """Keep a draft server's draft until its verification; whatever is late is dropped in time.
        The token ids must lie in the vocabulary. weights: one for each token; None for a draft that
        is compared with the target's own sample."""
        if request_id in self._texts:
            draft = Draft(list(token_ids), [-1] * len(token_ids))
            self._held.hold(request_id, epoch, round_, draft, weights=weights)

    def collect(self) -> list[StepResult]:
        results, self._sent = self._sent, []
        results += [self._finish(done) for done in self._threads.take()]
        while self._queue:
            job = self._queue.popleft()
            if results or self._threads.num_busy:
                others = self._threads.num_busy
                job.num_threads = max(1, self.num_threads - others)
                self._threads.start(TARGET, partial(self._verify_beside, job))
            else:
                # Nobody works beside it: another thread would only cost time.
                results.append(self._finish(self._verify(job)))
        return results

    def _finish(self, done: Done) -> StepResult:
        """Take in what a thread has done."""
        plan, result = done.plan, done.result
        phases = result.phases
        for timed in result.draft_times:
            self.drafter_seconds[timed.drafter] += timed.seconds
        if plan.items:
            self.num_target_steps += 1
            self.phases = PhaseTimes(*map(sum, zip(self.phases, phases, strict=True)))
            self.busy_s += phases.draft + phases.verify + phases.sample
            used = {t.drafter for t in result.draft_times}.union(result.failed_drafters)
            for name in sorted(used):
                self._note(name, has_failed=name in result.failed_drafters)
            return result
        self._note(plan.lane, has_failed=bool(result.failures))
        if result.failures:
            return result
        orders = [o for o in plan.drafts if o.max_draft_tokens]
        return result._replace(drafts=tuple(self._hold(o, done.drafted) for o in orders))

    def _note(self, drafter: str, *, has_failed: bool) -> None:
        """Count the steps in which a drafter has failed since it last did not."""
        self._failures[drafter] = self._failures[drafter] + 1 if has_failed else 0
        if self._failures[drafter] == _MOST_FAILURES:
            self._broken.append(drafter)

    def _forget(self, request_id: str) -> None:
        self._texts.pop(request_id, None)
        self._turns[TARGET].change(partial(self._tables.drop, request_id))
        for name, drafter in self.drafters.items():
            self._turns[name].change(partial(drafter.forget, request_id))
        self._held.forget(request_id)
        self.remote.forget(request_id)

    def _job(self, plan: StepPlan) -> Job:
        orders = orders_of(plan)
        models = {o.drafter for o in orders} | ({TARGET} if plan.items else set())
        ids = {i.request_id for i in plan.items} | {o.request_id for o in orders}
        recalled = []
        for item in plan.items:
            held = self._held.take(item, self.target)
            if held is not None and item.source is DraftSource.HELD:
                recalled.append((item.request_id, *held))
        now = self._clock.now()
        return Job(
            plan,
            {i: self._texts[i] for i in ids},
            [self._turns[m].take() for m in sorted(models)],
            recalled,
            self.remote.oldest(plan.items, now) if plan.items else None,
            self.num_threads,
        )

    def _send(self, plan: StepPlan) -> None:
        """A draft server's lane: the orders go out, and their drafts come as events, or never."""
        now = self._clock.now()
        self.remote.send(plan.drafts, self._texts, now)
        self._sent.append(
            StepResult(plan_id=plan.id, lane=plan.lane, started_at=now, finished_at=now)
        )

    def _draft_beside(self, job: Job) -> Done:
        """A drafter's own lane. If it fails its requests go on without it."""
        plan, started_at = job.plan, self._clock.now()
        drafted = DraftsAtHand()
        replays: tuple[Replayed, ...] = ()
        failures: tuple[Failure, ...] = ()
        with (
            drafted.without_if_failing(plan.lane),
            job.all_turns(),
            own_stream(self.target.device),
            torch.inference_mode(),
        ):
            replays = self._carry_out(job, drafted)
        if drafted.failed:
            reason = f"drafter {plan.lane} failed"
            failures = tuple(Failure(o.request_id, o.epoch, reason) for o in plan.drafts)
        finished_at = self._clock.now()
        result = StepResult(
            plan_id=plan.id,
            lane=plan.lane,
            started_at=started_at,
            finished_at=finished_at,
            replays=replays,
            failures=failures,
            phases=PhaseTimes(draft=finished_at - started_at),
            draft_times=tuple(drafted.times),
        )
        return Done(plan, result, drafted)

    def _verify_beside(self, job: Job) -> Done:
        with own_stream(self.target.device):
            return self._verify(job)

    def _carry_out(self, job: Job, drafted: DraftsAtHand) -> tuple[Replayed, ...]:
        """The draft orders of a plan, then those that only read."""
        orders = orders_of(job.plan)
        self._draft([o for o in orders if o.max_draft_tokens], job, drafted)
        return self._replay([o for o in orders if not o.max_draft_tokens], job, drafted)

    def _verify(self, job: Job) -> Done:
        with job.all_turns(), torch.inference_mode():
            return self._verify_batch(job)

    def _verify_batch(self, job: Job) -> Done:
        plan = job.plan
        started_at = self._clock.now()
        drafted = DraftsAtHand()
        replays = self._carry_out(job, drafted)
        drafted_at = self._clock.now()
        for held in job.recalled:
            drafted.hold(*held)
        drafts = [drafted.draft_of(item) for item in plan.items]
        batch = self._batch(job, [tokens for tokens, _ in drafts])
        sampled = sampled_of(job, drafts)
        built_at = self._clock.now()
        _share_threads(self.target, job.num_threads)
        scores = self._verifier.forward(batch, sampled)
        verified_at = self._clock.now()
        decided = self._verifier.decide(scores, sampled, drafted.joined_probs())
        verdicts = verdicts_of(plan.items, sampled, decided)
        finished_at = self._clock.now()
        draft_s, other_s = drafted_at - started_at, built_at - drafted_at
        marks = StepMarks(started_at, verified_at, finished_at, draft_s, other_s)
        return verified(job, drafted, verdicts, batch.num_tokens, marks, replays)

    # --- drafting -------------------------------------------------------------------------------

    def _draft(self, orders: Sequence[DraftOrder], job: Job, drafted: DraftsAtHand) -> None:
        """All orders of a step, one batch for each drafter."""
        for name, drafter in self.drafters.items():
            mine = [o for o in orders if o.drafter == name]
            if not mine:
                continue
            started_at = self._clock.now()
            with drafted.without_if_failing(name):
                _share_threads(getattr(drafter, "runner", None), job.num_threads)
                drafts = drafter.draft(mine, [job.texts[o.request_id] for o in mine])
                seconds = self._clock.now() - started_at
                drafted.add(mine, drafts)
                drafted.times.append(draft_time(mine, seconds))

    def _replay(
        self, orders: Sequence[DraftOrder], job: Job, drafted: DraftsAtHand
    ) -> tuple[Replayed, ...]:
        """Orders that only read, after those that draft."""
        replays: list[Replayed] = []
        for name, drafter in self.drafters.items():
            mine = [o for o in orders if o.drafter == name]
            if not mine:
                continue
            started_at = self._clock.now()
            with drafted.without_if_failing(name):
                _share_threads(getattr(drafter, "runner", None), job.num_threads)
                replays += drafter.replay(mine, [job.texts[o.request_id] for o in mine])
                seconds = self._clock.now() - started_at
                drafted.times.append(draft_time(mine, seconds))
        return tuple(replays)

    def _hold(self, order: DraftOrder, drafted: DraftsAtHand) -> DraftReady:
        """Keep a draft of a drafter's own lane until its verification."""
        draft, offset = drafted.by_request.pop(order.request_id)
        probs = drafted.joined_probs() if any(r >= 0 for r in draft.prob_rows) else None
        if probs is not None:
            probs = probs[[r + offset for r in draft.prob_rows]]
            draft = Draft(draft.token_ids, list(range(len(draft.token_ids))))
        # One that has ended meanwhile would never be forgotten again.
        if order.request_id in self._texts:
            self._held.hold(order.request_id, order.epoch, order.round, draft, probs)
        return DraftReady(
            order.request_id, order.epoch, order.round, order.drafter, len(draft.token_ids)
        )

    # --- verification ---------------------------------------------------------------------------

    def _batch(self, job: Job, drafts: Sequence[list[int]]) -> RaggedBatch:
        writer = BatchWriter()
        items = job.plan.items
        for item, draft in zip(items, drafts, strict=True):
            self._tables.extend(item.request_id, item.epoch, item.new_blocks)
            known = item.start + item.num_scheduled_tokens
            tokens = job.texts[item.request_id].span(item.start, known).tolist()
            writer.add(item.start, tokens + draft, len(draft) + 1 if item.samples else 0)
        num_blocks = -(-writer.longest // self.target.block_size)
        return writer.batch(self._tables.gather([i.request_id for i in items], num_blocks))


def _share_threads(runner: ModelRunner | None, num_threads: int) -> None:
    if isinstance(runner, NativeRunner):
        runner.limit_threads(num_threads)
