"""Timed steps of dummy requests, alone and together. No request may be running."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import numpy as np
import torch

from penstock.core.learn.times import Times
from penstock.core.loop import Clock
from penstock.core.types import DraftOrder, Request, SamplingParams
from penstock.engine.drafters.base import LocalDrafter
from penstock.engine.executor import LocalExecutor
from penstock.engine.runner import BatchWriter, Model, RaggedBatch
from penstock.engine.sequences import TokenBuffer

_BATCH = 4
_ROUNDS = 5
DRAFT_STEPS = 4
DRAFT_CONTEXT = 64
"""Tokens of a measured draft, and before it."""


def dummy_verify(target: Model, counts: Sequence[int], context: int) -> None:
    """Run a step over `counts[i]` sampled positions of request i behind `context` tokens."""
    target.dummy_run(_batch(target, counts, context, all_logits=True))


def dummy_prefill(target: Model, chunk: int, context: int) -> None:
    """Run a step over `chunk` positions of a prompt, the last one sampled."""
    target.dummy_run(_batch(target, (chunk,), context, all_logits=False))


def dummy_draft(
    drafter: LocalDrafter, batch: int, num_steps: int, num_read: int = 1, context: int = 0
) -> None:
    """Read `num_read` tokens of each request, behind context that counts as read, then draft."""
    known = context + num_read
    each = 0 if drafter.runner is None else drafter.runner.blocks_for(known + num_steps)
    sampling = SamplingParams(temperature=0.0)
    orders, texts = [], []
    for i in range(batch):
        name = f"dummy-{i}"
        blocks = tuple(range(i * each, (i + 1) * each))
        orders.append(
            DraftOrder(
                request_id=name,
                epoch=0,
                round=0,
                drafter=drafter.name,
                start=context,
                num_catch_up_tokens=num_read,
                max_draft_tokens=num_steps,
                new_blocks=blocks,
            )
        )
        prompt = (1,) * known
        texts.append(
            TokenBuffer(Request(name, known, 16, prompt_token_ids=prompt, sampling=sampling))
        )
    drafter.timed.draft(orders, texts)
    for order in orders:
        drafter.release_request(order.request_id)


def best_seconds(clock: Clock, run: Callable[[], None], repeats: int) -> float:
    """Return the shortest of several runs, since disturbances only lengthen one."""
    best = float("inf")
    for _ in range(repeats):
        began = clock.now()
        run()
        best = min(best, clock.now() - began)
    return best


def slowdowns(
    executor: LocalExecutor, drafter: LocalDrafter, clock: Clock, context: int, seconds: float
) -> tuple[float, float]:
    """Return the factors on a drafter's and the target's step times beside each other.

    Each is at least 1, the median of several tries of `seconds`. Threads are shared as in the
    executor. context: tokens before the step; both must fit into memory."""
    target, num_threads = executor.target, executor.num_threads
    pace = partial(_Stopwatch, clock)
    verifying = partial(dummy_verify, target, [DRAFT_STEPS + 1] * _BATCH, context)
    drafting = partial(dummy_draft, drafter, _BATCH, DRAFT_STEPS, 1, context)

    def share_threads(of_target: int, of_drafter: int) -> None:
        target.limit_threads(of_target)
        if drafter.runner is not None:
            drafter.runner.limit_threads(of_drafter)

    slower: list[float] = []
    target_slower: list[float] = []
    for _ in range(_ROUNDS):
        share_threads(num_threads, num_threads)
        alone = executor.in_lane(drafter.name, partial(pace().run, drafting, seconds))
        target_alone = pace().run(verifying, seconds)
        share_threads(*executor.threads_together(drafter.name))
        beside = pace()
        beside_it = partial(beside.run, drafting, 2 * seconds)
        thread = threading.Thread(target=executor.in_lane, args=(drafter.name, beside_it))
        thread.start()
        target_beside = pace().run(verifying, seconds)
        thread.join()
        slower.append(beside.during(seconds) / alone.mean)
        target_slower.append(target_beside.mean / target_alone.mean)
    share_threads(num_threads, num_threads)
    return max(1.0, median(slower)), max(1.0, median(target_slower))


def slowdowns_seconds(times: Times, drafter: str, seconds: float) -> float:
    """Return the expected seconds of `slowdowns`: a step at least in each part of a round."""
    draft = max(seconds, DRAFT_STEPS * times.curve_of(drafter)(_BATCH))
    verify = max(seconds, times.target(_BATCH * (1 + DRAFT_STEPS)))
    return _ROUNDS * (draft + verify + max(2 * seconds, draft, verify))


class _Stopwatch:
    """Repeats a step and records the end of each run."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._times: list[float] = []

    def run(self, step: Callable[[], None], seconds: float) -> _Stopwatch:
        with torch.inference_mode():
            self._times.append(self._clock.now())
            while len(self._times) < 2 or self._times[-1] - self._times[0] < seconds:
                step()
                self._times.append(self._clock.now())
        return self

    @property
    def mean(self) -> float:
        return (self._times[-1] - self._times[0]) / (len(self._times) - 1)

    def during(self, seconds: float) -> float:
        """Return the mean of the runs that ended in the first seconds, or of the first alone."""
        inside = [t for t in self._times if t - self._times[0] <= seconds]
        ended = inside if len(inside) > 1 else self._times[:2]
        return (ended[-1] - ended[0]) / (len(ended) - 1)


def _batch(runner: Model, counts: Sequence[int], context: int, *, all_logits: bool) -> RaggedBatch:
    writer = BatchWriter()
    for count in counts:
        writer.add(context, [1] * count, count if all_logits else 1)
    each = runner.blocks_for(writer.longest)
    tables = np.arange(len(counts) * each, dtype=np.int32).reshape(len(counts), each)
    return writer.batch(np.minimum(tables, runner.num_blocks - 1))
