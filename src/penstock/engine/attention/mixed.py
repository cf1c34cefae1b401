"""Attention of models whose layers have different heads: an implementation for each kind."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from penstock.engine.attention import Attention, AttentionFactory
from penstock.engine.kv_cache import PagedKVCache
from penstock.engine.models.config import DecoderConfig
from penstock.engine.runner import RaggedBatch


def attention_of(config: DecoderConfig, kv: PagedKVCache, factory: AttentionFactory) -> Attention:
    """Return the attention of a model's layers."""
    shapes = map(config.shape, range(config.num_all_layers))
    heads = [(shape.num_kv_heads, shape.head_dim) for shape in shapes]
    kinds = {x: factory(kv.of_heads(*x), config.num_heads) for x in dict.fromkeys(heads)}
    return MixedAttention([kinds[x] for x in heads]) if len(kinds) > 1 else kinds[heads[0]]


class MixedAttention:
    """See `Attention`. A batch's metadata is a function, of one of the implementations."""

    def __init__(self, of_layers: list[Attention]) -> None:
        self._of_layers = of_layers

    def prepare(self, batch: RaggedBatch, window: int | None = None) -> Any:
        return cache(lambda own: own.prepare(batch, window))

    def attend(
        self, q: torch.Tensor, layer: int, metadata: Any, sinks: torch.Tensor | None = None
    ) -> torch.Tensor:
        own = self._of_layers[layer]
        return own.attend(q, layer, metadata(own), sinks)
