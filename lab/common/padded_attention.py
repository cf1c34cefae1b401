"""Padded attention, as engines without ragged batches compute it: every sequence as wide as the
longest, in one call with a mask. Only compared with; no server can choose it.

Chunks of prompts go through a call of their own, so that their many query rows are not imposed on
sequences that decode.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from lab.common.live import LiveScene
from penstock.engine.attention import AttentionFactory
from penstock.engine.attention.decomposed import DecomposedAttention
from penstock.engine.attention.packed import PackedAttention
from penstock.engine.build import Engine
from penstock.engine.calibrate import calibrate
from penstock.engine.eager import EagerRunner
from penstock.engine.gather import Gathered, IntArray, KVGather, by_kind, seen
from penstock.engine.kv_cache import PagedKVCache
from penstock.engine.runner import RaggedBatch


@dataclass(frozen=True, slots=True)
class PaddedCall:
    """Sequences that attend together.

    kv:    a row for each; a shorter sequence ends in repetitions of its first slot, so that it
           cannot meet another one's numbers
    rows:  [num_seqs * num_queries] int64, rows of the batch; a sequence with fewer repeats its last
    kept:  [rows of these sequences] int64, where each of them lies in `rows`
    mask:  [1, num_seqs, num_queries * heads of a group, context], added to the scores
    """

    num_queries: int
    kv: Gathered
    rows: torch.Tensor
    kept: torch.Tensor
    mask: torch.Tensor


class PaddedAttention:
    """See `Attention`."""

    def __init__(self, cache: PagedKVCache, num_heads: int) -> None:
        self.gather = KVGather(cache)
        self._num_kv_heads = cache.num_kv_heads
        self._group_size = num_heads // cache.num_kv_heads

    def prepare(self, batch: RaggedBatch, window: int | None = None) -> list[PaddedCall]:
        return [self._call(batch, seqs, window) for seqs in by_kind(batch)]

    def attend(
        self,
        q: torch.Tensor,
        layer: int,
        metadata: list[PaddedCall],
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert sinks is None, "padded attention has no sinks"
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for call in metadata:
            attended = self._attend(q.index_select(0, call.rows), layer, call)
            out.index_copy_(
                0, call.rows.index_select(0, call.kept), attended.index_select(0, call.kept)
            )
        return out

    def _attend(self, q: torch.Tensor, layer: int, call: PaddedCall) -> torch.Tensor:
        """q: [num_seqs * num_queries, num_heads, head_dim]; returns the same shape."""
        self.gather.fill(layer, call.kv)
        heads = (self._num_kv_heads, self._group_size, q.shape[-1])
        grouped = q.view(-1, call.num_queries, *heads)
        out = F.scaled_dot_product_attention(
            grouped.permute(2, 0, 1, 3, 4).flatten(2, 3),
            call.kv.keys,
            call.kv.values,
            attn_mask=call.mask,
        )
        out = out.view(heads[0], -1, call.num_queries, *heads[1:])
        return out.permute(1, 2, 0, 3, 4).reshape(q.shape)

    def _call(self, batch: RaggedBatch, seqs: IntArray, window: int | None) -> PaddedCall:
        counts = np.diff(batch.query_start)[seqs].astype(np.int64)
        sizes = batch.seq_lens[seqs].astype(np.int64)
        columns = np.arange(sizes.max())
        positions = np.where(columns < sizes[:, None], columns, 0)
        places = np.arange(counts.max())
        query = np.minimum(places, counts[:, None] - 1)
        visible = seen(columns, ((sizes - counts)[:, None] + query)[:, :, None], window)
        return PaddedCall(
            num_queries=len(places),
            kv=self.gather.place(self.gather.slots(batch, seqs[:, None], positions), len(seqs)),
            rows=self.gather.tensor((batch.query_start[seqs, None] + query).reshape(-1)),
            kept=self.gather.tensor(np.flatnonzero(places < counts[:, None])),
            mask=self.gather.added(visible.repeat(self._group_size, axis=1)[None]),
        )


BY_LAYOUT: dict[str, AttentionFactory] = {
    "packed": PackedAttention,
    "padded": PaddedAttention,
    "decomposed": DecomposedAttention,
}


def load_padded(scene: LiveScene, batch: int) -> Engine:
    """The eager engine with padded attention in every model, its step times measured with it."""
    engine = scene.load(batch, backend="eager", calibrated=False)
    drafters = engine.executor.drafters.values()
    for runner in (engine.executor.target, *(d.runner for d in drafters)):
        if isinstance(runner, EagerRunner):
            runner.attention = PaddedAttention(runner.cache, runner.config.num_heads)
    calibrate(engine.executor, engine.scheduler.learn, engine.clock)
    return engine
