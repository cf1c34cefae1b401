"""The ragged batch: what one forward pass of one model reads, with no padding between requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Rows of several sequences laid end to end; plain numpy, so that any backend can read it.

    Sequence ``i`` owns rows ``query_start[i]:query_start[i + 1]``; they are consecutive positions
    that end at ``seq_lens[i] - 1``. The keys and values of the rows are written to the paged cache
    before attention, which is causal over positions ``0..seq_lens[i] - 1``.

    token_ids:    [num_tokens] int32
    positions:    [num_tokens] int32, absolute
    query_start:  [num_seqs + 1] int32, non-decreasing, from 0 to num_tokens
    seq_lens:     [num_seqs] int32, tokens of context including this batch's rows
    block_tables: [num_seqs, max_blocks] int32; block j holds positions j*block_size onward
    logits_rows:  [num_logits] int32, ascending rows of which logits are wanted
    """

    token_ids: IntArray
    positions: IntArray
    query_start: IntArray
    seq_lens: IntArray
    block_tables: IntArray
    logits_rows: IntArray

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_seqs(self) -> int:
        return int(self.seq_lens.shape[0])

    def slot_mapping(self, block_size: int) -> npt.NDArray[np.int64]:
        """Cache slot (block * block_size + offset) of every row: [num_tokens] int64."""
        counts = np.diff(self.query_start)
        seq_of_row = np.repeat(np.arange(self.num_seqs), counts)
        blocks = self.block_tables[seq_of_row, self.positions // block_size].astype(np.int64)
        return blocks * block_size + self.positions % block_size


class BatchWriter:
    """A ragged batch in the making, sequence by sequence. Lists grow faster than small arrays can
    be joined, and most sequences bring a few rows."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._positions: list[int] = []
        self._query_start = [0]
        self._seq_lens: list[int] = []
        self._logits_rows: list[int] = []

    def add(self, start: int, token_ids: Sequence[int], num_logits: int) -> None:
        """Rows of one sequence from position `start`; logits are wanted of the last ones."""
        end = start + len(token_ids)
        self._token_ids += token_ids
        self._positions += range(start, end)
        rows = len(self._token_ids)
        self._logits_rows += range(rows - num_logits, rows)
        self._query_start.append(rows)
        self._seq_lens.append(end)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self._seq_lens)

    def batch(self, block_tables: IntArray) -> RaggedBatch:
        """block_tables: [sequences, max_blocks] int32."""
        return RaggedBatch(
            token_ids=np.array(self._token_ids, dtype=np.int32),
            positions=np.array(self._positions, dtype=np.int32),
            query_start=np.array(self._query_start, dtype=np.int32),
            seq_lens=np.array(self._seq_lens, dtype=np.int32),
            block_tables=block_tables,
            logits_rows=np.array(self._logits_rows, dtype=np.int32),
        )
