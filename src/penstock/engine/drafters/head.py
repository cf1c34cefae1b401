"""The target's head as a drafter: it goes on from the target's own hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from penstock.core.types import DraftOrder
from penstock.engine.carried import CarriedStates
from penstock.engine.drafters.model import ModelDrafter, Readable
from penstock.engine.runner import Carry, HeadRunner, ModelRunner, RaggedBatch
from penstock.engine.sampling.params import IntArray
from penstock.engine.sequences import BlockTables


class HeadDrafter(ModelDrafter):
    """Drafts token by token: each row takes the state that the row before has given.

    The first one takes the target's. Looked-up tokens that a draft begins with are rows as well."""

    of_target = True

    def __init__(
        self, name: str, target: ModelRunner, tables: BlockTables, carried: CarriedStates
    ) -> None:
        """tables, carried: of the target's requests; used in its steps only."""
        super().__init__(name, HeadRunner(target), 1, tables=tables)
        self._carried = carried
        self._states = torch.empty(0)
        """State before each order's next row: [num_orders, hidden_size]."""
        self._jobs = torch.empty(0)
        """Orders of the latest rows."""

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
        self._states = self._carried.before(ids, [o.start for o in orders])
        at = np.array([o.start for o in orders])
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
        return replace(batch, carry=Carry(self._states[self._jobs], batch.query_start[:-1]))
