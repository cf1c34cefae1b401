"""One model on one device, and the ragged batch that it reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.learn.confidence import Stop
from penstock.core.types import SamplingParams
from penstock.engine.drafters.drafts import Drafts
from penstock.engine.models.config import DecoderConfig
from penstock.engine.sampling import SamplingRows, TokenSampler
from penstock.engine.sampling.params import BoolArray

IntArray = npt.NDArray[np.int32]


@dataclass(slots=True)
class Carry:
    """Hidden states that a model's head needs of the rows before, and those that are kept.

    before: [num_seqs, hidden_size] float32, of the row before each sequence's first
    rows:   [num_kept] int32, ascending rows whose states are kept: for the head, or as embeddings
    vocab:  tokens to which the head's rows give logits, the first ones; 0: all
    after:  the kept states, [num_kept, hidden_size] float32; set by the pass
    anchors: [num_seqs] int32, position of each draft's first row, where an assistant has all rows
            of it: it reads keys and values of the text before"""

    before: torch.Tensor
    rows: IntArray
    vocab: int = 0
    after: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    anchors: IntArray | None = None


@dataclass(frozen=True, slots=True)
class RaggedBatch:
    """Rows of several sequences laid end to end; plain numpy, so that any backend can read it.

    Sequence ``i`` owns rows ``query_start[i]:query_start[i + 1]``; they are consecutive positions
    that end at ``seq_lens[i] - 1``. The keys and values of the rows are written to the paged cache
    before attention, which is causal over positions ``0..seq_lens[i] - 1``.

    token_ids: [num_tokens] int32
    positions: [num_tokens] int32, absolute
    query_start: [num_seqs + 1] int32, non-decreasing, from 0 to num_tokens
    seq_lens: [num_seqs] int32, tokens of context including this batch's rows
    block_tables: [num_seqs, max_blocks] int32; block j holds positions j*block_size onward
    logits_rows: [num_logits] int32, ascending rows of which logits are wanted
    copies: of recurrent states: slot, that of the copy, tokens before, whether it is made or used
    slots: [num_seqs] int32, places of recurrent states (`engine.states`), where a model has some
    again: the last row of a sequence with logits may come again
    carry: hidden states; None: zeros are before the rows of a head, and nothing is kept"""

    token_ids: IntArray
    positions: IntArray
    query_start: IntArray
    seq_lens: IntArray
    block_tables: IntArray
    logits_rows: IntArray
    slots: IntArray | None = None
    copies: Sequence[tuple[int, int, int, bool]] = ()
    again: bool = False
    carry: Carry | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])

    @property
    def num_seqs(self) -> int:
        return int(self.seq_lens.shape[0])

    def slot_mapping(self, block_size: int) -> npt.NDArray[np.int64]:
        """Return the cache slot (block * block_size + offset) of every row: [num_tokens] int64."""
        counts = np.diff(self.query_start)
        seq_of_row = np.repeat(np.arange(self.num_seqs), counts)
        blocks = self.block_tables[seq_of_row, self.positions // block_size].astype(np.int64)
        return blocks * block_size + self.positions % block_size


class BatchWriter:
    """Builds a ragged batch, sequence by sequence.

    It appends to lists, which is faster than joining small arrays."""

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._positions: list[int] = []
        self._query_start = [0]
        self._seq_lens: list[int] = []
        self._logits_rows: list[int] = []

    def add(self, start: int, token_ids: Sequence[int], num_logits: int) -> None:
        """Add rows of one sequence from position `start`; the last `num_logits` yield logits."""
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

    def batch(self, block_tables: IntArray, slots: IntArray | None = None) -> RaggedBatch:
        """Return the batch. block_tables: [sequences, max_blocks] int32; slots: as its own."""
        return RaggedBatch(
            token_ids=np.array(self._token_ids, dtype=np.int32),
            positions=np.array(self._positions, dtype=np.int32),
            query_start=np.array(self._query_start, dtype=np.int32),
            seq_lens=np.array(self._seq_lens, dtype=np.int32),
            block_tables=block_tables,
            logits_rows=np.array(self._logits_rows, dtype=np.int32),
            slots=slots,
        )


class Model(ABC):
    """A model with its paged KV cache, as the executor measures it.

    keeps_batches: a step with the requests of the step before is the usual one, and faster
    num_slots: recurrent states that it has room for; None where it has none"""

    num_blocks: int
    block_size: int
    device: torch.device
    keeps_batches = False
    num_slots: int | None = None

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @abstractmethod
    def dummy_run(self, batch: RaggedBatch) -> None:
        """Compute a step and its samples, to be timed."""

    def limit_threads(self, num_threads: int) -> None:  # noqa: B027
        """Compute with at most `num_threads` threads from now on."""

    def num_that_fit(self, num_tokens: int) -> int:
        """Return the number of requests of `num_tokens` tokens that fit the KV cache."""
        fitting = self.num_blocks // self.blocks_for(num_tokens)
        return fitting if self.num_slots is None else min(fitting, self.num_slots)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the KV blocks of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


class ModelRunner(Model):
    """Weights, paged KV cache and forward pass of one model.

    Every backend computes the same function: logits equal the reference within rounding, and rows
    of one sequence do not depend on the others in a batch.

    sample: draws the target's seeded samples from logits"""

    config: DecoderConfig
    sample: TokenSampler

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @abstractmethod
    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Write the rows' KV, attend, and return float32 logits [num_logits, vocab_size].

        States that `batch.carry` keeps are those behind the last norm, but of EAGLE-3's targets."""

    def verify(
        self,
        batch: RaggedBatch,
        row_start: IntArray,
        params: SamplingRows,
        kept: IntArray,
    ) -> tuple[list[int], torch.Tensor] | None:
        """Run `forward` and draw the target's samples in one call; None if there is none.

        Returns samples and only the logits of the rows `kept` (int32, rising): [len(kept),
        vocab_size]. row_start: [num_requests + 1], rows of logits of each request; params:
        temperature and seed are read."""
        return None

    def propose(
        self,
        first: RaggedBatch,
        limits: IntArray,
        params: SamplingRows,
        ratio: BoolArray,
        starts: npt.NDArray[np.int64],
        stop: Stop | None = None,
    ) -> Drafts | None:
        """Read a batch and draft up to limits[i] tokens per sequence; None if not in one call.

        ratio: [num_seqs], drafts sampled from the drafter's own distribution; params: unfiltered;
        starts: [num_seqs] int64, positions at which the drafts begin; stop: early stopping, if any
        """
        return None

    def forward_head(self, batch: RaggedBatch) -> torch.Tensor:
        """Compute one row of each sequence by the model's head; logits as `forward`.

        A row at a position takes its token and, by `batch.carry`, the state before it."""
        raise NotImplementedError("this runner computes no heads")

    def dummy_run(self, batch: RaggedBatch) -> None:
        logits = self.forward(batch)
        rows = SamplingRows.from_params([SamplingParams(temperature=0.0)] * logits.shape[0])
        self.sample(logits, rows, np.zeros(logits.shape[0], dtype=np.int64)).cpu()


class HeadRunner(ModelRunner):
    """The head of a runner's model: a row is followed by what its hidden state and token give.

    Its keys and values are those of one layer more of the model's cache. Every pass of the model
    writes them for its rows; those of a draft are written again by the pass that verifies it."""

    def __init__(self, model: ModelRunner) -> None:
        self._model = model
        self.config, self.sample = model.config, model.sample
        self.num_blocks, self.block_size = model.num_blocks, model.block_size
        self.device = model.device

    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        return self._model.forward_head(batch)

    def limit_threads(self, num_threads: int) -> None:
        self._model.limit_threads(num_threads)

    def propose(self, *order: Any, **kwargs: Any) -> Drafts | None:
        return self._model.propose(*order, **kwargs)
