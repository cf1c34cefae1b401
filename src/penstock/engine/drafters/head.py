"""The target's head as a drafter: it goes on from the target's own hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from penstock.core.types import DraftOrder, SamplingParams, Verdict
from penstock.engine.carried import CarriedStates
from penstock.engine.drafters.drafts import Draft, Drafts
from penstock.engine.drafters.model import ModelDrafter, Readable
from penstock.engine.runner import Carry, HeadRunner, ModelRunner, RaggedBatch
from penstock.engine.sampling.params import IntArray
from penstock.engine.sequences import BlockTables, TokenBuffer

_BIN = 1024  # ids that are counted together
_MEMORY = 4096  # tokens of output that count
_COVERED = 0.97  # share of them that may be drafted: a choice, as is what comes before


class CommonTokens:
    """Ids among which the tokens of late outputs lie: tokenizers number common ones first."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._counts = np.zeros(-(-vocab_size // _BIN))

    def note(self, token_ids: Sequence[int]) -> None:
        """Count tokens of an output."""
        self._counts *= 1 - min(1.0, len(token_ids) / _MEMORY)
        np.add.at(self._counts, np.array(token_ids, dtype=np.int64) // _BIN, 1.0)

    @property
    def limit(self) -> int:
        """How many of the first ids to draft; all as long as little is known."""
        total = self._counts.cumsum()
        if total[-1] < _BIN:
            return self._vocab_size
        return min(self._vocab_size, _BIN * (1 + int((total < _COVERED * total[-1]).sum())))


class HeadDrafter(ModelDrafter):
    """Drafts token by token: each row takes the state that the row before has given.

    The first one takes the target's. Looked-up tokens that a draft begins with are rows as well.
    Of a large vocabulary it drafts the common tokens only."""

    of_target = True

    def __init__(
        self, name: str, target: ModelRunner, tables: BlockTables, carried: CarriedStates
    ) -> None:
        """tables, carried: of the target's requests; used in its steps only."""
        super().__init__(name, HeadRunner(target), 1, tables=tables)
        self._carried = carried
        head = target.config.head
        self._common = CommonTokens(target.config.vocab_size)
        self._has_own_tokens = head is not None and head.vocab_size > 0
        self._states = torch.empty(0)
        """State before each order's next row: [num_orders, hidden_size]."""
        self._jobs = torch.empty(0)
        """Orders of the latest rows."""
        self._anchors = np.empty(0, dtype=np.int32)
        """Position of each order's first row."""

    def draft(self, orders: Sequence[DraftOrder], texts: Sequence[TokenBuffer]) -> Drafts:
        if not self._has_own_tokens:
            self._num_guessed = self._common.limit
        return super().draft(orders, texts)

    def learn(self, sampling: SamplingParams, draft: Draft, verdict: Verdict) -> None:
        super().learn(sampling, draft, verdict)
        self._common.note(verdict.token_ids)

    @property
    def _guesses_all(self) -> bool:
        return True  # the runner is told the limit

    def _extend_tables(self, orders: Sequence[DraftOrder]) -> None:
        # The step has extended the target's tables; only measurements have orders with blocks.
        super()._extend_tables([o for o in orders if o.new_blocks])

    def _logits(self, batch: RaggedBatch) -> torch.Tensor:
        logits = super()._logits(batch)
        assert batch.carry is not None
        self._states[self._jobs] = batch.carry.after
        return logits

    def _catch_up(
        self,
        orders: Sequence[DraftOrder],
        texts: Sequence[Readable],
        num_logits: Sequence[int],
        reach: int,
    ) -> RaggedBatch:
        """Compute each order's rows but the last, which is returned."""
        ids = [o.request_id for o in orders]
        at = np.array([o.start for o in orders])
        self._anchors = at.astype(np.int32)
        self._states = self._carried.before(ids, at.tolist())
        ends = at + [o.num_catch_up_tokens for o in orders]

        def next_rows(jobs: IntArray) -> RaggedBatch:
            tokens = [texts[i].tokens(at[i], at[i] + 1)[0] for i in jobs]
            return self._one_more(orders, jobs, tokens, at)

        while (jobs := np.flatnonzero(at + 1 < ends)).size:
            rows = next_rows(jobs)
            self._logits(replace(rows, logits_rows=rows.logits_rows[:0]))
            at[jobs] += 1
        return replace(next_rows(np.arange(len(at))), block_tables=self._gather(ids, reach - 1))

    def _one_more(
        self, orders: Sequence[DraftOrder], jobs: IntArray, tokens: list[int], at: IntArray
    ) -> RaggedBatch:
        batch = super()._one_more(orders, jobs, tokens, at)
        self._jobs = torch.from_numpy(jobs)
        states, rows = self._states[self._jobs], batch.query_start[:-1]
        carry = Carry(states, rows, self._num_guessed, anchors=self._anchors[jobs])
        return replace(batch, carry=carry)
