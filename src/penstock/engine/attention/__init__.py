"""Interface of attention over the paged KV cache; each other file is one implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from penstock.engine.kv_cache import PagedKVCache
from penstock.engine.runner import RaggedBatch


class Attention(Protocol):
    """Causal attention of ragged rows over their sequences' cached keys and values.

    Built from (cache, num_heads). It may hold scratch memory: one forward pass at a time.
    """

    def prepare(self, batch: RaggedBatch, window: int | None = None) -> Any:
        """Return the metadata of a batch for all layers with the same window.

        window: tokens that a row sees, including itself; None: all.
        """
        ...

    def attend(
        self, q: torch.Tensor, layer: int, metadata: Any, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return softmax(q k^T / sqrt(head_dim)) v; the rows' keys and values are in the cache.

        q and the contiguous result: [num_tokens, num_heads, head_dim]. Query head h reads KV head
        h // (num_heads // num_kv_heads). sinks: [num_heads] float32, a score more of each head,
        of a key whose value is 0.
        """
        ...


AttentionFactory = Callable[[PagedKVCache, int], Attention]
"""Builds an implementation from a cache and the number of query heads."""
