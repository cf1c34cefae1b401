"""Paged split-KV attention by Triton kernels: up to 16 rows a sequence, keys cut into pieces.

Chunks of prompts have rows enough to fill matrix products by themselves and go the `packed` way;
over float8 keys, which that cannot read, they are cut into windows of 16 rows.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch

from penstock.engine.attention import BackendUnavailableError
from penstock.engine.attention.packed import PackedAttention, PackedMetadata
from penstock.engine.batch import RaggedBatch
from penstock.engine.gather import IntArray
from penstock.engine.gpu.static_batch import MAX_WINDOW, PIECE_STEP, BatchShape, StaticBatch
from penstock.engine.kv_cache import PagedKVCache

# Programs that keep every multiprocessor of a large GPU busy, a few turns each, so that the last
# ones to end are a small part of the whole.
_PROGRAMS = 2112
_STAGES = 3
_MERGED_TOGETHER = 16
_PLANNED_TOGETHER = 64


def why_not_triton(device: torch.device) -> str | None:
    """Why Triton kernels cannot work on a device's tensors; None if they can."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return "the package triton is not installed"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        return f"Triton's kernels run on CUDA devices (on {device} with TRITON_INTERPRET=1 only)"
    return None


@dataclass(frozen=True, slots=True)
class Pieces:
    """A static batch and the buffers of its attention; see `gpu.kernels.attention`."""

    batch: StaticBatch
    num_rows: int
    block_m: int
    piece_seq: torch.Tensor
    piece_start: torch.Tensor
    first_piece: torch.Tensor
    partial_out: torch.Tensor
    partial_log: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Part:
    """Some sequences of a batch. rows: [rows] int64 where theirs lie; None if all rows do."""

    rows: torch.Tensor | None
    metadata: Pieces | PackedMetadata


class TritonAttention:
    """See AttentionBackend. Raises BackendUnavailableError where Triton cannot be used."""

    def __init__(self, cache: PagedKVCache, num_heads: int) -> None:
        why_not = why_not_triton(cache.device)
        if why_not is not None:
            raise BackendUnavailableError(f"attention triton_paged cannot be used: {why_not}")
        from penstock.engine.gpu.kernels import attention, launch

        self._kernels = attention
        self._launch = launch
        self._cache = cache
        self._num_heads = num_heads
        self._group = num_heads // cache.num_kv_heads
        self._packed = PackedAttention(cache, num_heads)
        self._cuts = cache.dtype == torch.float8_e4m3fn

    def num_pieces(self, seqs: int) -> int:
        """Pieces to provide for so many sequences."""
        return seqs + -(-_PROGRAMS // self._cache.num_kv_heads)

    def prepare(self, batch: RaggedBatch, window: int | None = None) -> list[_Part]:
        if window is not None:
            raise BackendUnavailableError("attention triton_paged has no sliding windows")
        counts = np.diff(batch.query_start)
        if self._cuts and counts.max() > MAX_WINDOW:
            batch = _windows(batch)
            counts = np.diff(batch.query_start)
        few = np.flatnonzero((counts > 0) & (counts <= MAX_WINDOW))
        many = np.flatnonzero(counts > MAX_WINDOW)
        parts = []
        if len(few):
            part, rows = _subset(batch, few)
            parts.append(_Part(self._rows(rows, batch), self._pieces_of(part)))
        if len(many):
            part, rows = _subset(batch, many)
            parts.append(_Part(self._rows(rows, batch), self._packed.prepare(part)))
        return parts

    def attend(self, q: torch.Tensor, layer: int, metadata: list[_Part]) -> torch.Tensor:
        if metadata[0].rows is None:
            return self._attend_part(q, layer, metadata[0])
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for part in metadata:
            assert part.rows is not None
            attended = self._attend_part(q.index_select(0, part.rows), layer, part)
            out.index_copy_(0, part.rows, attended)
        return out

    def plan(self, batch: StaticBatch) -> Pieces:
        """Cut the sequences as they are now into pieces."""
        capacity, device = batch.capacity, self._cache.device
        block_m = max(16, power_of_2(capacity.window * self._group))
        kv_heads, dim = self._cache.num_kv_heads, self._cache.head_dim
        parts = (capacity.pieces, kv_heads, block_m)
        pieces = Pieces(
            batch,
            capacity.rows,
            block_m,
            torch.empty(capacity.pieces, dtype=torch.int32, device=device),
            torch.empty(capacity.pieces, dtype=torch.int32, device=device),
            torch.empty(capacity.seqs + 1, dtype=torch.int32, device=device),
            torch.empty(*parts, dim, device=device),
            torch.empty(parts, device=device),
        )
        grid = (-(-capacity.pieces // _PLANNED_TOGETHER),)
        self._kernels.plan_pieces[grid](
            batch.seq_lens,
            batch.piece_len,
            pieces.piece_seq,
            pieces.piece_start,
            pieces.first_piece,
            capacity.seqs,
            capacity.pieces,
            BLOCK_SEQS=power_of_2(capacity.seqs),
            BLOCK_PIECES=_PLANNED_TOGETHER,
            **self._launch.options(),
        )
        return pieces

    def attend_pieces(self, q: torch.Tensor, layer: int, pieces: Pieces) -> torch.Tensor:
        """Attention of rows [num_rows, num_heads, head_dim]; those of no sequence get zeros."""
        cache, batch = self._cache, pieces.batch
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        dim, block_dim = cache.head_dim, max(16, power_of_2(cache.head_dim))
        self._kernels.attend_pieces[(batch.capacity.pieces, cache.num_kv_heads)](
            q,
            cache.layers[layer],
            cache.scales[layer],
            out,
            pieces.partial_out,
            pieces.partial_log,
            batch.tables,
            batch.query_start,
            batch.seq_lens,
            pieces.piece_seq,
            pieces.piece_start,
            pieces.first_piece,
            batch.piece_len,
            dim**-0.5,
            q.stride(0),
            out.stride(0),
            batch.tables.stride(0),
            cache.num_blocks * cache.block_size,
            GROUP=self._group,
            HEAD_DIM=dim,
            BLOCK_DIM=block_dim,
            BLOCK_SIZE=cache.block_size,
            BLOCK_M=pieces.block_m,
            BLOCK_N=PIECE_STEP,
            OPERANDS=self._launch.operand_type(q.dtype),
            num_warps=4 if pieces.block_m < 64 else 8,
            num_stages=_STAGES,
            **self._launch.options(),
        )
        self._kernels.merge_pieces[(pieces.num_rows, self._num_heads)](
            out,
            pieces.partial_out,
            pieces.partial_log,
            batch.row_seq,
            batch.query_start,
            pieces.first_piece,
            out.stride(0),
            GROUP=self._group,
            HEAD_DIM=dim,
            BLOCK_DIM=block_dim,
            BLOCK_M=pieces.block_m,
            BLOCK_PIECES=_MERGED_TOGETHER,
            **self._launch.options(),
        )
        return out

    def _attend_part(self, q: torch.Tensor, layer: int, part: _Part) -> torch.Tensor:
        if isinstance(part.metadata, Pieces):
            return self.attend_pieces(q, layer, part.metadata)
        return self._packed.attend(q, layer, part.metadata)

    def _pieces_of(self, batch: RaggedBatch) -> Pieces:
        seqs = batch.num_seqs
        window = int(np.diff(batch.query_start).max())
        width = batch.block_tables.shape[1]
        capacity = BatchShape(batch.num_tokens, seqs, window, width, self.num_pieces(seqs))
        host = StaticBatch.allocate(capacity, torch.device("cpu"))
        host.fill(batch, self._cache.block_size, scratch_slot=0, grows_by=0)
        return self.plan(host.on(self._cache.device))

    def _rows(self, rows: IntArray, batch: RaggedBatch) -> torch.Tensor | None:
        if len(rows) == batch.num_tokens:
            return None
        return torch.from_numpy(rows).to(self._cache.device)


def _subset(batch: RaggedBatch, seqs: IntArray) -> tuple[RaggedBatch, IntArray]:
    """Some sequences alone, and where their rows lie in the batch: [rows] int64."""
    counts = np.diff(batch.query_start)[seqs]
    query_start = np.zeros(len(seqs) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start[1:])
    shift = batch.query_start[seqs].astype(np.int64) - query_start[:-1]
    rows = np.arange(query_start[-1]) + np.repeat(shift, counts)
    part = RaggedBatch(
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        query_start=query_start,
        seq_lens=batch.seq_lens[seqs],
        block_tables=batch.block_tables[seqs],
        logits_rows=np.empty(0, dtype=np.int32),
    )
    return part, rows


def _windows(batch: RaggedBatch) -> RaggedBatch:
    """The same rows, in sequences of at most MAX_WINDOW of them."""
    counts = np.diff(batch.query_start).astype(np.int64)
    num = -(-counts // MAX_WINDOW)
    owner = np.repeat(np.arange(batch.num_seqs), num)
    which = np.arange(num.sum()) - np.repeat(np.cumsum(num) - num, num)
    first = which * MAX_WINDOW
    last = np.minimum(first + MAX_WINDOW, counts[owner])
    query_start = np.concatenate(([0], np.cumsum(last - first))).astype(np.int32)
    return RaggedBatch(
        token_ids=batch.token_ids,
        positions=batch.positions,
        query_start=query_start,
        seq_lens=(batch.seq_lens[owner] - counts[owner] + last).astype(np.int32),
        block_tables=batch.block_tables[owner],
        logits_rows=batch.logits_rows,
    )


def power_of_2(number: int) -> int:
    """The smallest that is not below."""
    return 1 << max(0, number - 1).bit_length()
