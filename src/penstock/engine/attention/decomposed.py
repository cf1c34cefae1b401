"""Decomposed attention (Spin, section V-A): pieces of sequences in rows of equal length.

Each piece attends with a copy of its sequence's queries. Equation 13 has one denominator for all
pieces of a request; against overflow every piece keeps the logarithm of its own here, and results
are merged with log-sum-exp rescaling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from penstock.engine.gather import Gathered, IntArray, KVGather, by_kind, seen
from penstock.engine.kv_cache import PagedKVCache
from penstock.engine.runner import RaggedBatch
from penstock.fluid.packing import AttentionCost, Decomposition, best_decomposition

Planner = Callable[[list[int], int], Decomposition]

# Relative to a token's copy, per query head of a group; measured at 5d79ef34.
_PER_SCORE, _PER_PARTIAL = 0.09, 2.0


@dataclass(frozen=True, slots=True)
class DecomposedCall:
    """Sequences whose pieces share a tensor of rows.

    kv:      keys and values in `plan`'s rows; columns without a token repeat a slot of their row
    queries: [num_rows * num_slots * window] int64, row of the batch of each place
    mask:    [num_rows, num_slots * window * heads of a group, row_length], added to the scores
    rows:    [num_seq_rows] int64, rows of the batch of these sequences
    targets: like `queries`, index into `rows` of each place; len(rows) for none
    """

    plan: Decomposition
    kv: Gathered
    queries: torch.Tensor
    mask: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True, slots=True)
class Partials:
    """Attention of query rows over parts of their keys.

    out: [num_kv_heads, num_partials, group, head_dim] float32, softmax over those keys only
    log_total: [num_kv_heads, num_partials, group] float32, logarithm of its denominator
    """

    out: torch.Tensor
    log_total: torch.Tensor


class DecomposedAttention:
    """Decomposed attention. plan: maps lengths and window to rows; default: the cheapest."""

    def __init__(self, cache: PagedKVCache, num_heads: int, plan: Planner | None = None) -> None:
        self.gather = KVGather(cache)
        self._num_kv_heads = cache.num_kv_heads
        self._group_size = num_heads // cache.num_kv_heads
        self.plan = plan or self._cheapest

    def prepare(self, batch: RaggedBatch, window: int | None = None) -> list[DecomposedCall]:
        return [self._call(batch, seqs, window) for seqs in by_kind(batch)]

    def attend(
        self,
        q: torch.Tensor,
        layer: int,
        metadata: list[DecomposedCall],
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for call in metadata:
            partials, num_rows = self._partials(q, layer, call), call.rows.shape[0] + 1
            targets = call.targets
            if sinks is not None:
                partials, targets = _with_sinks(partials, targets, num_rows, sinks)
            merged = merge(partials, targets, num_rows)[:, :-1]
            merged = merged.transpose(0, 1).reshape(-1, *q.shape[1:])
            out.index_copy_(0, call.rows, merged.to(q.dtype))
        return out

    def _partials(self, q: torch.Tensor, layer: int, call: DecomposedCall) -> Partials:
        self.gather.fill(layer, call.kv)
        keys, values = call.kv.keys, call.kv.values
        copies = self._copies(q, call)
        out, log_total = _softmax(_scores(copies, keys).add_(call.mask), values)
        # A weight of 0 does not hide NaN of another sequence in the row.
        if call.plan.num_slots > 1 and not bool(torch.isfinite(out).all()):
            out, log_total = _isolated(_scores(copies, keys), values, call)
        shape = (self._num_kv_heads, -1, self._group_size)
        return Partials(out.float().view(*shape, q.shape[-1]), log_total.view(shape))

    def _copies(self, q: torch.Tensor, call: DecomposedCall) -> torch.Tensor:
        """Return scaled queries, [num_kv_heads, num_rows, num_slots * window * group, head_dim]."""
        copies = q.index_select(0, call.queries).mul_(q.shape[-1] ** -0.5)
        heads = (self._num_kv_heads, self._group_size, q.shape[-1])
        return copies.view(call.plan.num_rows, -1, *heads).permute(2, 0, 1, 3, 4).flatten(2, 3)

    def _cheapest(self, lengths: list[int], window: int) -> Decomposition:
        per_score, per_partial = (x * self._group_size for x in (_PER_SCORE, _PER_PARTIAL))
        return best_decomposition(lengths, window, AttentionCost(0.0, 1.0, per_score, per_partial))

    def _call(self, batch: RaggedBatch, seqs: IntArray, window: int | None) -> DecomposedCall:
        counts = np.diff(batch.query_start)[seqs].astype(np.int64)
        sizes = batch.seq_lens[seqs].astype(np.int64)
        places = np.arange(counts.max())
        plan = self.plan(sizes.tolist(), len(places))
        slots, position, slot = self._columns(batch, seqs, plan)

        shape = (plan.num_rows, plan.num_slots, len(places))
        first_rows = batch.query_start[seqs].astype(np.int64)
        rows = np.concatenate([np.arange(n) + r for n, r in zip(counts, first_rows, strict=True)])
        queries, targets = np.zeros(shape, dtype=np.int64), np.full(shape, len(rows))
        query_position = np.full(shape, -1)
        wanted = places < counts[plan.request, None]
        at = (plan.row, plan.slot)
        queries[at] = first_rows[plan.request, None] + np.where(wanted, places, 0)
        own_start = np.cumsum(counts) - counts
        targets[at] = np.where(wanted, own_start[plan.request, None] + places, len(rows))
        query_position[at] = np.where(wanted, (sizes - counts)[plan.request, None] + places, -1)

        own = slot[:, None, :] == np.arange(plan.num_slots)[:, None]
        visible = own[:, :, None] & seen(position[:, None, None], query_position[..., None], window)
        visible = visible.reshape(plan.num_rows, -1, plan.row_length)
        return DecomposedCall(
            plan=plan,
            kv=self.gather.place(slots, plan.num_rows),
            queries=self.gather.tensor(queries.reshape(-1)),
            mask=self.gather.added(visible.repeat(self._group_size, axis=1)),
            rows=self.gather.tensor(rows),
            targets=self.gather.tensor(targets.reshape(-1)),
        )

    def _columns(
        self, batch: RaggedBatch, seqs: IntArray, plan: Decomposition
    ) -> tuple[IntArray, IntArray, IntArray]:
        """Return cache slots, positions, row slots (-1: none), each [num_rows, row_length]."""
        first = plan.slot == 0
        firsts = self.gather.slots(batch, seqs[plan.request[first]], plan.start[first])
        cache_slots = np.repeat(firsts[:, None], plan.row_length, axis=1)
        position, slot = np.zeros_like(cache_slots), np.full_like(cache_slots, -1)
        counts = plan.stop - plan.start
        piece = np.repeat(np.arange(plan.num_pieces), counts)
        within = np.arange(len(piece)) - np.repeat(np.cumsum(counts) - counts, counts)
        at = (plan.row[piece], plan.offset[piece] + within)
        position[at] = plan.start[piece] + within
        slot[at] = plan.slot[piece]
        cache_slots[at] = self.gather.slots(batch, seqs[plan.request[piece]], position[at])
        return cache_slots, position, slot


def merge(partials: Partials, targets: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Merge partial results of each row to [num_kv_heads, num_rows, group, head_dim].

    With d_k the denominator of piece k and o_k its result: Σ d_k o_k / Σ d_k, all d_k divided by
    the largest first. targets: [num_partials] int64, the row of each. Overwrites `partials`.
    """
    weights = relative_totals(partials.log_total, targets, num_rows)
    kv_heads, _, group = weights.shape
    total = weights.new_zeros((kv_heads, num_rows, group)).index_add_(1, targets, weights)
    out = weights.new_zeros((kv_heads, num_rows, group, partials.out.shape[-1]))
    out.index_add_(1, targets, partials.out.mul_(weights[..., None]))
    return out.div_(total[..., None])


def _with_sinks(
    partials: Partials, targets: torch.Tensor, num_rows: int, sinks: torch.Tensor
) -> tuple[Partials, torch.Tensor]:
    """Return partial results and their rows with one more for each row: its sinks, of value 0."""
    kv_heads, _, group, head_dim = partials.out.shape
    totals = sinks.view(kv_heads, 1, group).expand(-1, num_rows, -1)
    zeros = partials.out.new_zeros((kv_heads, num_rows, group, head_dim))
    rows = torch.arange(num_rows, device=targets.device)
    more = Partials(
        torch.cat((partials.out, zeros), dim=1), torch.cat((partials.log_total, totals), dim=1)
    )
    return more, torch.cat((targets, rows))


def relative_totals(log_total: torch.Tensor, targets: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return each denominator relative to the largest of its row; shaped like `log_total`."""
    kv_heads, _, group = log_total.shape
    top = log_total.new_full((kv_heads, num_rows, group), -torch.inf)
    top.scatter_reduce_(1, targets[None, :, None].expand_as(log_total), log_total, "amax")
    return torch.exp(log_total - top.index_select(1, targets))


def _scores(copies: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return (copies @ keys.transpose(2, 3)).float()


def _softmax(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return results and log denominators; rows without visible keys get 0 and a tiny one.

    scores: [..., num_queries, num_keys] float32, overwritten; values: [..., num_keys, head_dim].
    """
    limits = torch.finfo(torch.float32)
    highest = scores.amax(dim=-1, keepdim=True).clamp_(min=limits.min / 2)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(dim=-1, keepdim=True).clamp_(min=limits.tiny)
    out = weights.div_(total).to(values.dtype) @ values
    return out, (highest + total.log()).squeeze(-1)


def _isolated(
    scores: torch.Tensor, values: torch.Tensor, call: DecomposedCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply `_softmax` slot by slot, without multiplying another slot's values by 0."""
    parts = []
    num_slots = call.plan.num_slots
    for own_scores, mask in zip(
        scores.chunk(num_slots, dim=2), call.mask.chunk(num_slots, dim=1), strict=True
    ):
        visible = mask == 0
        own_values = values.where(visible.any(dim=1)[:, :, None], 0)
        parts.append(_softmax(own_scores.masked_fill(~visible, -torch.inf), own_values))
    out, log_total = zip(*parts, strict=True)
    return torch.cat(out, dim=2), torch.cat(log_total, dim=2)
