"""Measure step times before the first request, so that draft lengths start from facts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from penstock.core.estimators import Estimators
from penstock.core.ports import Clock
from penstock.core.types import DraftOrder, Request, SamplingParams
from penstock.engine.batch import RaggedBatch
from penstock.engine.drafters.base import LocalDrafter
from penstock.engine.executor import LocalExecutor
from penstock.engine.runner import ModelRunner
from penstock.engine.sampling import SamplingRows, sample_coupled
from penstock.engine.sequences import TokenBuffer
from penstock.fluid.step_profile import StepProfile

_ROWS = (1, 2, 3, 5, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 256)
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_DRAFT_STEPS = 4
_CONTEXT = 64
_REPEATS = 3


def calibrate(
    executor: LocalExecutor, estimators: Estimators, clock: Clock, budget_s: float = 3.0
) -> None:
    """Fill the step times from a few steps of each model on scratch blocks; stops growing when a
    model's share of `budget_s` seconds is spent. No request may be running."""
    times = estimators.step_times
    share = budget_s / (1 + len(executor.drafters))
    _grow(clock, share, _ROWS, lambda n: _verify(executor.target, n), times.target.observe)
    rows, seconds = zip(*times.target.points(), strict=True)
    kv_tokens = executor.target.num_blocks * executor.target.block_size
    counts = tuple(round(row) for row in rows)
    estimators.step_model.profile = StepProfile("measured", kv_tokens, counts, seconds)
    for drafter in executor.drafters.values():
        curve = times.curve_of(drafter.name)
        runner = getattr(drafter, "runner", None)
        fits = runner.num_blocks // _blocks_each(runner) if runner is not None else max(_BATCHES)
        batches = [n for n in _BATCHES if n <= fits]
        _grow(
            clock,
            share,
            batches,
            lambda n, d=drafter: _draft(d, n),  # type: ignore[misc]
            lambda n, seconds, c=curve: c.observe(n, seconds / _DRAFT_STEPS),  # type: ignore[misc]
        )


def _grow(
    clock: Clock,
    budget_s: float,
    sizes: Sequence[int],
    run: Callable[[int], None],
    observe: Callable[[float, float], None],
) -> None:
    start = clock.now()
    run(sizes[0])
    for size in sizes:
        best = float("inf")
        for _ in range(_REPEATS):
            began = clock.now()
            run(size)
            best = min(best, clock.now() - began)
        observe(size, best)
        if clock.now() - start > budget_s:
            return


def _verify(target: ModelRunner, rows: int) -> None:
    """One step over `rows` positions, in sequences of up to 5, and its sampling."""
    counts = [5] * (rows // 5) + ([rows % 5] if rows % 5 else [])
    fits = max(1, target.num_blocks // _blocks_each(target))
    counts = counts[:fits]
    batch = _scratch_batch(target, counts)
    logits = target.forward(batch)
    num = logits.shape[0]
    params = SamplingRows(
        np.zeros(num), np.ones(num), np.zeros(num, np.int64), np.zeros(num, np.uint64)
    )
    sample_coupled(logits, params, np.zeros(num, dtype=np.int64))


def _scratch_batch(runner: ModelRunner, counts: list[int]) -> RaggedBatch:
    query_start = np.cumsum([0, *counts]).astype(np.int32)
    each = _blocks_each(runner)
    context = min(_CONTEXT, runner.num_blocks * runner.block_size - max(counts))
    lens = np.array([context + c for c in counts], dtype=np.int32)
    rows = int(query_start[-1])
    tables = np.arange(len(counts) * each, dtype=np.int32).reshape(len(counts), each)
    return RaggedBatch(
        token_ids=np.ones(rows, dtype=np.int32),
        positions=np.concatenate([np.arange(context, n, dtype=np.int32) for n in lens]),
        query_start=query_start,
        seq_lens=lens,
        block_tables=np.minimum(tables, runner.num_blocks - 1),
        logits_rows=np.arange(rows, dtype=np.int32),
    )


def _blocks_each(runner: ModelRunner) -> int:
    return -(-(_CONTEXT + 16) // runner.block_size)


def _draft(drafter: LocalDrafter, batch: int) -> None:
    """Draft a few tokens for `batch` made-up requests of one prompt token each."""
    each = _blocks_each(drafter.runner) if hasattr(drafter, "runner") else 0
    orders, texts = [], []
    for i in range(batch):
        name = f"calibration-{i}"
        blocks = tuple(range(i * each, (i + 1) * each))
        orders.append(DraftOrder(name, 0, 0, drafter.name, 0, 1, _DRAFT_STEPS, blocks))
        sampling = SamplingParams(temperature=0.0)
        texts.append(TokenBuffer(Request(name, 1, 16, prompt_token_ids=(1,), sampling=sampling)))
    drafter.draft(orders, texts)
    for order in orders:
        drafter.forget(order.request_id)
