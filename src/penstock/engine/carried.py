"""Hidden states of requests that the next step of the target's head begins with.

A head's row takes the state of the row before it, which the pass before has computed. That pass may
have computed rows that were rejected, so those behind the first with logits are all kept: where the
next step begins says which is needed. Where none is known (of a prefix that another request has
computed, or after a preemption) it is zeros: then a draft is worse, and the text the same."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from penstock.engine.runner import Carry, IntArray, RaggedBatch
from penstock.engine.states import MOST_KEPT


class CarriedStates:
    """States of the latest rows of each request, by the position of the first."""

    def __init__(self, width: int, device: torch.device) -> None:
        self._width, self._device = width, device
        self._known: dict[str, tuple[int, torch.Tensor]] = {}

    def before(self, request_ids: Sequence[str], starts: Sequence[int]) -> torch.Tensor:
        """Return the states before positions `starts`: [num_requests, width] float32."""
        states = torch.zeros(len(request_ids), self._width, device=self._device)
        for state, request_id, start in zip(states, request_ids, starts, strict=True):
            first, rows = self._known.get(request_id, (start, states))
            if 0 <= start - 1 - first < len(rows):
                state.copy_(rows[start - 1 - first])
        return states

    def carry(self, request_ids: Sequence[str], batch: RaggedBatch, others: IntArray) -> Carry:
        """Return what a pass over a batch of these requests takes, and is to keep.

        others: rows that are kept for another purpose"""
        kept = [np.arange(first, end, dtype=np.int32) for first, end in _kept(batch)]
        starts = batch.positions[batch.query_start[:-1]].tolist()
        rows = np.concatenate(kept)
        rows = np.union1d(rows, others) if len(others) else rows
        return Carry(self.before(request_ids, starts), rows)

    def keep(self, request_ids: Sequence[str], batch: RaggedBatch) -> None:
        """Take in what a pass has kept."""
        assert batch.carry is not None
        for request_id, (first, end) in zip(request_ids, _kept(batch), strict=True):
            begin = int(np.searchsorted(batch.carry.rows, first))
            rows = batch.carry.after[begin : begin + end - first]
            self._known[request_id] = (int(batch.positions[first]), rows)

    def drop(self, request_id: str) -> None:
        self._known.pop(request_id, None)


def _kept(batch: RaggedBatch) -> list[tuple[int, int]]:
    """Return first and end of the rows of each sequence that are kept."""
    logits = np.append(batch.logits_rows, batch.num_tokens)
    ends = batch.query_start[1:]
    firsts = logits[np.searchsorted(batch.logits_rows, batch.query_start[:-1])]
    firsts = np.maximum(np.minimum(firsts, ends - 1), ends - MOST_KEPT)
    return list(zip(firsts.tolist(), ends.tolist(), strict=True))
