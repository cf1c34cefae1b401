"""Small model as a drafter: reads the verified text, then drafts token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from penstock.config import ConfigError
from penstock.core.learn.confidence import Calibrations, Floats, Stop
from penstock.core.types import MOST_EVALUATED, DraftOrder, Replayed, SamplingParams, Verdict
from penstock.engine.drafters.base import LocalDrafter
from penstock.engine.drafters.drafts import Draft, DraftBuilder, Drafts
from penstock.engine.runner import BatchWriter, ModelRunner, RaggedBatch
from penstock.engine.runner import IntArray as Int32Array
from penstock.engine.sampling import Changed, SamplingRows, TextSoFar, change_logits, sample_draft
from penstock.engine.sampling.params import BoolArray, IntArray
from penstock.engine.sequences import BlockTables, SamplingTable, TokenBuffer


class Readable(Protocol):
    """Source of token ids by position."""

    def tokens(self, start: int, end: int) -> list[int]: ...


class ModelDrafter(LocalDrafter):
    """Drafts for a batch of requests with paged KV.

    `coupled` and greedy requests get predictions of the target's samples under the same noise,
    `ratio` requests get samples with their distributions.
    """

    def __init__(
        self,
        name: str,
        runner: ModelRunner,
        max_model_len: int,
        vocab: int | None = None,
        tables: BlockTables | None = None,
    ) -> None:
        """Create the drafter. vocab: size of the target's, if it differs; a limit of drafts.

        tables: of the KV cache, where it is the target's.

        Raises: ConfigError for a model that cannot draft."""
        if runner.num_slots is not None:
            raise ConfigError(
                f"drafter {name}: a model with recurrent layers is served as a target only, as its "
                "states are not taken back behind a draft of its own"
            )
        self.name = name
        self.runner: ModelRunner = runner
        self._vocab = runner.config.vocab_size if vocab is None else vocab
        self._num_guessed = min(self._vocab, runner.config.vocab_size)
        self._tables = tables or BlockTables(-(-max_model_len // runner.block_size) + 1)
        self._sampling = SamplingTable()
        self._calibrations = Calibrations()
        self._foreseen: dict[str, tuple[int, int]] = {}
        """First position not evaluated, and the prediction for it, by request."""

    def limit_vocab(self, size: int) -> None:
        """Draft no token id of `size` or above."""
        self._num_guessed = min(size, self.runner.config.vocab_size)

    def read(
        self, orders: Sequence[DraftOrder], texts: Sequence[Readable], num_logits: Sequence[int]
    ) -> torch.Tensor:
        """Compute the orders' tokens in one batch.

        Returns the logits of the last num_logits[i] of each, [rows, tokens that may be drafted]."""
        self._extend_tables(orders)
        reach = max(o.start + o.num_catch_up_tokens for o in orders) + 1
        return self._logits(self._catch_up(orders, texts, num_logits, reach))

    def draft(self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]) -> Drafts:
        self._extend_tables(orders)
        limits = np.array([o.max_draft_tokens for o in orders], dtype=np.int32)
        params, ratio = self._sampling.rows_of(list(texts))
        reach = max(o.start + o.num_catch_up_tokens + max(o.max_draft_tokens, 1) for o in orders)
        first = self._catch_up(orders, texts, [int(o.max_draft_tokens > 0) for o in orders], reach)
        # Starts of whole drafts, including foreseen tokens: noise depends on the draft.
        starts = np.array([t.length for t in texts], dtype=np.int64)
        drafts = None
        stop = self._stop(orders, texts)
        if self._guesses_all and params.is_plain:
            drafts = self.runner.propose(first, limits, params, ratio, starts, stop)
        if drafts is None:
            drafts = self._draft_stepwise(orders, texts, first, limits, params, ratio, starts, stop)
        if stop is not None:
            # A draft that ended early has sampled one token more than it has.
            longest = max(len(d.token_ids) for d in drafts.drafts)
            drafts = replace(drafts, num_steps=min(int(limits.max()), longest + 1))
        missing = self._vocab - self._num_guessed
        if drafts.probs is None or not missing:
            return drafts
        # Tokens that it cannot draft have probability 0.
        return replace(drafts, probs=torch.nn.functional.pad(drafts.probs, (0, missing)))

    def replay(
        self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]
    ) -> tuple[Replayed, ...]:
        self._extend_tables(orders)
        ends = [o.start + o.num_catch_up_tokens for o in orders]
        firsts = [
            min(end, max(o.start, t.request.prompt_len - 1, end - MOST_EVALUATED))
            # A grammar's masks of earlier positions are not known.
            if o.evaluate and not t.is_ratio and t.grammar is None
            else end
            for o, t, end in zip(orders, texts, ends, strict=True)
        ]
        counts = [end - first for end, first in zip(ends, firsts, strict=True)]
        batch = self._catch_up(orders, texts, counts, max(ends) + 1)
        guesses = self._guess(batch, counts, texts, ends)
        return tuple(
            self._compare(order, text, first, guess)
            for order, text, first, guess in zip(orders, texts, firsts, guesses, strict=True)
        )

    @property
    def _guesses_all(self) -> bool:
        """True if every token that the runner gives logits to may be drafted."""
        return self._num_guessed == self.runner.config.vocab_size

    def extend(self, order: DraftOrder) -> None:
        """Add the blocks of an order that is not computed."""
        self._tables.extend(order.request_id, order.epoch, order.new_blocks)

    def learn(self, sampling: SamplingParams, draft: Draft, verdict: Verdict) -> None:
        if not draft.confidences:
            return
        decided = draft.confidences[: verdict.num_decided]
        calibration = self._calibrations.for_sampling(sampling, is_drawn=sampling.is_ratio)
        calibration.add_draft(decided, verdict.num_accepted - verdict.num_looked_up)

    def drop_table(self, request_id: str) -> None:
        self._tables.drop(request_id)

    def release_request(self, request_id: str) -> None:
        self._tables.drop(request_id)
        self._foreseen.pop(request_id, None)

    def _guess(
        self,
        batch: RaggedBatch,
        counts: Sequence[int],
        texts: Sequence[TokenBuffer],
        ends: Sequence[int],
    ) -> list[IntArray]:
        """Predict the token after each row of logits, by order."""
        logits = self._logits(batch)
        positions = batch.positions[batch.logits_rows].astype(np.int64) + 1
        params = self._sampling.rows_of(list(texts))[0].select(np.arange(len(texts)).repeat(counts))
        if params.reads_text:
            rows = zip(counts, texts, ends, strict=True)
            change_logits(logits, [_changed_until(*row) for row in rows])
        tokens = self.runner.sample(logits, params, positions).cpu().numpy()
        return np.split(tokens, np.cumsum(counts)[:-1])

    def _compare(
        self, order: DraftOrder, text: TokenBuffer, first: int, guesses: IntArray
    ) -> Replayed:
        """Count the right predictions; the last one is of a token not known yet."""
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

    def _stop(self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]) -> Stop | None:
        """Return the stopping rule; None if no draft may end before its limit."""
        if not any(o.min_survival for o in orders):
            return None
        found = [
            self._calibrations.for_sampling(t.request.sampling, is_drawn=t.is_ratio) for t in texts
        ]
        tables = {id(c): c.table for c in found}
        return Stop(
            np.array([o.min_survival for o in orders], dtype=np.float32),
            np.array([tables[id(c)] for c in found], dtype=np.float32),
        )

    def _draft_stepwise(
        self,
        orders: Sequence[DraftOrder],
        texts: Sequence[TokenBuffer],
        first: RaggedBatch,
        limits: Int32Array,
        params: SamplingRows,
        ratio: BoolArray,
        starts: IntArray,
        stop: Stop | None,
    ) -> Drafts:
        builder = DraftBuilder(len(orders))
        survival = np.ones(len(orders), dtype=np.float32)
        ends = first.seq_lens.astype(np.int64)
        logits = self._logits(first)
        alive = np.flatnonzero(limits > 0)
        for step in range(int(limits.max(initial=0))):
            if step:
                alive = alive[limits[alive] > step]
                if not alive.size:
                    break
                tokens = [builder.token_ids[i][-1] for i in alive]
                logits = self._logits(self._one_more(orders, alive, tokens, ends + step - 1))
            positions = ends[alive] + step
            rows = params.select(alive)
            if params.reads_text:
                _change(logits, alive, texts, ends, builder)
            self._sample(builder, alive, logits, rows, positions, starts[alive], ratio[alive])
            made = np.array([len(builder.token_ids[i]) > step for i in alive])
            if not made.all():  # their logits are not finite
                alive, rows = alive[made], rows.select(made)
                logits = logits[torch.from_numpy(made).to(logits.device)]
            if stop is None:
                continue
            sampled = [builder.token_ids[i][-1] for i in alive]
            confidences = _confidences(logits, rows, sampled, ratio[alive])
            survival[alive] = stop.survival(survival[alive], alive, confidences)
            for job, confidence in zip(alive, confidences.tolist(), strict=True):
                builder.confidences[job].append(confidence)
            has_ended = survival[alive] < stop.least[alive]
            for job in alive[has_ended]:
                builder.drop_last(job)
            alive = alive[~has_ended]
        return builder.build()

    def _sample(
        self,
        builder: DraftBuilder,
        jobs: IntArray,
        logits: torch.Tensor,
        params: SamplingRows,
        positions: IntArray,
        starts: IntArray,
        ratio: BoolArray,
    ) -> None:
        if ratio.all():
            tokens, probs = sample_draft(logits, params, positions, starts)
            builder.add(jobs, tokens.tolist(), probs)
        elif not ratio.any():
            builder.add(jobs, self.runner.sample(logits, params, positions).tolist())
        else:
            for part in (np.flatnonzero(ratio), np.flatnonzero(~ratio)):
                rows = logits[torch.from_numpy(part).to(logits.device)]
                own = params.select(part), positions[part], starts[part], ratio[part]
                self._sample(builder, jobs[part], rows, *own)

    def _logits(self, batch: RaggedBatch) -> torch.Tensor:
        logits = self.runner.forward(batch)
        if logits.shape[-1] == self._num_guessed:
            return logits
        return logits[:, : self._num_guessed].contiguous()

    def _extend_tables(self, orders: Sequence[DraftOrder]) -> None:
        for order in orders:
            self.extend(order)

    def _catch_up(
        self,
        orders: Sequence[DraftOrder],
        texts: Sequence[Readable],
        num_logits: Sequence[int],
        reach: int,
    ) -> RaggedBatch:
        """Build the batch of the orders. num_logits: per order. reach: end of the block tables."""
        writer = BatchWriter()
        for order, text, wanted in zip(orders, texts, num_logits, strict=True):
            tokens = text.tokens(order.start, order.start + order.num_catch_up_tokens)
            writer.add(order.start, tokens, wanted)
        return writer.batch(self._gather([o.request_id for o in orders], reach - 1))

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

    def _gather(self, request_ids: list[str], num_tokens: int) -> Int32Array:
        return self._tables.gather(request_ids, self.runner.blocks_for(num_tokens))


def _change(
    logits: torch.Tensor,
    jobs: IntArray,
    texts: Sequence[TokenBuffer],
    ends: IntArray,
    builder: DraftBuilder,
) -> None:
    """Apply penalties, biases and grammars to the rows of jobs after their texts and drafts."""
    parts = []
    for job in jobs.tolist():
        text = texts[job]
        draft = text.tokens(text.length, int(ends[job])) + builder.token_ids[job]
        parts.append(Changed(1, text.request.sampling, text.so_far(draft, num_rows=1)))
    change_logits(logits, parts)


def _changed_until(num_rows: int, text: TokenBuffer, end: int) -> Changed:
    """Describe rows at consecutive positions of a text, of which the last is after `end` tokens."""
    request, so_far = text.request, None
    if num_rows and request.sampling.reads_tokens:
        stops = sorted(request.stop_token_ids)
        so_far = TextSoFar(text.span(0, end), request.prompt_len, stops)
    return Changed(num_rows, request.sampling, so_far)


def _confidences(
    logits: torch.Tensor, rows: SamplingRows, token_ids: Sequence[int], drawn: BoolArray
) -> Floats:
    """Return confidences as of `NativeDraft.confidences`: [rows]."""
    divisor = torch.from_numpy(np.where(rows.greedy, 1.0, rows.temperature)).float()
    probs = (logits / divisor.to(logits.device).unsqueeze(-1)).softmax(dim=-1)
    chosen = probs.gather(-1, torch.tensor(token_ids, device=logits.device).unsqueeze(-1))
    highest = probs.amax(dim=-1).cpu().numpy()
    return np.where(drawn, highest, chosen.squeeze(-1).cpu().numpy())
