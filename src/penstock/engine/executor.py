"""Carries out plans with models of this process: draft, verify in one ragged batch, sample.

A drafter's lane has a thread of its own, and while one works the target's steps have one too.
Compiled kernels and PyTorch's operators release the interpreter lock, so that they overlap."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TypeVar

import torch

from penstock.core.loop import Clock
from penstock.core.types import (
    TARGET,
    DraftOrder,
    DraftReady,
    DraftSource,
    Event,
    Failure,
    PhaseTimes,
    Replayed,
    Request,
    StepPlan,
    StepResult,
    Verdict,
)
from penstock.engine.carried import CarriedStates
from penstock.engine.drafters.base import LocalDrafter
from penstock.engine.drafters.drafts import Draft
from penstock.engine.drafters.head import HeadDrafter
from penstock.engine.drafters.server import Answer, ServerDrafter
from penstock.engine.ends import LazyTokenizer, OutputEnd
from penstock.engine.grammar import GrammarCompiler, GrammarState
from penstock.engine.lanes import Lanes
from penstock.engine.pooling import PromptPools
from penstock.engine.runner import BatchWriter, Carry, IntArray, Model, ModelRunner, RaggedBatch
from penstock.engine.sequences import BlockTables, TokenBuffer
from penstock.engine.steps import (
    NOT_FINITE,
    Computed,
    Done,
    DraftsAtHand,
    Failures,
    HeldDrafts,
    RemoteOrders,
    StepJob,
    Totals,
    Weights,
    draft_time,
    orders_of,
    sampled_of,
    verdicts_of,
    verified,
)
from penstock.engine.verifier import PromptScores, Verifier

T = TypeVar("T")


class LocalExecutor(ABC):
    """Drafters of this process, and a target that a subclass computes.

    num_threads: of the kernels, shared by the lanes at work; cores: of drafters that have their
    own"""

    scores_prompts = False
    """True if it can report log-probabilities of a prompt's tokens."""

    def __init__(
        self,
        target: Model,
        drafters: Sequence[LocalDrafter],
        clock: Clock,
        max_model_len: int,
        num_threads: int = 1,
        cores: Mapping[str, Collection[int]] = MappingProxyType({}),
    ) -> None:
        self.target = target
        self.max_model_len = max_model_len
        self.drafters = {d.name: d for d in drafters}
        self.num_threads = num_threads
        self.totals = Totals(dict.fromkeys(self.drafters, 0.0))
        self.remote = RemoteOrders()
        self.servers: dict[str, ServerDrafter] = {}
        self.grammars: GrammarCompiler | None = None
        """Compiler for the target's vocabulary."""
        self.tokenizer: LazyTokenizer | None = None
        """The target's tokenizer, which finds stop strings."""
        self._failures = Failures()
        self._clock = clock
        self._texts: dict[str, TokenBuffer] = {}
        self._held = HeldDrafts()
        self._cores = cores
        self._lanes = Lanes[Done]((TARGET, *self.drafters), cores)
        self._queue: deque[StepJob] = deque()

    def ready(self, lane: str) -> bool:
        return not self._queue and not self._lanes.is_busy(lane)

    def submit(self, plan: StepPlan) -> None:
        for request_id, pool in plan.released:
            drop = self._drop_table if pool == TARGET else self.drafters[pool].drop_table
            self._lanes.models[pool].change(partial(drop, request_id))
        for request_id in plan.forgotten:
            self._forget(request_id)
        # Last, because an id may come back in the very plan that forgets it.
        for request in plan.new_requests:
            end = OutputEnd(request, self.tokenizer)
            self._texts[request.id] = TokenBuffer(request, self._grammar_of(request), end)
        if plan.is_empty:
            return
        if plan.lane == TARGET:
            self._queue.append(self._job(plan))
        elif plan.lane in self.drafters:
            job = self._job(plan)
            job.num_threads = self._threads_beside(plan.lane)
            self._lanes.start(plan.lane, partial(self._draft_beside, job))
        elif plan.lane in self.servers:
            self.remote.end(plan, self._clock.now())
            self.servers[plan.lane].order(plan.drafts, self._texts)
        else:
            # A draft server's lane: its drafts come as events, or never.
            self.remote.send(plan, self._texts, self._clock.now())

    def _threads_beside(self, drafter: str) -> int:
        """Return the threads of a drafter beside the target."""
        own = len(self._cores.get(drafter, ()))
        return own or max(1, self.num_threads // (2 + self._lanes.num_sharing))

    def threads_together(self, drafter: str) -> tuple[int, int]:
        """Return the threads of the target, and of a drafter that alone works beside it."""
        shared = self.num_threads if drafter in self._cores else max(1, self.num_threads - 1)
        return shared, self._threads_beside(drafter)

    def in_lane(self, drafter: str, function: Callable[[], T]) -> T:
        """Return a function's result, called on the cores of a drafter that has its own."""
        return self._lanes.call(drafter, function)

    def _grammar_of(self, request: Request) -> GrammarState | None:
        """Begin to compile a request's grammar, beside the steps before its own."""
        grammar = request.sampling.grammar
        if grammar is None:
            return None
        if self.grammars is None:
            raise ValueError("this executor knows no grammars")
        return self.grammars.begin(grammar)

    def wait(self, timeout: float | None) -> None:
        self._lanes.wakeup.wait(timeout)

    def fileno(self) -> int:
        """Return a descriptor that is readable when a lane has ended."""
        return self._lanes.wakeup.fileno()

    def wake(self) -> None:
        """Make `fileno` readable; from any thread."""
        self._lanes.wakeup.give()

    def close(self) -> None:
        """Release other processes after the last plan."""
        for server in self.servers.values():
            server.close()

    def take_broken(self) -> list[str]:
        """Return drafters that keep failing, once each."""
        return self._failures.pop()

    def take_events(self) -> list[Event]:
        """Return what the servers that draft have done since the last call."""
        events: list[Event] = []
        for event in [e for s in self.servers.values() for e in s.take_events()]:
            if isinstance(event, Answer):
                order, tokens, is_reading, waited_s = event
                key = (order.request_id, order.epoch, order.round)
                self.hold_remote(*key, tokens, None)
                ready = DraftReady(*key, order.drafter, len(tokens), is_reading, waited_s)
                events.append(ready)
            else:
                events.append(event)
        return events

    def text_of(self, request_id: str) -> TokenBuffer | None:
        """Return a request's verified text, if there is such a request."""
        return self._texts.get(request_id)

    def hold_remote(
        self,
        request_id: str,
        epoch: int,
        round_: int,
        token_ids: Sequence[int],
        weights: Sequence[Weights] | None,
    ) -> None:
        """Keep a draft server's draft until its verification; a late one is dropped then.

        token_ids: within the vocabulary. weights: one for each token; None for a draft that is
        compared with the target's own sample."""
        if request_id in self._texts:
            draft = Draft(list(token_ids), [-1] * len(token_ids))
            self._held.hold(request_id, epoch, round_, draft, weights=weights)

    def collect(self) -> list[StepResult]:
        results = self.remote.take_sent()
        results += [self._finish(done) for done in self._lanes.pop_results()]
        while self._queue:
            job = self._queue.popleft()
            if results or self._lanes.num_busy:
                job.num_threads = max(1, self.num_threads - self._lanes.num_sharing)
                self._lanes.start(TARGET, partial(self._verify, job))
            else:
                # No lane works beside it: another thread would only cost time.
                results.append(self._finish(self._verify(job)))
        return results

    def _finish(self, done: Done) -> StepResult:
        """Return the result of a finished job."""
        plan, result = done.plan, done.result
        self.totals.add(plan, result)
        if plan.items or plan.decodes is not None:
            used = {t.drafter for t in result.draft_times}.union(result.failed_drafters)
            for name in sorted(used):
                self._failures.note(name, has_failed=name in result.failed_drafters)
            return result
        self._failures.note(plan.lane, has_failed=bool(result.failures))
        if result.failures:
            return result
        orders = [o for o in plan.drafts if o.max_draft_tokens]
        return result._replace(drafts=tuple(self._hold(o, done.drafted) for o in orders))

    def _forget(self, request_id: str) -> None:
        self._texts.pop(request_id, None)
        self._lanes.models[TARGET].change(partial(self._forget_in_target, request_id))
        for name, drafter in self.drafters.items():
            self._lanes.models[name].change(partial(drafter.release_request, request_id))
        self._held.release_request(request_id)
        self.remote.release_request(request_id)
        for server in self.servers.values():
            server.release_request(request_id)

    def _job(self, plan: StepPlan) -> StepJob:
        orders = orders_of(plan)
        models = {o.drafter for o in orders} | ({TARGET} if plan.items or plan.decodes else set())
        ids = {i.request_id for i in plan.items} | {o.request_id for o in orders}
        if plan.decodes is not None and plan.decodes.change is not None:
            ids.update(plan.decodes.change.joined)
        recalled: list[tuple[str, Draft, torch.Tensor | None]] = []
        for item in plan.items:
            held = self._held.pop_draft(item, self.target)
            if held is not None and item.source is DraftSource.HELD:
                recalled.append((item.request_id, *held))
        return StepJob(
            plan,
            {i: self._texts[i] for i in ids},
            [self._lanes.models[m].next_ticket() for m in sorted(models)],
            recalled,
            self.remote.oldest(plan.items),
            self.num_threads,
        )

    def _draft_beside(self, job: StepJob) -> Done:
        """Carry out a lane's plan. If the drafter fails its requests go on without a draft."""
        plan, started_at = job.plan, self._clock.now()
        drafted = DraftsAtHand()
        replays: tuple[Replayed, ...] = ()
        failures: tuple[Failure, ...] = ()
        with drafted.without_if_failing(plan.lane), job.models(), torch.inference_mode():
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
            unread=tuple(drafted.unread),
        )
        return Done(plan, result, drafted)

    @torch.inference_mode()
    def _verify(self, job: StepJob) -> Done:
        """Carry out a target step."""
        with job.models():
            plan = job.plan
            started_at = self._clock.now()
            drafted = DraftsAtHand()
            replays = self._carry_out(job, drafted)
            drafted_at = self._clock.now()
            for held in job.recalled:
                drafted.hold(*held)
            drafts = [drafted.draft_of(item) for item in plan.items]
            computed = self._compute(job, drafts, drafted.joined_probs())
            verdicts = verdicts_of(plan.items, computed)
            self._learn(job, drafted, verdicts)
            times = (started_at, drafted_at, self._clock.now())
            return verified(job, drafted, computed, *times, verdicts, replays)

    def _learn(self, job: StepJob, drafted: DraftsAtHand, verdicts: Sequence[Verdict]) -> None:
        """Pass verdicts to the drafters whose drafts were made in the step."""
        for verdict in verdicts:
            drafter = self.drafters.get(verdict.drafter or "")
            if drafter is not None and verdict.request_id in drafted.by_request:
                draft = drafted.by_request[verdict.request_id][0]
                drafter.learn(job.texts[verdict.request_id].request.sampling, draft, verdict)

    # --- the target -----------------------------------------------------------------------------

    @abstractmethod
    def _compute(
        self,
        job: StepJob,
        drafts: Sequence[tuple[list[int], list[int]]],
        draft_probs: torch.Tensor | None,
    ) -> Computed:
        """Compute a target step. drafts: per item token ids, and rows of draft_probs."""

    @abstractmethod
    def _drop_table(self, request_id: str) -> None:
        """Drop the block table of a request whose KV the scheduler freed."""

    @abstractmethod
    def _forget_in_target(self, request_id: str) -> None:
        """Drop all state of a finished request."""

    # --- drafting -------------------------------------------------------------------------------

    def _carry_out(self, job: StepJob, drafted: DraftsAtHand) -> tuple[Replayed, ...]:
        """Carry out a plan's orders in a batch for each drafter: first those to draft."""
        orders, replays = orders_of(job.plan), list[Replayed]()
        for is_draft, (name, drafter) in itertools.product((True, False), self.drafters.items()):
            mine = [o for o in orders if o.drafter == name and is_draft == (o.max_draft_tokens > 0)]
            if not mine:
                continue
            started_at, made = self._clock.now(), None
            with drafted.without_if_failing(name):
                if drafter.runner is not None:
                    drafter.runner.limit_threads(job.num_threads)
                texts = [job.texts[o.request_id] for o in mine]
                if is_draft:
                    for order, text in zip(mine, texts, strict=True):
                        text.foresee(order.front_token_ids)
                    made = drafter.draft(mine, texts)
                else:
                    replays += drafter.replay(mine, texts)
                seconds = self._clock.now() - started_at
                if made is not None:
                    drafted.add(mine, made)
                drafted.times.append(draft_time(mine, seconds, made))
        return tuple(replays)

    def _hold(self, order: DraftOrder, drafted: DraftsAtHand) -> DraftReady:
        """Keep a lane's draft until its verification."""
        draft, offset = drafted.by_request.pop(order.request_id)
        rows = [r + offset for r in draft.prob_rows if r >= 0]
        probs = drafted.joined_probs() if rows else None
        if probs is not None:
            probs, own = probs[rows], itertools.count()
            rows = [r if r < 0 else next(own) for r in draft.prob_rows]
            draft = replace(draft, prob_rows=rows)
        # One that has ended meanwhile would never be forgotten again.
        if order.request_id in self._texts:
            self._held.hold(order.request_id, order.epoch, order.round, draft, probs)
        return DraftReady(
            order.request_id, order.epoch, order.round, order.drafter, len(draft.token_ids)
        )


class RunnerExecutor(LocalExecutor):
    """Executor whose target is a `ModelRunner`."""

    scores_prompts = True

    def __init__(
        self,
        target: ModelRunner,
        drafters: Sequence[LocalDrafter],
        clock: Clock,
        max_model_len: int,
        num_threads: int = 1,
        cores: Mapping[str, Collection[int]] = MappingProxyType({}),
        head: str | None = None,
    ) -> None:
        """head: name of the drafter that is a part of the target, if there is one."""
        self._tables = BlockTables(target.blocks_for(max_model_len) + 1)
        self._carried: CarriedStates | None = None
        if head is not None:
            self._carried = CarriedStates(target.config.hidden_size, target.device)
            drafters = [HeadDrafter(head, target, self._tables, self._carried), *drafters]
        super().__init__(target, drafters, clock, max_model_len, num_threads, cores)
        self.verifier = Verifier(target)
        self._scores = PromptScores(target)
        self._pools, self._width = PromptPools(), target.config.hidden_size

    def _compute(
        self,
        job: StepJob,
        drafts: Sequence[tuple[list[int], list[int]]],
        draft_probs: torch.Tensor | None,
    ) -> Computed:
        self.target.limit_threads(job.num_threads)
        batch = self._with_states(job, self._batch(job, [tokens for tokens, _ in drafts]))
        if copies := job.plan.copies:
            # They have the last slots, requests the first.
            rows = self._tables.rows([c.request_id for c in copies]).tolist()
            places = [(row, ~c.place, *c[2:]) for row, c in zip(rows, copies, strict=True)]
            batch = replace(batch, copies=places)
        sampled = sampled_of(job, drafts)
        built_at = self._clock.now()
        scores = self.verifier.forward(batch, sampled)
        verified_at = self._clock.now()
        if self._carried is not None:
            self._carried.keep([i.request_id for i in job.plan.items], batch)
        embeddings = self._pools.add(job.plan.items, job.texts, batch)
        for request_id in (i for i, embedding in embeddings.items() if not embedding):
            job.texts[request_id].fail(NOT_FINITE)
        if draft_probs is not None:
            draft_probs = draft_probs.to(self.target.device)
        decided = self.verifier.decide(scores, sampled, draft_probs)
        if self._scores.num_requests:
            decided = [
                d._replace(prompt_logprobs=self._scores.pop(s.text.request.id))
                for s, d in zip(sampled, decided, strict=True)
            ]
        times = built_at, verified_at
        return Computed(sampled, decided, batch.num_tokens, *times, None, embeddings)

    def _carry_out(self, job: StepJob, drafted: DraftsAtHand) -> tuple[Replayed, ...]:
        for item in job.plan.items:  # a head drafts in the step's own blocks
            self._tables.extend(item.request_id, item.epoch, item.new_blocks)
        return super()._carry_out(job, drafted)

    def _drop_table(self, request_id: str) -> None:
        self._tables.drop(request_id)
        if self._carried is not None:
            self._carried.drop(request_id)

    def _forget_in_target(self, request_id: str) -> None:
        self._drop_table(request_id)
        self._scores.release_request(request_id)
        self._pools.release_request(request_id)

    def _batch(self, job: StepJob, drafts: Sequence[list[int]]) -> RaggedBatch:
        writer = BatchWriter()
        items = job.plan.items
        for item, draft in zip(items, drafts, strict=True):
            known = item.start + item.num_scheduled_tokens
            text, start = job.texts[item.request_id], item.start
            if self._scores.wants(text):
                own = [item.request_id]
                tables = self._tables.gather(own, self.target.blocks_for(known))
                self._scores.read(text, start, known, tables, self._slots(own))
                start = known - 1  # of the others everything is known
            tokens = text.tokens(start, known)
            writer.add(start, tokens + draft, len(draft) + 1 if item.samples else 0)
        num_blocks, ids = self.target.blocks_for(writer.longest), [i.request_id for i in items]
        return writer.batch(self._tables.gather(ids, num_blocks), self._slots(ids))

    def _with_states(self, job: StepJob, batch: RaggedBatch) -> RaggedBatch:
        """Return the batch with the states that its pass takes, and is to keep."""
        items, pooled = job.plan.items, self._pools.rows(job.plan.items, job.texts, batch)
        if self._carried is not None:
            carry = self._carried.carry([i.request_id for i in items], batch, pooled)
            return replace(batch, carry=carry)
        if not len(pooled):
            return batch
        before = torch.zeros(len(items), self._width, device=self.target.device)
        return replace(batch, carry=Carry(before, pooled))

    def _slots(self, request_ids: Sequence[str]) -> IntArray | None:
        """Return the places of the requests' recurrent states, if the target has some."""
        return None if self.target.num_slots is None else self._tables.rows(request_ids)
