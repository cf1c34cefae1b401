"""Packed attention: batches of sequences of equal size, without padded rows.

Sequences with equal numbers of query rows and blocks share a call. The query heads of a KV head
become rows of one matrix, so that it is read once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from penstock.engine.gather import Gathered, KVGather, seen
from penstock.engine.kv_cache import PagedKVCache
from penstock.engine.runner import IntArray, RaggedBatch

# More rows fill a matrix product without folding heads, which would multiply the mask.
_MAX_FOLDED_QUERIES = 32
# Gathered keys and values should fit a CPU's cache; on a GPU fewer calls matter more.
_MAX_GATHERED_BYTES = 2 << 20
_MAX_GATHERED_BYTES_ON_GPU = 256 << 20


@dataclass(frozen=True, slots=True)
class _Group:
    """Sequences that attend in one call.

    rows: their rows in group order
    kv:   a row per sequence, as long as the longest or the window; lengths differ by less than a
          block, and shorter rows end in repetitions of their first slot
    mask: added to the scores, [1, num_seqs, num_queries * heads of a group, context], or
          [num_queries, context] for a chunk; None if no key is hidden except by causality
    """

    rows: slice
    num_seqs: int
    num_queries: int
    kv: Gathered
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PackedMetadata:
    """Groups, in the order of their rows.

    folded: groups with few query rows per sequence, whose heads are folded into rows
    chunks: groups of one sequence with many query rows
    order, inverse: [num_tokens] int64, permutation to group order and back; None if in order
    """

    folded: list[_Group]
    chunks: list[_Group]
    order: torch.Tensor | None
    inverse: torch.Tensor | None


class PackedAttention:
    """Packed attention; see `Attention`."""

    def __init__(self, cache: PagedKVCache, num_heads: int) -> None:
        self._num_kv_heads = cache.num_kv_heads
        self._group_size = num_heads // cache.num_kv_heads
        self._head_dim = cache.head_dim
        self._block_size = cache.block_size
        self._most_bytes = (
            _MAX_GATHERED_BYTES if cache.device.type == "cpu" else _MAX_GATHERED_BYTES_ON_GPU
        )
        self.gather = KVGather(cache)

    def prepare(self, batch: RaggedBatch, window: int | None = None) -> PackedMetadata:
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
        # In the order of first sequences few rows move.
        members.sort(key=lambda group: (num_queries[group[0]] > _MAX_FOLDED_QUERIES, group[0]))
        seqs = [i for group in members for i in group]
        spans = [_span(batch.seq_lens[m], num_queries[m[0]], window) for m in members]
        sizes = [
            (len(m) * len(span), num_queries[m[0]]) for m, span in zip(members, spans, strict=True)
        ]
        self.gather.reserve(max(size * self._heads_at_once(size, n) for size, n in sizes))
        groups: list[_Group] = []
        for group, span in zip(members, spans, strict=True):
            start = groups[-1].rows.stop if groups else 0
            groups.append(self._group(batch, group, num_queries[group[0]], start, span, window))
        folded = [group for group in groups if group.num_queries <= _MAX_FOLDED_QUERIES]
        chunks = groups[len(folded) :]
        if seqs == sorted(seqs):
            return PackedMetadata(folded, chunks, None, None)
        rows = np.arange(batch.num_tokens)
        order = np.concatenate([rows[slice(*batch.query_start[i : i + 2])] for i in seqs])
        inverse = self.gather.tensor(np.argsort(order))
        return PackedMetadata(folded, chunks, self.gather.tensor(order), inverse)

    def attend(
        self,
        q: torch.Tensor,
        layer: int,
        metadata: PackedMetadata,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if metadata.order is not None:
            q = q.index_select(0, metadata.order)
        if sinks is not None:  # by KV head
            sinks = sinks.view(self._num_kv_heads, self._group_size)
        outputs = [self._attend_chunk(q[g.rows], layer, g, sinks) for g in metadata.chunks]
        if metadata.folded:
            folded = q[: metadata.folded[-1].rows.stop]
            outputs.insert(0, self._attend_folded(folded, layer, metadata.folded, sinks))
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out if metadata.inverse is None else out.index_select(0, metadata.inverse)

    def _attend_folded(
        self, q: torch.Tensor, layer: int, groups: list[_Group], sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend all folded groups. q, result: [rows of the groups, num_heads, head_dim].

        Groups share reshapes and permutations: overhead dominates in small models.
        """
        heads = (self._num_kv_heads, self._group_size, self._head_dim)
        by_head = q.view(-1, *heads).permute(1, 0, 2, 3).reshape(heads[0], -1, heads[2])
        out = torch.empty_like(by_head)
        sizes = [g.num_seqs * g.num_queries * self._group_size for g in groups]
        parts = zip(groups, torch.split(by_head, sizes, 1), torch.split(out, sizes, 1), strict=True)
        for group, queries, into in parts:
            shape = (heads[0], group.num_seqs, -1, heads[2])
            at_once = group.kv.keys.shape[0]
            for first in range(0, heads[0], at_once):
                some = slice(first, first + at_once)
                self.gather.fill(layer, group.kv, first)
                own = None if sinks is None else sinks[some].repeat(1, group.num_queries)
                attended = _attended(
                    queries.view(shape)[some],
                    group.kv.keys,
                    group.kv.values,
                    group.mask,
                    None if own is None else own[:, None, :],
                )
                into.view(shape)[some].copy_(attended)
        return out.view(heads[0], -1, *heads[1:]).permute(1, 0, 2, 3).reshape(q.shape)

    def _attend_chunk(
        self, q: torch.Tensor, layer: int, group: _Group, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        self.gather.fill(layer, group.kv)
        grouped = q.view(-1, self._num_kv_heads, self._group_size, self._head_dim)
        out = _attended(
            grouped.permute(1, 2, 0, 3),
            group.kv.keys,
            group.kv.values,
            group.mask,
            None if sinks is None else sinks[:, :, None],
            is_causal=group.mask is None,
        )
        return out.permute(2, 0, 1, 3).reshape(q.shape)

    def _most_together(self, num_queries: int, num_blocks: int) -> int:
        if num_queries > _MAX_FOLDED_QUERIES:
            return 1
        per_seq = num_blocks * self._block_size * self.gather.bytes_per_token
        return max(1, self._most_bytes // per_seq)

    def _heads_at_once(self, num_slots: int, num_queries: int) -> int:
        """Return the KV heads to gather at a time; all for chunks of prompts."""
        if num_queries > _MAX_FOLDED_QUERIES:
            return self._num_kv_heads
        fit = self._most_bytes * self._num_kv_heads // (num_slots * self.gather.bytes_per_token)
        if fit >= self._num_kv_heads:
            return self._num_kv_heads
        divisors = (n for n in range(1, self._num_kv_heads + 1) if self._num_kv_heads % n == 0)
        return max(n for n in divisors if n <= max(1, fit))

    def _group(
        self,
        batch: RaggedBatch,
        seqs: list[int],
        num_queries: int,
        start: int,
        span: range,
        window: int | None,
    ) -> _Group:
        """Build a group. span: positions visible to any of its sequences."""
        seq_lens = batch.seq_lens[seqs]
        shortest, context = int(seq_lens.min()), span.stop
        blocks = slice(span.start // self._block_size, -(-context // self._block_size))
        firsts = batch.block_tables[seqs, blocks].astype(np.int64) * self._block_size
        slots = (firsts[:, :, None] + np.arange(self._block_size)).reshape(len(seqs), -1)
        skipped = span.start % self._block_size
        slots = slots[:, skipped : skipped + len(span)]
        if shortest < context:
            slots = np.where(np.array(span) < seq_lens[:, None], slots, slots[:, :1])

        is_chunk = num_queries > _MAX_FOLDED_QUERIES
        whole = is_chunk and num_queries == context and (window is None or context <= window)
        last_only = num_queries == 1 and shortest == context
        mask = None if whole or last_only else self._mask(seq_lens, num_queries, span, window)
        return _Group(
            rows=slice(start, start + len(seqs) * num_queries),
            num_seqs=len(seqs),
            num_queries=num_queries,
            kv=self.gather.place(slots, len(seqs), self._heads_at_once(slots.size, num_queries)),
            mask=mask,
        )

    def _mask(
        self, seq_lens: IntArray, num_queries: int, span: range, window: int | None
    ) -> torch.Tensor:
        query_positions = seq_lens[:, None] - num_queries + np.arange(num_queries)
        visible = seen(np.array(span), query_positions[:, :, None], window)
        if num_queries > _MAX_FOLDED_QUERIES:
            return self.gather.added(visible[0])
        return self.gather.added(visible.repeat(self._group_size, axis=1)[None])


def _attended(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    *,
    is_causal: bool = False,
) -> torch.Tensor:
    """Return softmax(q k^T / sqrt(head_dim)) v.

    queries: [kv heads, n, queries, head_dim]; keys, values: the same, or of one for all n
    sinks:   as the queries, without head_dim"""
    head_dim, every = queries.shape[-1], (*queries.shape[:2], -1, -1)
    if sinks is None:
        return F.scaled_dot_product_attention(
            queries,
            keys.expand(every),
            values.expand(every),
            attn_mask=mask,
            is_causal=is_causal,
        )
    # A key more, of which a further column of the queries says the score; eight, as kernels want
    # whole vectors.
    columns = queries.new_zeros((*queries.shape[:-1], 8))
    columns[..., 0] = sinks * head_dim**0.5
    keys, values = F.pad(keys, (0, 8, 1, 0)), F.pad(values, (0, 8, 1, 0))
    keys[..., 0, head_dim] = 1
    if is_causal:
        count = queries.shape[-2]
        hidden = torch.ones(count, count, dtype=torch.bool, device=keys.device).triu(1)
        mask = torch.zeros_like(hidden, dtype=keys.dtype).masked_fill(hidden, -torch.inf)
    out = F.scaled_dot_product_attention(
        torch.cat((queries, columns), dim=-1),
        keys.expand(every),
        values.expand(every),
        attn_mask=None if mask is None else F.pad(mask, (1, 0)),
        scale=head_dim**-0.5,
    )
    return out[..., :head_dim]


def _span(seq_lens: IntArray, num_queries: int, window: int | None) -> range:
    """Return the positions visible to the last `num_queries` rows of any sequence."""
    first = 0 if window is None else max(0, int(seq_lens.min()) - num_queries + 1 - window)
    return range(first, int(seq_lens.max()))
