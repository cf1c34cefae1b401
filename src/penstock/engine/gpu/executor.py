"""Draft and verification in one go on a GPU: the host waits once for a step, at its end, and while
it does so the next one is under way.

Everything that a step needs but the draft tokens is known before it starts, and these need never
leave the device on their way from the drafter to the target. The host fetches them together with
the target's samples, and compares. On the CPU the same code is simply carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from penstock.core.loop import Clock
from penstock.core.types import DraftOrder, DraftTime, VerifyItem
from penstock.engine.batch import RaggedBatch
from penstock.engine.drafters.base import LocalDrafter
from penstock.engine.drafters.drafts import Draft, Drafts
from penstock.engine.executor import RunnerExecutor
from penstock.engine.gpu.drafter import GraphDrafter
from penstock.engine.gpu.graphs import GraphRunner, Late
from penstock.engine.gpu.rounds import (
    Answer,
    Entry,
    InFlightRound,
    Stopwatch,
    draws_of,
    flat,
    next_batch,
)
from penstock.engine.sequences import SamplingTable, TokenBuffer
from penstock.engine.steps import (
    Done,
    DraftsAtHand,
    StepJob,
    StepMarks,
    draft_time,
    joined,
    sampled_of,
    verdicts_of,
    verified,
)
from penstock.engine.verifier import Samples


@dataclass(frozen=True, slots=True)
class _Started:
    """Drafts that are being made. request_ids: of each drafter; tokens: [requests, steps] each."""

    watch: Stopwatch
    drafted: DraftsAtHand = field(default_factory=DraftsAtHand)
    request_ids: list[list[str]] = field(default_factory=list)
    tokens: list[torch.Tensor] = field(default_factory=list)

    def places(self) -> dict[str, int]:
        """Where each request's draft begins once all are laid end to end."""
        place: dict[str, int] = {}
        offset = 0
        for ids, tokens in zip(self.request_ids, self.tokens, strict=True):
            place |= {id_: offset + i * tokens.shape[1] for i, id_ in enumerate(ids)}
            offset += tokens.numel()
        return place


class _Behind(NamedTuple):
    """What the device alone knows of the requests of the next round: a `VerifyOutcome`, if any is
    `short` of what was planned for by at most `most_short` tokens."""

    known: torch.Tensor
    short: torch.Tensor | None
    most_short: int


class _Following(NamedTuple):
    """A request of the next round. end: position of its last token if all that counts of the draft
    under way, `num_counted` tokens, is accepted; num_drafted: of the next draft."""

    item: VerifyItem
    text: TokenBuffer
    row: int
    num_counted: int
    end: int
    num_drafted: int
    drafter: str


class GraphExecutor(RunnerExecutor):
    """Carries out a step whose drafts and verification are all captured without waiting between
    them, and every other step as `RunnerExecutor` does.

    runs_ahead: while the device is at such a step, it is given another round of the same requests
    and draft lengths, whatever the step may come to. The plan that follows mostly asks for just
    that: what it asks for is taken from there, and the rest is done besides.
    """

    def __init__(
        self,
        target: GraphRunner,
        drafters: Sequence[LocalDrafter],
        clock: Clock,
        max_model_len: int,
        num_threads: int = 1,
        stream: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        runs_ahead: bool = False,
    ) -> None:
        super().__init__(target, drafters, clock, max_model_len, num_threads, stream)
        self._graphs = target
        self._graph_drafters = {d.name: d for d in drafters if isinstance(d, GraphDrafter)}
        self._sampling = SamplingTable()
        self.runs_ahead = runs_ahead
        self._ahead: InFlightRound | None = None
        self.num_rounds_ahead = 0
        """Target steps that had begun before they were planned."""

    def _verify_batch(self, job: StepJob) -> Done:
        ahead, self._ahead = self._ahead, None
        items = job.plan.items
        if ahead is not None:
            mine = tuple(i for i in items if ahead.answers(i))
            if mine:
                self.num_rounds_ahead += 1
                return self._go_on(job, ahead, mine)
        if not self._runs_as_graphs(job):
            return super()._verify_batch(job)
        begun = self._start_planned(job)
        return self._end(job, begun, items)

    def _go_on(self, job: StepJob, ahead: InFlightRound, mine: tuple[VerifyItem, ...]) -> Done:
        """Take what the round that is under way answers, and do the rest of the plan."""
        for item in mine:
            self._tables.extend(item.request_id, item.epoch, item.new_blocks)
            if item.draft is not None and item.draft.drafter in self._graph_drafters:
                self._graph_drafters[item.draft.drafter].extend(item.draft)
        return self._end(job, ahead, mine)

    def _end(self, job: StepJob, begun: InFlightRound, mine: tuple[VerifyItem, ...]) -> Done:
        """Wait for a round that answers some items, with the next one behind it; and then, if
        there is more to the plan than these, do that."""
        plan, named = job.plan, {i.request_id for i in mine}
        rest = tuple(i for i in plan.items if i.request_id not in named)
        if not rest and not plan.drafts:
            self._ahead = self._start_next(job, begun)
            return self._conclude(job, begun)
        done = self._conclude(replace(job, plan=plan._replace(items=mine, drafts=())), begun)
        others = replace(job, plan=plan._replace(items=rest), receiving_since=None)
        if rest:
            return joined(plan, done, super()._verify_batch(others))
        return joined(plan, done, self._replayed(others))

    def _replayed(self, job: StepJob) -> Done:
        """A plan of nothing but orders that read."""
        started_at, drafted = self._clock.now(), DraftsAtHand()
        replays = self._carry_out(job, drafted)
        ended_at = self._clock.now()
        marks = StepMarks(started_at, ended_at, ended_at, ended_at - started_at)
        return verified(job, drafted, (), 0, marks, replays)

    def _runs_as_graphs(self, job: StepJob) -> bool:
        """Whether nothing in the step has to look at a draft, or at logits, before its end. What
        only reads comes after it."""
        items = job.plan.items
        counts = [i.num_scheduled_tokens + i.num_draft_tokens for i in items]
        if not items or not self._graphs.holds(sum(counts), max(counts)):
            return False
        if not all(i.samples for i in items):
            return False
        texts = [job.texts[i.request_id] for i in items]
        if any(t.request.sampling.num_logprobs is not None for t in texts):
            return False
        params, ratio = self._sampling.of(texts)
        has_draft = np.array([i.num_draft_tokens > 0 for i in items])
        return params.is_plain and not (ratio & has_draft).any()

    # --- a round as planned ---------------------------------------------------------------------

    def _start_planned(self, job: StepJob) -> InFlightRound:
        started_at, items = self._clock.now(), job.plan.items
        started = self._start_drafts(job)
        for held in job.recalled:
            started.drafted.hold(*held)
        drafts = [started.drafted.draft_of(item)[0] for item in items]
        batch = self._batch(job, drafts)
        places, place = np.full(batch.num_tokens, -1, dtype=np.int32), started.places()
        entries, row = [], 0
        for item, tokens, end in zip(items, drafts, batch.query_start[1:], strict=True):
            start = item.start + item.num_scheduled_tokens - 1
            entry = Entry(item.request_id, item.epoch, start, row, tokens, item.drafter)
            entry.place = place.get(item.request_id)
            if entry.place is not None:
                places[end - len(tokens) : end] = np.arange(entry.place, entry.place + len(tokens))
            entries.append(entry)
            row += len(tokens) + 1
        late = Late(places, flat(started.tokens)) if started.tokens else None
        texts = [job.texts[i.request_id] for i in items]
        return self._start_target(batch, texts, entries, late, started, started_at)

    def _start_drafts(self, job: StepJob) -> _Started:
        """Have all drafts made. Those that will come later stand as zeros for the time being."""
        started = _Started(Stopwatch(self._graphs.device, self._clock))
        drafted = started.drafted
        orders = [i.draft for i in job.plan.items if i.draft is not None]
        for name, drafter in self.drafters.items():
            mine = [o for o in orders if o.drafter == name]
            if not mine:
                continue
            texts = [job.texts[o.request_id] for o in mine]
            with drafted.without_if_failing(name):
                with started.watch:
                    tokens, drafts = self._begin(drafter, mine, texts)
                if tokens is not None:
                    started.request_ids.append([o.request_id for o in mine])
                    started.tokens.append(tokens)
                drafted.add(mine, drafts)
                drafted.times.append(draft_time(mine, 0.0, drafts))
        return started

    def _begin(
        self, drafter: LocalDrafter, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]
    ) -> tuple[torch.Tensor | None, Drafts]:
        """Tokens that are being made, with zeros in their place, or None and finished drafts."""
        graphs = self._graph_drafters.get(drafter.name)
        tokens = None if graphs is None else graphs.start(orders, texts)
        if tokens is None:
            return None, drafter.draft(orders, texts)
        lengths = [o.max_draft_tokens for o in orders]
        return tokens, Drafts([Draft([0] * n, [-1] * n) for n in lengths])

    def _start_target(
        self,
        batch: RaggedBatch,
        texts: Sequence[TokenBuffer],
        entries: Sequence[Entry],
        late: Late | None,
        started: _Started,
        started_at: float,
        most_short: int = 0,
    ) -> InFlightRound:
        """Start the target on a batch, behind its drafts."""
        params, _ = self._sampling.of(list(texts))
        counts = [len(e.tokens) + 1 for e in entries]
        positions = batch.positions[batch.logits_rows].astype(np.int64) + 1
        draws = draws_of(params, np.arange(len(counts)).repeat(counts), positions, most_short)
        stepped = self._graphs.step(batch, draws, late)
        tokens = flat([*started.tokens, stepped.samples])
        num_drafted = tokens.numel() - stepped.samples.numel()
        return InFlightRound(
            {e.request_id: e for e in entries},
            batch,
            stepped,
            Answer(tokens, self._graphs.device),
            num_drafted,
            started.drafted,
            started.watch,
            started_at,
        )

    def _conclude(self, job: StepJob, begun: InFlightRound) -> Done:
        """Wait for a round, and decide on the plan's items, all of which it answers."""
        items, clock = job.plan.items, self._clock
        samples = begun.fetch()
        verified_at = clock.now()
        chosen: list[int] = []
        drafts: list[tuple[list[int], list[int]]] = []
        for item in items:
            entry = begun.entries[item.request_id]
            tokens = entry.tokens[: item.num_draft_tokens]
            drafts.append((tokens, [-1] * len(tokens)))
            chosen += samples[entry.row : entry.row + len(tokens) + 1]
        sampled = sampled_of(job, drafts)
        decided = self._verifier.decide(Samples(chosen), sampled, None)
        verdicts = verdicts_of(items, sampled, decided)
        finished_at = clock.now()
        if self._ahead is not None:
            self._ahead.begin(items, verdicts, finished_at)
        draft_s = sum(t.seconds for t in begun.drafted.times)
        marks = StepMarks(begun.started_at, verified_at, finished_at, draft_s)
        return verified(job, begun.drafted, verdicts, begun.batch.num_tokens, marks)

    # --- the round after it ---------------------------------------------------------------------

    def _start_next(self, job: StepJob, before: InFlightRound) -> InFlightRound | None:
        """Start another round of the plan's requests behind one that is not over. Not where more
        requests are there, which the next plan will probably bring in; nor where the host has to
        look at something between the rounds."""
        items = job.plan.items
        is_alone = len(self._texts) == len(items)
        if not self.runs_ahead or not is_alone or job.recalled or before.drafted.failed:
            return None
        if not before.is_aligned or any(
            i.draft is not None and before.entries[i.request_id].place is None for i in items
        ):
            return None
        following = self._following(job, before)
        counts = [f.num_drafted + 1 for f in following]
        if not following or not self._graphs.holds(sum(counts), max(counts)):
            return None
        rows = np.array([f.row for f in following], dtype=np.int32)
        limits = np.array([f.num_counted for f in following], dtype=np.int32)
        most_short = int(limits.max())
        short, known = self._graphs.outcome(before.stepped, rows, limits)
        behind = _Behind(known, short if most_short else None, most_short)
        started = self._start_next_drafts(following, behind)
        if started.drafted.failed:
            return None
        return self._start_next_target(following, behind, started)

    def _following(self, job: StepJob, before: InFlightRound) -> list[_Following]:
        """Who goes on, those of one drafter side by side; nobody where memory does not hold all."""
        following = []
        for item in job.plan.items:
            text, entry = job.texts[item.request_id], before.entries[item.request_id]
            left = text.request.prompt_len + text.request.max_tokens - text.length
            if left <= 1:
                continue
            num_counted = min(len(entry.tokens), item.num_draft_tokens)
            end = item.start + item.num_scheduled_tokens + num_counted
            room = self._tables.num_blocks(item.request_id) * self._graphs.block_size
            room = min(room, self._graphs.num_positions) - end - 1
            if room < 0:
                return []
            num_drafted, drafter = 0, ""
            if item.draft is not None:
                drafter = item.draft.drafter
                room = min(room, self._graph_drafters[drafter].room(item.request_id) - end)
                num_drafted = max(0, min(item.num_draft_tokens, room))
            drafter = drafter if num_drafted else ""
            following.append(
                _Following(item, text, entry.row, num_counted, end, num_drafted, drafter)
            )
        return sorted(following, key=lambda f: f.drafter)

    def _start_next_drafts(self, following: Sequence[_Following], behind: _Behind) -> _Started:
        started, first = _Started(Stopwatch(self._graphs.device, self._clock)), 0
        for name, group in groupby(following, key=lambda f: f.drafter):
            mine = list(group)
            last = first + len(mine)
            drafter = self._graph_drafters.get(name)
            if drafter is not None:
                limits = np.array([f.num_drafted for f in mine], dtype=np.int32)
                with started.drafted.without_if_failing(name), started.watch:
                    tokens = drafter.start_next(
                        [f.text for f in mine],
                        np.array([f.end for f in mine], dtype=np.int32),
                        limits,
                        behind.known[2 * first : 2 * last],
                        None if behind.short is None else behind.short[first:last],
                        behind.most_short,
                    )
                    started.request_ids.append([f.item.request_id for f in mine])
                    started.tokens.append(tokens)
                    steps, num_read = int(limits.max()), 2 * len(mine)
                    started.drafted.times.append(DraftTime(name, len(mine), steps, num_read, 0.0))
            first = last
        return started

    def _start_next_target(
        self, following: Sequence[_Following], behind: _Behind, started: _Started
    ) -> InFlightRound:
        counts = np.array([f.num_drafted + 1 for f in following], dtype=np.int32)
        ends = np.array([f.end for f in following], dtype=np.int32)
        num_blocks = -(-int((ends + counts).max()) // self._graphs.block_size)
        tables = self._tables.gather([f.item.request_id for f in following], num_blocks)
        batch = next_batch(ends, counts, tables, last_only=False)
        places, place = np.empty(batch.num_tokens, dtype=np.int32), started.places()
        entries, first_draft = [], behind.known.numel()
        for n, (f, row) in enumerate(zip(following, batch.query_start.tolist(), strict=False)):
            item = f.item
            entry = Entry(item.request_id, item.epoch, -1, row, [0] * f.num_drafted, f.drafter)
            places[row] = 2 * n + 1
            entry.place = place.get(item.request_id)
            if entry.place is not None:
                first = first_draft + entry.place
                places[row + 1 : row + 1 + f.num_drafted] = np.arange(first, first + f.num_drafted)
            entries.append(entry)
        late = Late(places, flat([behind.known, *started.tokens]), behind.short)
        texts, now = [f.text for f in following], self._clock.now()
        return self._start_target(batch, texts, entries, late, started, now, behind.most_short)
