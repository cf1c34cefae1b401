"""The eager runner: plain torch operations, on any device and in any dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from penstock.engine.attention import AttentionBackend, AttentionFactory
from penstock.engine.attention.packed import PackedAttention
from penstock.engine.batch import RaggedBatch
from penstock.engine.kv_cache import PagedKVCache
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.weights import load_weights
from penstock.engine.runner import ModelRunner
from penstock.engine.sampling import TokenSampler, sample_coupled


class EagerRunner(ModelRunner):
    """Decoder, cache and attention backend together."""

    def __init__(
        self,
        config: DecoderConfig,
        decoder: Decoder,
        cache: PagedKVCache,
        attention: AttentionBackend[Any],
        sample: TokenSampler = sample_coupled,
    ) -> None:
        self.config = config
        self.decoder = decoder
        self.cache = cache
        self.num_blocks, self.block_size = cache.num_blocks, cache.block_size
        self.device = cache.device
        self.sample = sample
        self._attention = attention

    @classmethod
    def load(
        cls,
        path: Path,
        dtype: torch.dtype,
        device: torch.device,
        num_blocks: int,
        block_size: int,
        attention: AttentionFactory = PackedAttention,
    ) -> EagerRunner:
        """A checkpoint, computing in `dtype` on `device`.

        Raises CheckpointError for a checkpoint that cannot be used, ValueError for an empty cache.
        """
        config = DecoderConfig.from_pretrained(path)
        weights = load_weights(path, config, dtype)
        return cls.of(config, weights, device, num_blocks, block_size, attention)

    @classmethod
    def of(
        cls,
        config: DecoderConfig,
        weights: dict[str, torch.Tensor],
        device: torch.device,
        num_blocks: int,
        block_size: int,
        attention: AttentionFactory = PackedAttention,
        kv_dtype: torch.dtype | None = None,
        sample: TokenSampler = sample_coupled,
    ) -> EagerRunner:
        """weights: as `load_weights` returns them; emptied. It computes in their type.
        kv_dtype: of the cache, if another."""
        dtype = weights["embed_tokens"].dtype
        cache = PagedKVCache(config, num_blocks, block_size, kv_dtype or dtype, device, dtype)
        backend = attention(cache, config.num_heads)
        max_positions = min(config.max_position_embeddings, num_blocks * block_size)
        decoder = Decoder(config, weights, max_positions, device)
        return cls(config, decoder, cache, backend, sample)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Float32 logits [num_logits, vocab_size]; see `ModelRunner.forward`."""
        return self.decoder.forward(batch, self.cache, self._attention)
