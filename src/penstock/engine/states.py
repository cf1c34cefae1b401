"""Recurrent states of sequences: how many tokens each stands behind, and what a step does to it.

A state is that behind a sequence's verified text. Rows whose tokens may be rejected change it only
when the next step of the sequence begins behind them: their inputs are kept, and are replayed in
the same order of operations, which gives the same bits. To go back is to begin earlier."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.policies.base import MOST_DRAFT_TOKENS
from penstock.engine.runner import IntArray, RaggedBatch
from penstock.engine.sampling.params import BoolArray

MOST_KEPT = MOST_DRAFT_TOKENS + 1
"""Most rows of a sequence whose inputs are kept: of a draft, and of the token before it."""


@dataclass(frozen=True, slots=True)
class StateMoves:
    """Changes that a step makes to the states of a batch's sequences. All [num_seqs] int32.

    slots:     places of the states
    replayed:  rows that were kept and now belong to the text; -1: the sequence begins
    committed: rows of this step that the state takes in; those behind them are kept"""

    slots: IntArray
    replayed: IntArray
    committed: IntArray


class StateSlots:
    """Positions of the states in `num_slots` slots. parts: tensors of the states, by slot first."""

    def __init__(self, num_slots: int, parts: Iterable[torch.Tensor]) -> None:
        self._behind = np.zeros(num_slots, dtype=np.int32)
        self._kept = np.zeros(num_slots, dtype=np.int32)
        self._parts = tuple(parts)

    def moves(self, batch: RaggedBatch) -> StateMoves:
        """Return a step's moves. Raises ValueError where a state cannot be had.

        Behind the first row whose logits are wanted lie those of a draft: they are kept, as many
        as fit. A batch without slots has the first ones, and goes on from whatever they hold: it is
        for measurements."""
        counts, starts = self._rows(batch)
        before = np.searchsorted(batch.logits_rows, batch.query_start)
        rows = np.append(batch.logits_rows, batch.num_tokens)
        ends = rows[before[:-1]] + (0 if batch.again else 1)
        certain = np.minimum(ends, batch.query_start[1:]) - batch.query_start[:-1]
        committed = np.maximum(certain, counts - MOST_KEPT)
        slots = np.arange(batch.num_seqs, dtype=np.int32) if batch.slots is None else batch.slots
        for slot, copy, num_tokens, is_saved in batch.copies:
            if is_saved:
                self._behind[copy] = -1
                committed[slots == slot] = (num_tokens - starts)[slots == slot]
            else:
                self._copy(copy, slot, num_tokens)
        replayed = starts - self._behind[self._checked(slots)]
        kept = (replayed >= 0) & (replayed <= self._kept[slots])
        wrong = (starts > 0) & (counts > 0) & ~kept
        if batch.slots is not None:
            self._refuse(wrong, starts, slots)
        replayed[wrong] = 0
        replayed[starts == 0] = -1
        return StateMoves(slots, replayed, committed.astype(np.int32))

    def moved(self, batch: RaggedBatch, moves: StateMoves) -> None:
        """Note that a step was computed."""
        counts, starts = self._rows(batch)
        has_rows = counts > 0
        slots = moves.slots[has_rows]
        self._behind[slots] = (starts + moves.committed)[has_rows]
        self._kept[slots] = (counts - moves.committed)[has_rows]
        for slot, copy, num_tokens, is_saved in batch.copies:
            if is_saved:
                self._copy(slot, copy, num_tokens)

    def _copy(self, source: int, slot: int, num_tokens: int) -> None:
        """Copy a state without kept rows. Raises ValueError where it is behind other text."""
        if self._behind[source] != num_tokens:
            raise ValueError(f"a state is behind {self._behind[source]} tokens, not {num_tokens}")
        for part in self._parts:
            part[slot] = part[source]
        self._behind[slot], self._kept[slot] = num_tokens, 0

    @staticmethod
    def _rows(batch: RaggedBatch) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return the sequences' numbers of rows, and positions of the first ones."""
        counts = np.diff(batch.query_start)
        return counts, batch.seq_lens - counts

    def _checked(self, slots: IntArray) -> IntArray:
        most = len(self._behind)
        if len({*slots.tolist()}) < len(slots) or np.any((slots < 0) | (slots >= most)):
            raise ValueError(f"slots are {slots.tolist()}; must differ, within 0..{most - 1}")
        return slots

    def _refuse(self, wrong: BoolArray, starts: IntArray, slots: IntArray) -> None:
        """Raises ValueError for the first wrong sequence, if any."""
        for i in np.flatnonzero(wrong):
            behind, kept = self._behind[slots[i]], self._kept[slots[i]]
            raise ValueError(
                f"sequence {i} begins at {starts[i]}; its state is behind {behind} tokens, and "
                f"{kept} more are kept"
            )
