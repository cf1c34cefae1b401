"""Reference attention: sequence by sequence, in float32, without optimizations."""

from __future__ import annotations

import torch

from penstock.engine.kv_cache import PagedKVCache
from penstock.engine.runner import RaggedBatch


class ReferenceAttention:
    """Reference for tests of the other implementations."""

    def __init__(self, cache: PagedKVCache, num_heads: int) -> None:
        self._cache = cache
        self._group_size = num_heads // cache.num_kv_heads

    def prepare(
        self, batch: RaggedBatch, window: int | None = None
    ) -> tuple[RaggedBatch, int | None]:
        return batch, window

    def attend(
        self,
        q: torch.Tensor,
        layer: int,
        metadata: tuple[RaggedBatch, int | None],
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        batch, window = metadata
        rows = batch.query_start
        return torch.cat(
            [
                self._attend_one(q[rows[i] : rows[i + 1]], layer, batch, i, window, sinks)
                for i in range(batch.num_seqs)
            ]
        )

    def _attend_one(
        self,
        q: torch.Tensor,
        layer: int,
        batch: RaggedBatch,
        index: int,
        window: int | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        seq_len = int(batch.seq_lens[index])
        num_blocks = -(-seq_len // self._cache.block_size)
        blocks = torch.from_numpy(batch.block_tables[index, :num_blocks]).long().to(q.device)
        chosen = self._cache.layers[layer].index_select(2, blocks).flatten(2, 3).float()
        keys, values = (x[:, :seq_len].repeat_interleave(self._group_size, dim=0) for x in chosen)
        scores = q.float().transpose(0, 1) @ keys.transpose(1, 2) * q.shape[-1] ** -0.5
        positions = torch.arange(seq_len, device=q.device)
        own = positions[seq_len - q.shape[0] :, None]
        hidden = (positions > own) | (positions <= own - (window or seq_len))
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks[:, None, None].expand(-1, len(q), 1)), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :seq_len]
        out: torch.Tensor = weights @ values
        return out.transpose(0, 1).to(q.dtype)
