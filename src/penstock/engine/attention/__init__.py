"""Attention over the paged cache; every other file of this folder is one implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from penstock.engine.batch import RaggedBatch
from penstock.engine.kv_cache import PagedKVCache


class Attention(Protocol):
    """Causal attention of ragged rows over their own sequences' cached keys and values.

    It is made from (cache, num_heads). It may keep scratch memory, so one instance serves one
    forward pass at a time.
    """

    def prepare(self, batch: RaggedBatch, window: int | None = None) -> Any:
        """The metadata of a batch, computed once for all layers with the same window.

        window: tokens that a row sees, itself and those before it; None: all.
        """
        ...

    def attend(self, q: torch.Tensor, layer: int, metadata: Any) -> torch.Tensor:
        """softmax(q k^T / sqrt(head_dim)) v, the rows' own keys and values being in the cache.

        q: [num_tokens, num_heads, head_dim]; returns the same shape, contiguous. Query head h reads
        key-value head h // (num_heads // num_kv_heads).
        """
        ...


AttentionFactory = Callable[[PagedKVCache, int], Attention]
"""Makes an implementation over a cache, for so many query heads."""
