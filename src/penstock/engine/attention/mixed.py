"""Attention of models whose layers have different heads: an implementation for each kind."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.engine.attention import Attention, AttentionFactory
from penstock.engine.kv_cache import PagedKVCache
from penstock.engine.models.config import DecoderConfig
from penstock.engine.runner import RaggedBatch


def attention_of(
    config: DecoderConfig, cache: PagedKVCache, factory: AttentionFactory
) -> Attention:
    """Return the attention of a model's layers."""
    shapes = map(config.shape, range(config.num_layers))
    heads = [(shape.num_kv_heads, shape.head_dim) for shape in shapes]
    kinds = {x: factory(cache.of_heads(*x), config.num_heads) for x in dict.fromkeys(heads)}
    return MixedAttention([kinds[x] for x in heads]) if len(kinds) > 1 else kinds[heads[0]]


@dataclass(frozen=True, slots=True)
class _Metadata:
    """A batch, and what the implementations that were asked have prepared for it."""

    batch: RaggedBatch
    window: int | None
    prepared: dict[int, Any] = field(default_factory=dict)


class MixedAttention:
    """See `Attention`. of_layers: each layer's implementation."""

    def __init__(self, of_layers: list[Attention]) -> None:
        self._of_layers = of_layers

    def prepare(self, batch: RaggedBatch, window: int | None = None) -> _Metadata:
        return _Metadata(batch, window)

    def attend(self, q: torch.Tensor, layer: int, metadata: _Metadata) -> torch.Tensor:
        own, prepared = self._of_layers[layer], metadata.prepared
        if id(own) not in prepared:
            prepared[id(own)] = own.prepare(metadata.batch, metadata.window)
        return own.attend(q, layer, prepared[id(own)])
