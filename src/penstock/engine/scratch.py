"""Steps of made-up requests on scratch blocks, to be timed. No request may be running."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from penstock.core.loop import Clock
from penstock.core.types import DraftOrder, Request, SamplingParams
from penstock.engine.batch import RaggedBatch
from penstock.engine.drafters.base import LocalDrafter
from penstock.engine.gpu.graphs import GraphRunner
from penstock.engine.native.runner import NativeRunner
from penstock.engine.native.sampler import sample_natively
from penstock.engine.runner import ModelRunner
from penstock.engine.sampling import SamplingRows, sample_coupled
from penstock.engine.sequences import TokenBuffer


def num_that_fit(runner: ModelRunner, num_tokens: int) -> int:
    """Requests of so many tokens that its KV memory holds."""
    return runner.num_blocks // -(-num_tokens // runner.block_size)


def verify_scratch(target: ModelRunner, counts: Sequence[int], context: int) -> None:
    """One step over `counts[i]` positions of request i behind `context` tokens, all of which are
    sampled."""
    _sample(target, _batch(target, counts, context, all_logits=True))


def prefill_scratch(target: ModelRunner, chunk: int, context: int) -> None:
    """One step over `chunk` positions of a prompt, of which the last is sampled."""
    _sample(target, _batch(target, (chunk,), context, all_logits=False))


def draft_scratch(
    drafter: LocalDrafter, batch: int, num_steps: int, num_read: int = 1, context: int = 0
) -> None:
    """Read `num_read` tokens of each of `batch` requests behind `context` others, then draft. The
    others are taken as read, which only a model can do."""
    runner = getattr(drafter, "runner", None)
    known = context + num_read
    each = 0 if runner is None else -(-(known + num_steps) // runner.block_size)
    sampling = SamplingParams(temperature=0.0)
    orders, texts = [], []
    for i in range(batch):
        name = f"scratch-{i}"
        blocks = tuple(range(i * each, (i + 1) * each))
        orders.append(DraftOrder(name, 0, 0, drafter.name, context, num_read, num_steps, blocks))
        prompt = (1,) * known
        texts.append(
            TokenBuffer(Request(name, known, 16, prompt_token_ids=prompt, sampling=sampling))
        )
    drafter.draft(orders, texts)
    for order in orders:
        drafter.forget(order.request_id)


def best_seconds(clock: Clock, run: Callable[[], None], repeats: int) -> float:
    """The shortest of several runs: whatever else the machine does only ever adds to one."""
    best = float("inf")
    for _ in range(repeats):
        began = clock.now()
        run()
        best = min(best, clock.now() - began)
    return best


def read_seconds(clock: Clock, drafter: LocalDrafter, num_tokens: int, repeats: int) -> float:
    """Seconds of each token more that a drafter reads before it drafts."""
    little, much = (
        best_seconds(clock, lambda n=n: draft_scratch(drafter, 1, 1, n), repeats)  # type: ignore[misc]
        for n in (1, 1 + num_tokens)
    )
    return max(0.0, much - little) / num_tokens


def _batch(
    runner: ModelRunner, counts: Sequence[int], context: int, *, all_logits: bool
) -> RaggedBatch:
    query_start = np.cumsum([0, *counts]).astype(np.int32)
    lens = np.array([context + c for c in counts], dtype=np.int32)
    each = -(-int(lens.max()) // runner.block_size)
    rows = int(query_start[-1])
    tables = np.arange(len(counts) * each, dtype=np.int32).reshape(len(counts), each)
    wanted = np.arange(rows) if all_logits else query_start[1:] - 1
    return RaggedBatch(
        token_ids=np.ones(rows, dtype=np.int32),
        positions=np.concatenate([np.arange(context, n, dtype=np.int32) for n in lens]),
        query_start=query_start,
        seq_lens=lens,
        block_tables=np.minimum(tables, runner.num_blocks - 1),
        logits_rows=wanted.astype(np.int32),
    )


def _sample(target: ModelRunner, batch: RaggedBatch) -> None:
    """Until the samples are on the host: a GPU has then done everything before them."""
    if isinstance(target, GraphRunner) and target.records(batch):
        target.step(batch).samples.cpu()
        return
    logits = target.forward(batch)
    num = logits.shape[0]
    params = SamplingRows(
        np.zeros(num), np.ones(num), np.zeros(num, np.int64), np.zeros(num, np.uint64)
    )
    sample = sample_natively if isinstance(target, NativeRunner) else sample_coupled
    sample(logits, params, np.zeros(num, dtype=np.int64)).cpu()
