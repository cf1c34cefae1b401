"""Jobs and totals of an executor's steps, and drafts until their verification."""

from __future__ import annotations

import contextlib
import logging
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import torch

from penstock.core.learn.times import step_work
from penstock.core.types import (
    STEP_TOKENS,
    DraftOrder,
    DraftTime,
    Failure,
    GroupTokens,
    PhaseTimes,
    Replayed,
    StepPlan,
    StepResult,
    Verdict,
    VerifyItem,
)
from penstock.engine.drafters.drafts import Draft, Drafts
from penstock.engine.lanes import Ticket
from penstock.engine.runner import Model
from penstock.engine.sampling.filters import NO_TOKEN
from penstock.engine.sequences import TokenBuffer
from penstock.engine.verifier import Decided, Drafted

NO_DRAFT = Draft([], [])
MOST_FAILURES = 3
"""Failed steps or calls in a row after which a drafter gets no orders."""

NOT_FINITE = (
    "the model's logits are not finite (NaN or infinity): its weights are broken, or need a wider "
    "dtype"
)

_log = logging.getLogger(__name__)


Weights = tuple[Sequence[int], Sequence[int]]
"""Token ids and positive integer weights: the distribution of one draft token.

Other tokens have probability 0."""

Sink = Callable[[Sequence[DraftOrder], Mapping[str, TokenBuffer]], None]


class RemoteOrders:
    """Passes orders to the connection of the draft servers."""

    def __init__(self) -> None:
        self._sink: Sink | None = None
        self._sent: list[StepResult] = []
        self._known: set[str] = set()
        self._sent_at: dict[str, float] = {}

    def connect(self, sink: Sink) -> None:
        """Call `sink` with the orders of one lane, and the texts of requests that are new to it."""
        self._sink = sink

    def send(self, plan: StepPlan, texts: Mapping[str, TokenBuffer], now: float) -> None:
        """Send the orders, which ends the step."""
        self.end(plan, now)
        if self._sink is None:
            return
        news = {o.request_id: texts[o.request_id] for o in plan.drafts}
        news = {i: text for i, text in news.items() if i not in self._known}
        self._known.update(news)
        if plan.drafts:
            self._sink(plan.drafts, news)

    def end(self, plan: StepPlan, now: float) -> None:
        """End the step of orders that are on their way."""
        self._sent.append(StepResult(plan.id, plan.lane, started_at=now, finished_at=now))
        self._sent_at.update((o.request_id, now) for o in plan.drafts if o.max_draft_tokens)

    def take_sent(self) -> list[StepResult]:
        """Return results of the steps sent since the last call."""
        sent, self._sent = self._sent, []
        return sent

    def oldest(self, items: Sequence[VerifyItem]) -> float | None:
        """Return the earliest sending time of the orders that decoding items waited for, if any."""
        sent = [(self._sent_at.pop(i.request_id, None), i.num_scheduled_tokens) for i in items]
        # One that prefills has been preempted meanwhile: it waited for memory.
        waited = (at for at, num_tokens in sent if at is not None and num_tokens == 1)
        return min(waited, default=None)

    def release_request(self, request_id: str) -> None:
        self._known.discard(request_id)
        self._sent_at.pop(request_id, None)


class _Held(NamedTuple):
    epoch: int
    round: int
    draft: Draft
    probs: torch.Tensor | None
    weights: Sequence[Weights] | None


class HeldDrafts:
    """At most one draft per request, by epoch and round; dropped with the request's next step."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}

    def __len__(self) -> int:
        return len(self._held)

    def hold(
        self,
        request_id: str,
        epoch: int,
        round_: int,
        draft: Draft,
        probs: torch.Tensor | None = None,
        weights: Sequence[Weights] | None = None,
    ) -> None:
        """Keep a draft, with dense distributions or weights, unless a newer one is there."""
        old = self._held.get(request_id)
        if old is None or (old.epoch, old.round) <= (epoch, round_):
            self._held[request_id] = _Held(epoch, round_, draft, probs, weights)

    def pop_draft(
        self, item: VerifyItem, target: Model
    ) -> tuple[Draft, torch.Tensor | None] | None:
        """Return the draft of an item's epoch and round, with its distributions [tokens, V]."""
        held = self._held.pop(item.request_id, None)
        if held is None or (held.epoch, held.round) != (item.epoch, item.round):
            return None
        if held.weights is None:
            return held.draft, held.probs
        num_tokens = len(held.draft.token_ids)
        return Draft(held.draft.token_ids, list(range(num_tokens))), _dense(held.weights, target)

    def release_request(self, request_id: str) -> None:
        self._held.pop(request_id, None)


def _dense(weights: Sequence[Weights], target: Model) -> torch.Tensor:
    """Return [rows, V] float32; exact where the weights sum to a power of two up to 2^24."""
    rows = torch.zeros(len(weights), target.vocab_size)
    for row, (ids, values) in zip(rows, weights, strict=True):
        row[list(ids)] = torch.tensor(values, dtype=torch.float32) / sum(values)
    return rows.to(target.device)


@dataclass(slots=True)
class DraftsAtHand:
    """Drafts of a step by request, with the distributions of each drafter's batch."""

    by_request: dict[str, tuple[Draft, int]] = field(default_factory=dict)
    probs: list[torch.Tensor] = field(default_factory=list)
    num_probs: int = 0
    times: list[DraftTime] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)
    """Drafters that have failed in this step."""
    unread: list[str] = field(default_factory=list)
    """Requests whose draft was made without reading their text."""

    @contextlib.contextmanager
    def without_if_failing(self, drafter: str) -> Iterator[None]:
        """Log and note an error of a drafter, so that the step goes on without it."""
        try:
            yield
        except Exception as error:
            _log.warning("drafter %s failed: %s: %s", drafter, type(error).__name__, error)
            self.failed.add(drafter)

    def add(self, orders: Sequence[DraftOrder], drafts: Drafts) -> None:
        for order, draft in zip(orders, drafts.drafts, strict=True):
            self.by_request[order.request_id] = (draft, self.num_probs)
            if draft.is_unread:
                self.unread.append(order.request_id)
        if drafts.probs is not None:
            self.probs.append(drafts.probs)
            self.num_probs += drafts.probs.shape[0]

    def hold(self, request_id: str, draft: Draft, probs: torch.Tensor | None) -> None:
        """Add a draft of an earlier step."""
        self.by_request[request_id] = (draft, self.num_probs)
        if probs is not None:
            self.probs.append(probs)
            self.num_probs += probs.shape[0]

    def draft_of(self, item: VerifyItem) -> tuple[list[int], list[int]]:
        """Return token ids, and rows of the joined `probs`, of an item's draft."""
        if not self.by_request:
            return list(item.token_ids), [-1] * len(item.token_ids)
        draft, offset = self.by_request.get(item.request_id, (NO_DRAFT, 0))
        rows = [r if r < 0 else r + offset for r in draft.prob_rows]
        tokens, rows = [*item.token_ids, *draft.token_ids], [-1] * len(item.token_ids) + rows
        return tokens[: item.num_draft_tokens], rows[: item.num_draft_tokens]

    def joined_probs(self) -> torch.Tensor | None:
        # Of drafters on several devices: on that of the first.
        return torch.cat([p.to(self.probs[0].device) for p in self.probs]) if self.probs else None


@dataclass(slots=True)
class StepJob:
    """A plan with all data that its thread may read. num_threads: for the kernels."""

    plan: StepPlan
    texts: Mapping[str, TokenBuffer]
    tickets: Sequence[Ticket]
    recalled: Sequence[tuple[str, Draft, torch.Tensor | None]]
    receiving_since: float | None
    num_threads: int

    @contextlib.contextmanager
    def models(self) -> Iterator[None]:
        """Hold the models that the plan uses."""
        try:
            for ticket in self.tickets:
                ticket.begin()
            yield
        finally:
            for ticket in self.tickets:
                ticket.end()


@dataclass(slots=True)
class Done:
    """A finished plan. Drafts of a lane are held from when this is collected."""

    plan: StepPlan
    result: StepResult
    drafted: DraftsAtHand


class Computed(NamedTuple):
    """The target's results of a step.

    sampled, decided: of items that sample; num_rows: of the batch; built_at, verified_at: start and
    end of the forward pass; decoded: of the decode group; embeddings: by request."""

    sampled: Sequence[Drafted]
    decided: Sequence[Decided]
    num_rows: int
    built_at: float
    verified_at: float
    decoded: GroupTokens | None = None
    embeddings: Mapping[str, bytes] = MappingProxyType({})


@dataclass(slots=True)
class Totals:
    """Totals of all steps so far.

    phases: seconds of target steps; plan_s: seconds from the start of their turns to their start;
    drafter_seconds: of drafting and reading; steps_by_tokens: histogram of target steps over
    STEP_TOKENS; num_step_tokens: tokens of those steps."""

    drafter_seconds: dict[str, float]
    num_target_steps: int = 0
    steps_by_tokens: list[int] = field(default_factory=lambda: [0] * (len(STEP_TOKENS) + 1))
    num_step_tokens: int = 0
    phases: PhaseTimes = field(default_factory=PhaseTimes)
    plan_s: float = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds of target steps inside models and samplers; the rest of a turn is the host's."""
        return self.phases.draft + self.phases.verify + self.phases.sample

    def add(self, plan: StepPlan, result: StepResult) -> None:
        for timed in result.draft_times:
            self.drafter_seconds[timed.drafter] += timed.seconds
        if num_tokens := plan.num_rows:
            self.num_target_steps += 1
            self.steps_by_tokens[bisect_left(STEP_TOKENS, num_tokens)] += 1
            self.num_step_tokens += num_tokens
            self.plan_s += result.started_at - plan.created_at
            self.phases = PhaseTimes(*map(sum, zip(self.phases, result.phases, strict=True)))


class Failures:
    """Drafters that fail in several steps in a row."""

    def __init__(self) -> None:
        self._num: Counter[str] = Counter()
        self._broken: list[str] = []

    def note(self, drafter: str, *, has_failed: bool) -> None:
        """Note a step in which the drafter was used."""
        self._num[drafter] = self._num[drafter] + 1 if has_failed else 0
        if self._num[drafter] == MOST_FAILURES:
            self._broken.append(drafter)

    def pop(self) -> list[str]:
        """Return drafters that have reached the limit, once each."""
        broken, self._broken = self._broken, []
        return broken


def orders_of(plan: StepPlan) -> list[DraftOrder]:
    """Return all draft orders of a plan, those of its items included."""
    return [*plan.drafts, *(i.draft for i in plan.items if i.draft is not None)]


def draft_time(
    orders: Sequence[DraftOrder], seconds: float, drafts: Drafts | None = None
) -> DraftTime:
    """Return the time of orders that one drafter carried out together.

    drafts: their results; None: the orders only read."""
    done, num_steps = list(orders), None
    if drafts is not None:
        num_steps = drafts.num_steps
        done = [o for o, d in zip(orders, drafts.drafts, strict=True) if not d.is_unread]
    if num_steps is None:
        num_steps = max(o.max_draft_tokens for o in orders)
    return DraftTime(
        drafter=orders[0].drafter,
        batch=max(1, len(done)),
        steps=num_steps,
        num_catch_up_tokens=sum(o.num_catch_up_tokens for o in done),
        seconds=seconds,
    )


def sampled_of(job: StepJob, drafts: Sequence[tuple[list[int], list[int]]]) -> list[Drafted]:
    """Return the items that sample. drafts: of all items, in their order."""
    return [
        Drafted(job.texts[item.request_id], item.start + item.num_scheduled_tokens, *draft)
        for item, draft in zip(job.plan.items, drafts, strict=True)
        if item.samples
    ]


def verdicts_of(items: Sequence[VerifyItem], computed: Computed) -> tuple[Verdict, ...]:
    """Return verdicts, and append what was decided to the texts, up to the output's end.

    Chunks of prefill yield empty verdicts, but the last one of an embedding."""
    verdicts = []
    answers = zip(computed.sampled, computed.decided, strict=True)
    for item in items:
        if item.samples:
            verdicts.append(_verdict_of(item, *next(answers)))
        else:
            embedding = computed.embeddings.get(item.request_id, b"")
            verdicts.append(Verdict(item.request_id, item.epoch, item.round, embedding=embedding))
    return tuple(verdicts)


def _verdict_of(item: VerifyItem, drafted: Drafted, answer: Decided) -> Verdict:
    if not _is_finite(answer):
        drafted.text.fail(NOT_FINITE)
        answer = Decided([], 0, 0)
    end = drafted.text.append_output(answer.token_ids)
    most = len(answer.token_ids) if end is None else end.num_tokens
    num_drafted = len(drafted.token_ids)
    # Positions behind the end say nothing.
    num_proposed = num_drafted if end is None else min(num_drafted, most)
    num_looked_up = min(item.num_looked_up, num_proposed)
    return Verdict(
        request_id=item.request_id,
        epoch=item.epoch,
        round=item.round,
        token_ids=tuple(answer.token_ids[:most]),
        drafter=item.drafter if num_proposed else None,
        num_proposed=num_proposed,
        num_accepted=min(answer.num_accepted, num_proposed),
        num_looked_up=num_looked_up,
        num_decided=max(0, min(answer.num_decided, num_proposed) - num_looked_up),
        evidence=float(sum(answer.evidence[num_looked_up:num_proposed])),
        evidence_all=float(sum(answer.evidence_all[:num_proposed])),
        logprobs=answer.logprobs[:most],
        prompt_logprobs=answer.prompt_logprobs,
        forced_token_ids=drafted.text.forced() if end is None else (),
        finish_reason=None if end is None else end.reason,
        num_stop_chars=0 if end is None else end.num_stop_chars,
        num_behind_end=num_drafted - num_proposed,
    )


def _is_finite(answer: Decided) -> bool:
    known = answer.prompt_logprobs
    return NO_TOKEN not in answer.token_ids and not any(math.isnan(p.logprob) for p in known)


def verified(
    job: StepJob,
    drafted: DraftsAtHand,
    computed: Computed,
    started_at: float,
    drafted_at: float,
    finished_at: float,
    verdicts: Sequence[Verdict] = (),
    replays: Sequence[Replayed] = (),
) -> Done:
    """Return a finished target step. drafted_at: when its drafts were made."""
    plan, since = job.plan, job.receiving_since
    result = StepResult(
        plan_id=plan.id,
        lane=plan.lane,
        started_at=started_at,
        finished_at=finished_at,
        verdicts=tuple(verdicts),
        replays=tuple(replays),
        failures=tuple(_failures(job)),
        phases=PhaseTimes(
            draft=drafted_at - started_at,
            receive=0.0 if since is None else started_at - since,
            verify=computed.verified_at - computed.built_at,
            sample=finished_at - computed.verified_at,
            other=computed.built_at - drafted_at,
        ),
        draft_times=tuple(drafted.times),
        num_rows=computed.num_rows,
        work=step_work(plan, verdicts),
        work_seconds=finished_at - drafted_at,
        failed_drafters=tuple(sorted(drafted.failed)),
        unread=tuple(drafted.unread),
        decoded=computed.decoded,
    )
    return Done(plan, result, drafted)


def _failures(job: StepJob) -> Iterator[Failure]:
    """Return requests that cannot go on, with the reason."""
    for item in job.plan.items:
        problem = job.texts[item.request_id].problem
        if problem is not None:
            yield Failure(item.request_id, item.epoch, problem)
