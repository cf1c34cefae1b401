"""Packed attention: every sequence brings its own keys and values, and no row is padded.

Sequences with as many query rows and as many blocks go through one call together. The query heads
that share a key-value head become rows of one matrix, so that it is read once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from penstock.engine.batch import IntArray, RaggedBatch
from penstock.engine.kv_cache import PagedKVCache

# Beyond this, rows fill a matrix product without the help of other heads, and folding the heads
# would only multiply the mask.
_MAX_FOLDED_QUERIES = 32
# What is gathered should still be in the processor's cache when it is multiplied.
_MAX_GATHERED_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences that attend in one call.

    rows:    where their rows lie once the batch's rows are in group order
    context: tokens of the longest of them; they differ by less than a block
    slots:   [num_seqs * context] int64, cache slots of their tokens; a shorter sequence ends in
             repetitions of its own first slot, so that it cannot meet another one's numbers
    mask:    added to the scores, [1, num_seqs, num_queries * heads of a group, context], or
             [num_queries, context] if not folded; None where nothing but causality hides a key
    """

    rows: slice
    num_seqs: int
    num_queries: int
    context: int
    slots: torch.Tensor
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PackedMetadata:
    """order: [num_tokens] int64, rows in group order, and inverse, back; None if in order."""

    groups: list[_Group]
    order: torch.Tensor | None
    inverse: torch.Tensor | None


class Backend:
    """Gathers into one scratch buffer: allocating it for every call costs more than filling it."""

    def __init__(self, cache: PagedKVCache, num_heads: int) -> None:
        self._num_kv_heads = cache.num_kv_heads
        self._group_size = num_heads // cache.num_kv_heads
        self._head_dim = cache.head_dim
        self._block_size = cache.block_size
        self._by_slot = [layer.flatten(2, 3).flatten(0, 1) for layer in cache.layers]
        self._scratch = torch.empty(0, dtype=cache.dtype, device=cache.device)

    def prepare(self, batch: RaggedBatch) -> PackedMetadata:
        num_queries = np.diff(batch.query_start).tolist()
        num_blocks = (-(-batch.seq_lens // self._block_size)).tolist()
        shapes = list(zip(num_queries, num_blocks, strict=True))
        seqs = sorted((i for i in range(batch.num_seqs) if num_queries[i]), key=shapes.__getitem__)
        members: list[list[int]] = []
        for i in seqs:
            fits = members and shapes[members[-1][0]] == shapes[i]
            if fits and len(members[-1]) < self._most_together(*shapes[i]):
                members[-1].append(i)
            else:
                members.append([i])
        groups: list[_Group] = []
        for group in members:
            start = groups[-1].rows.stop if groups else 0
            groups.append(self._group(batch, group, num_queries[group[0]], start))
        self._reserve(max(group.slots.shape[0] for group in groups))
        if seqs == sorted(seqs):
            return PackedMetadata(groups, None, None)
        rows = np.arange(batch.num_tokens)
        order = np.concatenate([rows[slice(*batch.query_start[i : i + 2])] for i in seqs])
        return PackedMetadata(groups, self._tensor(order), self._tensor(np.argsort(order)))

    def attend(self, q: torch.Tensor, layer: int, metadata: PackedMetadata) -> torch.Tensor:
        if metadata.order is not None:
            q = q.index_select(0, metadata.order)
        outputs = [self._attend_group(q[group.rows], layer, group) for group in metadata.groups]
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out if metadata.inverse is None else out.index_select(0, metadata.inverse)

    def _attend_group(self, q: torch.Tensor, layer: int, group: _Group) -> torch.Tensor:
        """q: [num_seqs * num_queries, num_heads, head_dim]; returns the same shape."""
        keys, values = self._gather(layer, group)
        num_seqs, num_queries = group.num_seqs, group.num_queries
        kv_heads, group_size = self._num_kv_heads, self._group_size
        grouped = q.view(num_seqs, num_queries, kv_heads, group_size, self._head_dim)
        if num_queries <= _MAX_FOLDED_QUERIES:
            out = F.scaled_dot_product_attention(
                grouped.permute(2, 0, 1, 3, 4).flatten(2, 3), keys, values, attn_mask=group.mask
            )
            out = out.view(kv_heads, num_seqs, num_queries, group_size, self._head_dim)
            return out.permute(1, 2, 0, 3, 4).reshape(q.shape)
        heads = (kv_heads, group_size, group.context, self._head_dim)
        out = F.scaled_dot_product_attention(
            grouped[0].permute(1, 2, 0, 3),
            keys.expand(heads),
            values.expand(heads),
            attn_mask=group.mask,
            is_causal=group.mask is None,
        )
        return out.permute(2, 0, 1, 3).reshape(q.shape)

    def _gather(self, layer: int, group: _Group) -> torch.Tensor:
        """[2, num_kv_heads, num_seqs, context, head_dim]."""
        stored = self._by_slot[layer]
        tokens = group.slots.shape[0]
        scratch = self._scratch[: stored.shape[0] * tokens * self._head_dim]
        scratch = scratch.view(stored.shape[0], tokens, self._head_dim)
        torch.index_select(stored, 1, group.slots, out=scratch)
        return scratch.view(2, self._num_kv_heads, group.num_seqs, group.context, self._head_dim)

    def _reserve(self, tokens: int) -> None:
        elements = 2 * self._num_kv_heads * self._head_dim * tokens
        if self._scratch.shape[0] < elements:
            self._scratch = self._scratch.new_empty(elements)

    def _most_together(self, num_queries: int, num_blocks: int) -> int:
        """Sequences of that shape in one call."""
        if num_queries > _MAX_FOLDED_QUERIES:
            return 1
        per_slot = 2 * self._num_kv_heads * self._head_dim * self._scratch.itemsize
        return max(1, _MAX_GATHERED_BYTES // (num_blocks * self._block_size * per_slot))

    def _group(self, batch: RaggedBatch, seqs: list[int], num_queries: int, start: int) -> _Group:
        seq_lens = batch.seq_lens[seqs]
        shortest, context = int(seq_lens.min()), int(seq_lens.max())
        num_blocks = -(-context // self._block_size)
        firsts = batch.block_tables[seqs, :num_blocks].astype(np.int64) * self._block_size
        slots = (firsts[:, :, None] + np.arange(self._block_size)).reshape(len(seqs), -1)
        slots = slots[:, :context]
        if shortest < context:
            slots = np.where(np.arange(context) < seq_lens[:, None], slots, slots[:, :1])

        whole = num_queries == context and num_queries > _MAX_FOLDED_QUERIES
        last_only = num_queries == 1 and shortest == context
        return _Group(
            rows=slice(start, start + len(seqs) * num_queries),
            num_seqs=len(seqs),
            num_queries=num_queries,
            context=context,
            slots=self._tensor(slots.reshape(-1)),
            mask=None if whole or last_only else self._mask(seq_lens, num_queries, context),
        )

    def _mask(self, seq_lens: IntArray, num_queries: int, context: int) -> torch.Tensor:
        query_positions = seq_lens[:, None] - num_queries + np.arange(num_queries)
        visible = np.arange(context) <= query_positions[:, :, None]
        mask = np.where(visible, np.float32(0), np.float32("-inf"))
        if num_queries > _MAX_FOLDED_QUERIES:
            return self._tensor(mask[0]).to(self._scratch.dtype)
        return self._tensor(mask.repeat(self._group_size, axis=1)[None]).to(self._scratch.dtype)

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._scratch.device)
