"""Attention over the paged cache; every other file of this folder is one backend, by its name."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any, Protocol, TypeVar

import torch

from penstock.engine.batch import RaggedBatch
from penstock.engine.kv_cache import PagedKVCache

Metadata = TypeVar("Metadata")


class BackendUnavailableError(ValueError):
    """A backend cannot be used here; one line that says why."""


class AttentionBackend(Protocol[Metadata]):
    """Causal attention of ragged rows over their own sequences' cached keys and values.

    A backend's file defines a class `Backend` made from (cache, num_heads). It may keep scratch
    memory, so one instance serves one forward pass at a time.
    """

    def prepare(self, batch: RaggedBatch) -> Metadata:
        """Whatever the backend needs to know of a batch; computed once for all layers."""
        ...

    def attend(self, q: torch.Tensor, layer: int, metadata: Metadata) -> torch.Tensor:
        """softmax(q k^T / sqrt(head_dim)) v, the rows' own keys and values being in the cache.

        q: [num_tokens, num_heads, head_dim]; returns the same shape, contiguous. Query head h reads
        key-value head h // (num_heads // num_kv_heads).
        """
        ...


def backend_names() -> list[str]:
    """Names of the backends, that is of this folder's files."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def make_backend(name: str, cache: PagedKVCache, num_heads: int) -> AttentionBackend[Any]:
    """The backend called `name`, imported only now.

    Raises ValueError for another name, BackendUnavailableError where it needs what is not here.
    """
    if name not in backend_names():
        raise ValueError(f"attention is {name!r}; allowed: {', '.join(backend_names())}")
    module = importlib.import_module(f"{__name__}.{name}")
    backend: AttentionBackend[Any] = module.Backend(cache, num_heads)
    return backend
