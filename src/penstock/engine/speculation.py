"""Draft and verification in one go on a GPU: the host waits once for a step, at its end.

Everything that a step needs but the draft tokens is known before it starts, and these need never
leave the device on their way from the drafter to the target. The host fetches them together with
the target's samples, and compares. On the CPU the same code is simply carried out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from penstock.core.ports import Clock
from penstock.core.types import DraftOrder
from penstock.engine.batch import RaggedBatch
from penstock.engine.drafters.base import Draft, Drafts, LocalDrafter
from penstock.engine.drafters.model import ModelDrafter
from penstock.engine.executor import LocalExecutor
from penstock.engine.graphs import Draws, GraphRunner
from penstock.engine.sampling import Sampler, SamplingRows, sample_coupled
from penstock.engine.sampling.noise import Salt, row_keys
from penstock.engine.sampling.params import IntArray
from penstock.engine.sequences import SamplingTable, TokenBuffer
from penstock.engine.static import MAX_WINDOW
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


class GraphDrafter(ModelDrafter):
    """A model whose drafting loop is one recording, for requests that are verified by equality."""

    def __init__(
        self,
        name: str,
        runner: GraphRunner,
        max_model_len: int,
        sample: Sampler = sample_coupled,
        vocab: int | None = None,
    ) -> None:
        """sample: for replays."""
        super().__init__(name, runner, max_model_len, sample, vocab)
        self._graphs = runner

    def draft(self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]) -> Drafts:
        drafted = self.start(orders, texts)
        if drafted is None:
            return super().draft(orders, texts)
        rows = drafted.tolist()
        tokens = [row[: o.max_draft_tokens] for row, o in zip(rows, orders, strict=True)]
        return Drafts([Draft(t, [-1] * len(t)) for t in tokens])

    @torch.inference_mode()
    def start(
        self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]
    ) -> torch.Tensor | None:
        """Draft without waiting: [orders, most tokens] int32 on the device, of which each order's
        own number counts. None, and nothing done, where only the ordinary way can."""
        params, ratio = self._sampling.of(list(texts))
        limits = np.array([o.max_draft_tokens for o in orders], dtype=np.int32)
        if ratio.any() or params.has_filters or limits.min() < 1:
            return None
        for order in orders:
            self._tables.extend(order.request_id, order.epoch, order.new_blocks)
        reach = max(o.start + o.num_catch_up_tokens + o.max_draft_tokens for o in orders)
        orders = self._read_ahead(orders, texts, reach)
        first = self._catch_up(orders, texts, [1] * len(orders), reach)
        steps = int(limits.max())
        positions = first.seq_lens.astype(np.int64) + np.arange(steps)[:, None]
        draws = draws_of(params, np.tile(np.arange(len(orders)), steps), positions.reshape(-1))
        return self._graphs.draft(first, limits, draws, self._num_guessed)

    def _read_ahead(
        self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer], reach: int
    ) -> list[DraftOrder]:
        """Read what is too long for a recording, a prompt mostly; returns orders for the rest."""
        long = [i for i, o in enumerate(orders) if o.num_catch_up_tokens > MAX_WINDOW]
        rest = list(orders)
        if long:
            read = [
                orders[i]._replace(num_catch_up_tokens=orders[i].num_catch_up_tokens - 1)
                for i in long
            ]
            self._graphs.forward(
                self._catch_up(read, [texts[i] for i in long], [0] * len(long), reach)
            )
            for i, done in zip(long, read, strict=True):
                start = done.start + done.num_catch_up_tokens
                rest[i] = orders[i]._replace(start=start, num_catch_up_tokens=1)
        return rest


@dataclass(frozen=True, slots=True)
class _Started:
    """Drafts that are being made. orders: those of each drafter; tokens: [orders, steps] each."""

    orders: list[list[DraftOrder]]
    tokens: list[torch.Tensor]


class DeviceExecutor(LocalExecutor):
    """Carries out a step whose drafts and verification are all recorded without waiting between
    them, and every other step as `LocalExecutor` does."""

    def __init__(
        self,
        target: GraphRunner,
        drafters: Sequence[LocalDrafter],
        clock: Clock,
        max_model_len: int,
        sample: Sampler = sample_coupled,
        num_threads: int = 1,
    ) -> None:
        super().__init__(target, drafters, clock, max_model_len, sample, num_threads)
        self._graphs = target
        self._sampling = SamplingTable()

    def _verify_batch(self, job: Job) -> Done:
        if not self._is_recorded(job):
            return super()._verify_batch(job)
        plan, clock = job.plan, self._clock
        started_at = clock.now()
        watch = _Stopwatch(self._graphs.device, clock)
        started, drafted = self._start(job, watch)
        for held in job.recalled:
            drafted.hold(*held)
        drafts = [drafted.draft_of(item) for item in plan.items]
        batch = self._batch(job, [tokens for tokens, _ in drafts])
        samples = self._step(job, batch, started, drafts)
        verified_at = clock.now()
        sampled = sampled_of(job, drafts)
        verdicts = verdicts_of(plan.items, sampled, self._verifier.decide(samples, sampled, None))
        finished_at = clock.now()
        drafted.times = [replace(t, seconds=watch.seconds(n)) for n, t in enumerate(drafted.times)]
        draft_s = sum(t.seconds for t in drafted.times)
        marks = StepMarks(started_at, verified_at, finished_at, draft_s)
        return verified(job, drafted, verdicts, batch.num_tokens, marks)

    def _is_recorded(self, job: Job) -> bool:
        """Whether nothing in the step has to look at a draft, or at logits, before its end."""
        items, orders = job.plan.items, orders_of(job.plan)
        counts = [i.num_scheduled_tokens + i.num_draft_tokens for i in items]
        if not items or not self._graphs.holds(sum(counts), max(counts)):
            return False
        if not all(i.samples for i in items) or not all(o.max_draft_tokens for o in orders):
            return False
        texts = [job.texts[i.request_id] for i in items]
        if any(t.request.sampling.num_logprobs is not None for t in texts):
            return False
        params, ratio = self._sampling.of(texts)
        return not ratio.any() and not params.has_filters

    def _start(self, job: Job, watch: _Stopwatch) -> tuple[_Started, DraftsAtHand]:
        """Have all drafts made. Those that will come later stand as zeros for the time being."""
        drafted, started = DraftsAtHand(), _Started([], [])
        orders = orders_of(job.plan)
        for name, drafter in self.drafters.items():
            mine = [o for o in orders if o.drafter == name]
            if not mine:
                continue
            texts = [job.texts[o.request_id] for o in mine]
            with drafted.without_if_failing(name):
                with watch:
                    tokens, drafts = _begin(drafter, mine, texts)
                if tokens is not None:
                    started.orders.append(mine)
                    started.tokens.append(tokens)
                drafted.add(mine, drafts)
                drafted.times.append(draft_time(mine, 0.0))
        return started, drafted

    def _step(
        self,
        job: Job,
        batch: RaggedBatch,
        started: _Started,
        drafts: Sequence[tuple[list[int], list[int]]],
    ) -> list[int]:
        """All samples. Drafts that came late take the place of the zeros that stood for them."""
        items = job.plan.items
        params, _ = self._sampling.of([job.texts[i.request_id] for i in items])
        counts = [len(tokens) + 1 for tokens, _ in drafts]
        positions = batch.positions[batch.logits_rows].astype(np.int64) + 1
        draws = draws_of(params, np.arange(len(counts)).repeat(counts), positions)
        if not started.tokens:
            return self._fetched(self._graphs.step(batch, draws)[1])
        place = _places(started)
        places = np.full(batch.num_tokens, -1, dtype=np.int32)
        late: list[tuple[list[int], int]] = []
        for item, (tokens, _), end in zip(items, drafts, batch.query_start[1:], strict=True):
            first = place.get(item.request_id)
            if first is not None:
                places[end - len(tokens) : end] = np.arange(first, first + len(tokens))
                late.append((tokens, first))
        drafted = torch.cat([tokens.reshape(-1) for tokens in started.tokens])
        _, samples = self._graphs.step(batch, draws, (places, drafted))
        fetched = self._fetched(torch.cat((drafted, samples)))
        for tokens, first in late:
            tokens[:] = fetched[first : first + len(tokens)]
        return fetched[len(drafted) :]

    def _fetched(self, tokens: torch.Tensor) -> list[int]:
        """The one time in a step that the host waits for the device."""
        numbers: list[int] = tokens.tolist()
        return numbers


def _begin(
    drafter: LocalDrafter, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]
) -> tuple[torch.Tensor | None, Drafts]:
    """Tokens that are being made, with zeros in their place, or None and finished drafts."""
    tokens = drafter.start(orders, texts) if isinstance(drafter, GraphDrafter) else None
    if tokens is None:
        return None, drafter.draft(orders, texts)
    lengths = [o.max_draft_tokens for o in orders]
    return tokens, Drafts([Draft([0] * n, [-1] * n) for n in lengths])


def _places(started: _Started) -> dict[str, int]:
    """Where each request's draft begins once all are laid end to end."""
    place, offset = {}, 0
    for orders, tokens in zip(started.orders, started.tokens, strict=True):
        for i, order in enumerate(orders):
            place[order.request_id] = offset + i * tokens.shape[1]
        offset += tokens.numel()
    return place


def draws_of(params: SamplingRows, of_row: IntArray, positions: IntArray) -> Draws:
    """The target's own noise, which a drafter shares, for rows of the requests `of_row`."""
    keys = row_keys(params.seed[of_row], positions, Salt.TARGET)
    return Draws(params.temperature[of_row].astype(np.float32), keys)


class _Stopwatch:
    """Seconds of stretches of work: of the device's own where there is a GPU."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self._on_gpu = device.type == "cuda"
        self._clock = clock
        self._marks: list[float | torch.cuda.Event] = []

    def __enter__(self) -> None:
        self._mark()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._mark()
        else:
            # What failed is no stretch.
            self._marks.pop()

    def _mark(self) -> None:
        if not self._on_gpu:
            self._marks.append(self._clock.now())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def seconds(self, number: int) -> float:
        """Of the stretch `number`, once all has been done."""
        begin, end = self._marks[2 * number : 2 * number + 2]
        if isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            return float(begin.elapsed_time(end)) / 1e3
        return float(end) - float(begin)  # type: ignore[arg-type]
