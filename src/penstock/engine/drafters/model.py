"""A small model as a drafter: catch up with the verified text, then draft token by token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from penstock.core.types import DraftOrder, Replayed
from penstock.engine import batch
from penstock.engine.batch import RaggedBatch
from penstock.engine.drafters.base import Draft, DraftBuilder, Drafts
from penstock.engine.native.runner import NativeRunner
from penstock.engine.native.sampler import sample_natively
from penstock.engine.runner import ModelRunner
from penstock.engine.sampling import Sampler, SamplingRows, sample_coupled, sample_draft
from penstock.engine.sampling.noise import Salt
from penstock.engine.sampling.params import BoolArray, IntArray
from penstock.engine.sequences import BlockTables, TokenBuffer, sampling_rows, uses_ratio

_MOST_EVALUATED = 256
"""Tokens of one replay that are evaluated, the latest ones: each needs a row of logits."""


class ModelDrafter:
    """Drafts for many requests at once, each with its own paged KV.

    A `coupled` or greedy request gets the drafter's guess at the target's own sample, under the
    same noise; a `ratio` request gets samples with the distributions they came from.
    """

    def __init__(self, name: str, runner: ModelRunner, max_model_len: int) -> None:
        self.name = name
        self.runner = runner
        self._tables = BlockTables(-(-max_model_len // runner.block_size) + 1)
        self._sampler: Sampler = sample_coupled
        if isinstance(runner, NativeRunner):
            self._sampler = sample_natively
        self._foreseen: dict[str, tuple[int, int]] = {}
        """By request: the position up to which its text was evaluated, and the guess at it."""

    def draft(self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]) -> Drafts:
        for order in orders:
            self._tables.extend(order.request_id, order.epoch, order.new_blocks)
        limits = np.array([o.max_draft_tokens for o in orders], dtype=np.int32)
        params = sampling_rows(texts)
        ratio = uses_ratio(texts)
        ends = np.array([o.start + o.num_catch_up_tokens for o in orders])
        reach = int((ends + limits.clip(min=1)).max()) - 1
        rows = [np.arange(end - (limit > 0), end) for end, limit in zip(ends, limits, strict=True)]
        first = self._catch_up(orders, texts, rows, reach)
        if isinstance(self.runner, NativeRunner) and not params.filtered.any():
            return _draft_natively(self.runner, first, limits, params, ratio)
        return self._draft_stepwise(orders, first, limits, params, ratio)

    def replay(
        self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]
    ) -> tuple[Replayed, ...]:
        for order in orders:
            self._tables.extend(order.request_id, order.epoch, order.new_blocks)
        ends = np.array([o.start + o.num_catch_up_tokens for o in orders])
        counted = np.array([o.evaluate for o in orders]) & ~uses_ratio(texts)
        firsts = [
            max(o.start, t.request.prompt_len - 1, end - _MOST_EVALUATED) if counts else end
            for o, t, end, counts in zip(orders, texts, ends.tolist(), counted, strict=True)
        ]
        rows = [np.arange(first, end) for first, end in zip(firsts, ends.tolist(), strict=True)]
        guesses = self._guess(self._catch_up(orders, texts, rows, int(ends.max())), rows, texts)
        return tuple(
            self._compare(order, text, first, guess)
            for order, text, first, guess in zip(orders, texts, firsts, guesses, strict=True)
        )

    def drop_table(self, request_id: str) -> None:
        self._tables.drop(request_id)

    def forget(self, request_id: str) -> None:
        self._tables.drop(request_id)
        self._foreseen.pop(request_id, None)

    def _guess(
        self, batch: RaggedBatch, rows: Sequence[IntArray], texts: Sequence[TokenBuffer]
    ) -> list[IntArray]:
        """What the drafter takes each order's tokens behind `rows` to be."""
        logits = self.runner.forward(batch)
        positions = np.concatenate(rows) + 1
        if not len(positions):
            return list(rows)
        counts = [len(r) for r in rows]
        params = sampling_rows(texts).take(np.repeat(np.arange(len(texts)), counts))
        tokens = self._sampler(logits, params, positions).cpu().numpy()
        return np.split(tokens, np.cumsum(counts)[:-1])

    def _compare(
        self, order: DraftOrder, text: TokenBuffer, first: int, guesses: IntArray
    ) -> Replayed:
        """Count the guesses that are right; the last is at a token that is not known yet."""
        if not len(guesses):
            return Replayed(order.request_id, order.epoch, self.name)
        end = first + len(guesses)
        evaluated, foreseen = self._foreseen.get(order.request_id, (-1, -1))
        begin = max(first + 1, evaluated)
        right = guesses[begin - first - 1 : -1] == text.span(begin, end)
        num_tokens, num_matched = len(right), int(right.sum())
        if evaluated == order.start:
            num_tokens += 1
            num_matched += int(foreseen == text.span(evaluated, evaluated + 1)[0])
        self._foreseen[order.request_id] = (end, int(guesses[-1]))
        return Replayed(order.request_id, order.epoch, self.name, num_tokens, num_matched)

    def _draft_stepwise(
        self,
        orders: Sequence[DraftOrder],
        first: RaggedBatch,
        limits: batch.IntArray,
        params: SamplingRows,
        ratio: BoolArray,
    ) -> Drafts:
        builder = DraftBuilder(len(orders))
        ends = first.seq_lens.astype(np.int64)
        logits = self.runner.forward(first)
        alive = np.flatnonzero(limits > 0)
        for step in range(int(limits.max(initial=0))):
            if step:
                alive = np.flatnonzero(limits > step)
                tokens = [builder.token_ids[i][-1] for i in alive]
                logits = self.runner.forward(self._one_more(orders, alive, tokens, ends + step - 1))
            positions = ends[alive] + step
            self._sample(builder, alive, logits, params.take(alive), positions, ratio[alive])
        return builder.build()

    def _sample(
        self,
        builder: DraftBuilder,
        jobs: IntArray,
        logits: torch.Tensor,
        params: SamplingRows,
        positions: IntArray,
        ratio: BoolArray,
    ) -> None:
        if ratio.all():
            tokens, probs = sample_draft(logits, params, positions)
            builder.add(jobs, tokens.tolist(), probs)
        elif not ratio.any():
            builder.add(jobs, sample_coupled(logits, params, positions).tolist())
        else:
            for part in (np.flatnonzero(ratio), np.flatnonzero(~ratio)):
                rows = logits[torch.from_numpy(part).to(logits.device)]
                self._sample(
                    builder, jobs[part], rows, params.take(part), positions[part], ratio[part]
                )

    def _catch_up(
        self,
        orders: Sequence[DraftOrder],
        texts: Sequence[TokenBuffer],
        rows: Sequence[IntArray],
        reach: int,
    ) -> RaggedBatch:
        """`rows`: of each order, the positions whose logits are wanted."""
        counts = np.array([o.num_catch_up_tokens for o in orders], dtype=np.int32)
        query_start = np.zeros(len(orders) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        spans = [(o.start, o.start + o.num_catch_up_tokens) for o in orders]
        logits_rows = [
            wanted + (row - start)
            for wanted, row, (start, _) in zip(rows, query_start[:-1], spans, strict=True)
        ]
        return RaggedBatch(
            token_ids=np.concatenate([t.span(*s) for t, s in zip(texts, spans, strict=True)]),
            positions=np.concatenate([np.arange(*s, dtype=np.int32) for s in spans]),
            query_start=query_start,
            seq_lens=np.array([end for _, end in spans], dtype=np.int32),
            block_tables=self._gather([o.request_id for o in orders], reach),
            logits_rows=np.concatenate(logits_rows).astype(np.int32),
        )

    def _one_more(
        self, orders: Sequence[DraftOrder], jobs: IntArray, tokens: list[int], at: IntArray
    ) -> RaggedBatch:
        positions = at[jobs].astype(np.int32)
        rows = np.arange(len(jobs) + 1, dtype=np.int32)
        ids = [orders[i].request_id for i in jobs]
        return RaggedBatch(
            token_ids=np.asarray(tokens, dtype=np.int32),
            positions=positions,
            query_start=rows,
            seq_lens=positions + 1,
            block_tables=self._gather(ids, int(positions.max()) + 1),
            logits_rows=rows[:-1],
        )

    def _gather(self, request_ids: list[str], num_tokens: int) -> batch.IntArray:
        return self._tables.gather(request_ids, -(-num_tokens // self.runner.block_size))


def _draft_natively(
    runner: NativeRunner,
    first: RaggedBatch,
    limits: batch.IntArray,
    params: SamplingRows,
    ratio: BoolArray,
) -> Drafts:
    """The whole loop in one call."""
    salts = np.where(ratio, int(Salt.DRAFT), int(Salt.TARGET)).astype(np.int32)
    drafted = runner.draft(
        first, limits, params.temperature, params.seed, salts, return_logits=bool(ratio.any())
    )
    tokens = [row[:n].tolist() for row, n in zip(drafted.token_ids, limits, strict=True)]
    prob_rows = [[-1] * len(t) for t in tokens]
    probs = None
    if drafted.logits is not None:
        job = np.repeat(np.arange(len(limits)), np.where(ratio, limits, 0))
        step = np.concatenate([np.arange(n) for n in limits[ratio]] or [job])
        temperature = torch.from_numpy(params.temperature[job]).float().unsqueeze(-1)
        rows = drafted.logits[torch.from_numpy(job), torch.from_numpy(step)]
        probs = (rows / temperature).softmax(dim=-1)
        for row, i in enumerate(job):
            prob_rows[i][step[row]] = row
    return Drafts([Draft(t, p) for t, p in zip(tokens, prob_rows, strict=True)], probs)
