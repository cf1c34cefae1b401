"""A ragged batch in buffers that stay where they are, so that one graph serves many steps."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from penstock.engine.batch import IntArray, RaggedBatch

MAX_WINDOW = 16
"""Most rows of one sequence: what a verification brings, not a chunk of a prompt."""


@dataclass(frozen=True, slots=True)
class BatchShape:
    """Places of a static batch. window: most rows of a sequence; width: blocks of a table."""

    rows: int
    seqs: int
    window: int
    width: int
    pieces: int


@dataclass(frozen=True, slots=True)
class StaticBatch:
    """int32 tensors on the device, all of them views of `flat`, in this order.

    token_ids, positions, slots: [rows]; a row of no sequence writes to a scratch slot
    row_seq:      [rows], a row's sequence; -1 for a row of none
    query_start:  [seqs + 1]; seq_lens: [seqs], 0 for a place without a sequence
    logits_rows:  [seqs], a row of each sequence; 0 for a place without one
    piece_len:    [1], keys of a piece of split attention; all fit into `capacity.pieces`
    tables:       [seqs, width]
    """

    capacity: BatchShape
    flat: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    row_seq: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    logits_rows: torch.Tensor
    piece_len: torch.Tensor
    tables: torch.Tensor

    @classmethod
    def allocate(cls, capacity: BatchShape, device: torch.device) -> StaticBatch:
        """Without any sequence."""
        flat = torch.zeros(_flat_size(capacity), dtype=torch.int32, device=device)
        return cls.over(capacity, flat).emptied()

    @classmethod
    def over(cls, capacity: BatchShape, flat: torch.Tensor) -> StaticBatch:
        """In memory that is there: int32, at a multiple of 16 bytes."""
        sizes = _sizes(capacity)
        whole = torch.split(flat, [_aligned(size) for size in sizes])
        parts = [part[:size] for part, size in zip(whole, sizes, strict=True)]
        parts[-1] = parts[-1].view(capacity.seqs, capacity.width)
        return cls(capacity, flat, *parts)

    def on(self, device: torch.device) -> StaticBatch:
        """The same on another device."""
        return self.over(self.capacity, self.flat.to(device))

    def with_own_rows(self) -> StaticBatch:
        """Of the same sequences and tables, with other buffers for what a step finds out: tokens,
        positions, slots and lengths."""
        return replace(
            self,
            token_ids=torch.zeros_like(self.token_ids),
            positions=torch.zeros_like(self.positions),
            slots=torch.zeros_like(self.slots),
            seq_lens=torch.zeros_like(self.seq_lens),
        )

    def emptied(self) -> StaticBatch:
        """Itself, without any sequence."""
        self.row_seq.fill_(-1)
        self.piece_len.fill_(1)
        return self

    def fill(self, batch: RaggedBatch, block_size: int, scratch_slot: int, grows_by: int) -> None:
        """Write a batch into these buffers, which must be in the host's memory.

        scratch_slot: where rows of no sequence write. grows_by: tokens by which the sequences will
        grow while the buffers are in use.
        """
        rows, seqs, width = batch.num_tokens, batch.num_seqs, batch.block_tables.shape[1]
        counts = np.diff(batch.query_start)
        host = {f.name: getattr(self, f.name).numpy() for f in fields(self)[2:]}
        host["token_ids"][:rows] = batch.token_ids
        host["positions"][:rows] = batch.positions
        host["positions"][rows:] = 0
        host["slots"][:rows] = batch.slot_mapping(block_size)
        host["slots"][rows:] = scratch_slot
        host["row_seq"][:rows] = np.repeat(np.arange(seqs, dtype=np.int32), counts)
        host["row_seq"][rows:] = -1
        host["query_start"][: seqs + 1] = batch.query_start
        host["query_start"][seqs + 1 :] = rows
        host["seq_lens"][:seqs] = batch.seq_lens
        host["seq_lens"][seqs:] = 0
        few = min(seqs, len(batch.logits_rows))
        host["logits_rows"][:few] = batch.logits_rows[:few]
        host["logits_rows"][few:] = 0
        reach = batch.seq_lens + grows_by
        host["piece_len"][0] = piece_length(reach, self.capacity.pieces)
        host["tables"][:seqs, :width] = batch.block_tables


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the host writes and the device reads, views of one piece, so that one copy brings it.

    temperature: [num_draws] float32, 0 for greedy
    keys:        [num_draws, MAX_WINDOW, 2] int32, for a sequence that is so many positions shorter
    places:      [rows] int32, where a row's token lies among those that come late, or -1
    limits:      [seqs] int32, tokens to draft
    short:       [seqs] int32, by how many positions a sequence is shorter than the batch says
    """

    flat: torch.Tensor
    batch: StaticBatch
    temperature: torch.Tensor
    keys: torch.Tensor
    places: torch.Tensor
    limits: torch.Tensor
    short: torch.Tensor

    @classmethod
    def allocate(
        cls, capacity: BatchShape, num_draws: int, device: torch.device, *, pinned: bool = False
    ) -> StepInputs:
        """pinned: in page-locked memory, from where a copy to a GPU need not be waited for."""
        rows, seqs = capacity.rows, capacity.seqs
        sizes = [_flat_size(capacity), num_draws, 2 * MAX_WINDOW * num_draws, rows, seqs, seqs]
        whole = [_aligned(size) for size in sizes]
        flat = torch.zeros(sum(whole), dtype=torch.int32, device=device, pin_memory=pinned)
        parts = [part[:n] for part, n in zip(torch.split(flat, whole), sizes, strict=True)]
        batch, temperature, keys, places, limits, short = parts
        return cls(
            flat,
            StaticBatch.over(capacity, batch).emptied(),
            temperature.view(torch.float32),
            keys.view(num_draws, MAX_WINDOW, 2),
            places,
            limits,
            short,
        )


PIECE_STEP = 64


def piece_length(seq_lens: IntArray, num_pieces: int) -> int:
    """The shortest multiple of PIECE_STEP with which so many pieces surely suffice.

    A sequence has at most one piece that is not full, so total / (num_pieces - seqs) keys do.
    """
    spare = num_pieces - len(seq_lens)
    if spare < 1:
        raise ValueError(f"{num_pieces} pieces for {len(seq_lens)} sequences; more are needed")
    return max(1, -(-int(seq_lens.sum()) // (spare * PIECE_STEP))) * PIECE_STEP


def _sizes(capacity: BatchShape) -> list[int]:
    rows, seqs = capacity.rows, capacity.seqs
    return [rows, rows, rows, rows, seqs + 1, seqs, seqs, 1, seqs * capacity.width]


def _flat_size(capacity: BatchShape) -> int:
    """Numbers that a static batch consists of."""
    return sum(_aligned(size) for size in _sizes(capacity))


def _aligned(size: int) -> int:
    """Parts begin at multiples of 16 bytes: Triton compiles a kernel anew for every pattern of
    pointers that do and pointers that do not."""
    return -(-size // 4) * 4
