"""Eager runner: plain PyTorch operations, on any device and in any dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch

from penstock.engine.attention import AttentionFactory
from penstock.engine.attention.mixed import attention_of
from penstock.engine.attention.packed import PackedAttention
from penstock.engine.kv_cache import PagedKVCache
from penstock.engine.models.assistant import Assistant
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.delta import ConvStates, DeltaStates
from penstock.engine.models.weights import load_weights
from penstock.engine.runner import ModelRunner, RaggedBatch
from penstock.engine.sampling import sample_coupled
from penstock.engine.states import StateSlots


class EagerRunner(ModelRunner):
    """Decoder with cache and attention.

    num_spare_blocks: of the cache, beyond those that the scheduler knows of"""

    num_spare_blocks = 0

    def __init__(
        self,
        config: DecoderConfig,
        weights: dict[str, torch.Tensor],
        device: torch.device,
        num_blocks: int,
        block_size: int,
        attention: AttentionFactory = PackedAttention,
        num_slots: int = 8,
    ) -> None:
        """weights: of `load_weights`; emptied. num_slots: room for recurrent states.

        Raises: ValueError for an empty cache."""
        dtype = weights["embed_tokens"].dtype
        self.config = config
        self.num_blocks, self.block_size, self.device = num_blocks, block_size, device
        self.sample = sample_coupled
        num_held = num_blocks + self.num_spare_blocks
        self.cache = PagedKVCache(config, num_held, block_size, dtype, device)
        self.attention = attention_of(config, self.cache, attention)
        self._max_positions = min(config.max_position_embeddings, num_blocks * block_size)
        self._decoder = Decoder(config, weights, self._max_positions, device)
        self._assistant: Assistant | None = None
        self._states: tuple[StateSlots, ConvStates] | None = None
        if (delta := config.variant.delta) is not None:
            self.num_slots = num_slots
            kind = DeltaStates if delta.key_heads else ConvStates
            states = kind(config, num_slots, device)
            self._states = StateSlots(num_slots, states.parts), states

    @classmethod
    def load(
        cls,
        path: Path,
        dtype: torch.dtype,
        device: torch.device,
        num_blocks: int,
        block_size: int,
        attention: AttentionFactory = PackedAttention,
        max_model_len: int | None = None,
        num_slots: int = 8,
        head: Path | None = None,
    ) -> Self:
        """Load a checkpoint for texts of at most `max_model_len` tokens.

        num_slots: room for recurrent states. head: checkpoint of the model's head, if it has one.

        Raises: CheckpointError; ValueError for an empty cache."""
        config = DecoderConfig.from_pretrained(path).within(max_model_len, head)
        weights = load_weights(path, config, dtype, head)
        runner = cls(config, weights, device, num_blocks, block_size, attention, num_slots)
        if (own := config.assistant) is not None and head is not None:
            weights, room = load_weights(head, own, dtype), runner._max_positions
            runner._assistant = Assistant(own, weights, runner.cache, attention, room)
        return runner

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> torch.Tensor:
        """Return float32 logits [num_logits, vocab_size]; see `ModelRunner.forward`."""
        if self._states is None:
            return self._decoder.forward(batch, self.cache, self.attention)
        slots, states = self._states
        moves = slots.moves(batch)
        logits = self._decoder.forward(batch, self.cache, self.attention, states, moves)
        slots.moved(batch, moves)
        return logits

    @torch.inference_mode()
    def forward_head(self, batch: RaggedBatch) -> torch.Tensor:
        if self._assistant is not None:
            return self._assistant.forward(batch, self._decoder.embed)
        return self._decoder.forward_head(batch, self.cache, self.attention)
