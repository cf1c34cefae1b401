"""Attention over the paged cache; every other file of this folder is one backend on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from penstock.engine.batch import RaggedBatch
from penstock.engine.kv_cache import PagedKVCache

Metadata = TypeVar("Metadata")


class BackendUnavailableError(ValueError):
    """A backend cannot be used here; one line that says why."""


class AttentionBackend(Protocol[Metadata]):
    """Causal attention of ragged rows over their own sequences' cached keys and values.

    A backend is made from (cache, num_heads). It may keep scratch memory, so one instance serves
    one forward pass at a time.
    """

    def prepare(self, batch: RaggedBatch, window: int | None = None) -> Metadata:
        """Whatever the backend needs to know of a batch; computed once for all layers alike.

        window: tokens that a row sees, itself and those before it; None: all. Raises
        BackendUnavailableError where the backend has no windows.
        """
        ...

    def attend(self, q: torch.Tensor, layer: int, metadata: Metadata) -> torch.Tensor:
        """softmax(q k^T / sqrt(head_dim)) v, the rows' own keys and values being in the cache.

        q: [num_tokens, num_heads, head_dim]; returns the same shape, contiguous. Query head h reads
        key-value head h // (num_heads // num_kv_heads).
        """
        ...


AttentionFactory = Callable[[PagedKVCache, int], AttentionBackend[Any]]
"""Makes a backend over a cache, for so many query heads."""
