"""Gemma 4's assistants: small models that draft from another's states, keys and values.

A row joins its token's embedding, the other model's, with the state of the row before. Its layers
have queries alone: each reads what the other's last layer of the same kind has of the text before
the draft, and all rows of a draft are at the position of its first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from penstock.engine.attention import AttentionFactory
from penstock.engine.attention.mixed import attention_of
from penstock.engine.kv_cache import PagedKVCache
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.decoder import Decoder, after_attention
from penstock.engine.runner import RaggedBatch


class Assistant:
    """An assistant in PyTorch."""

    def __init__(
        self,
        config: DecoderConfig,
        weights: dict[str, Tensor],
        cache: PagedKVCache,
        attention: AttentionFactory,
        max_positions: int,
    ) -> None:
        """weights: of `load_weights`; emptied. cache: the other model's."""
        self._device = cache.device
        self._decoder = Decoder(config, weights, max_positions, cache.device)
        fc, out = (weights.pop(f"head.{x}").to(cache.device) for x in ("fc", "out"))
        self._fc, self._out = fc.t().contiguous(), out.t().contiguous()
        view = cache.of_layers([~shape.kv_layer for shape in config.variant.shapes])
        self._attention = attention_of(config, view, attention)

    def forward(self, batch: RaggedBatch, embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Compute one row of each sequence; as `ModelRunner.forward_head`.

        embed: gives tokens' embeddings by the other model."""
        carry, decoder = batch.carry, self._decoder
        assert carry is not None
        assert carry.anchors is not None
        # A row sees the text before the draft.
        ends = np.maximum(carry.anchors, 1)
        seen = replace(batch, positions=ends - 1, seq_lens=ends)
        variant, attention = decoder.config.variant, self._attention
        everywhere = windowed = attention.prepare(seen)
        if variant.window is not None:
            windowed = attention.prepare(seen, variant.window.size)

        rotations = decoder.rotated(torch.from_numpy(carry.anchors).to(self._device))
        embedded = embed(torch.from_numpy(batch.token_ids).to(self._device))
        before = carry.before.to(embedded.dtype)
        hidden = torch.cat((embedded, before), dim=1) @ self._fc
        for index, layer in enumerate(decoder.layers):
            q, _, _ = decoder.before_attention(layer, hidden, rotations[index])
            metadata = windowed if variant.is_windowed(index) else everywhere
            attended = attention.attend(q, index, metadata).flatten(1)
            hidden = after_attention(layer, hidden, attended) * layer.scale
        normed = decoder.norm(hidden)
        carry.after = (normed @ self._out).float()
        vocab = carry.vocab or decoder.config.vocab_size
        rows = normed.index_select(0, torch.from_numpy(batch.logits_rows).to(self._device))
        return (rows @ decoder.lm_head[:, :vocab]).float()
