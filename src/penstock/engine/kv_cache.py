"""The paged KV cache of one model: fixed memory, addressed by block id."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

import torch

from penstock.engine.models.config import DecoderConfig
from penstock.engine.states import MOST_KEPT

BLOCK_SIZE = 16
"""Tokens of a block where no setting says."""


def kv_bytes_per_token(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Return bytes of keys and values of one token over all layers, with the scales of int8."""
    scale = torch.float32.itemsize if dtype == torch.int8 else 0
    shapes = [config.shape(i) for i in config.kv_layers]
    return 2 * sum(x.num_kv_heads * (x.head_dim * dtype.itemsize + scale) for x in shapes)


def state_bytes(config: DecoderConfig) -> int:
    """Return the most bytes of one request's recurrent states; 0 without recurrent layers.

    The inputs of kept rows, about half of them, are taken only as far as drafts are long."""
    delta = config.variant.delta
    if delta is None:
        return 0
    state = delta.value_heads * delta.key_dim * delta.value_dim
    kept = (delta.kernel - 1 + MOST_KEPT) * (delta.conv_size + delta.gate_size)
    return len(delta.layers) * (state + kept) * torch.float32.itemsize


class PagedKVCache:
    """Keys and values of every layer, in blocks of `block_size` tokens.

    A layer is one tensor [2, num_kv_heads, num_blocks, block_size, head_dim], keys before values.
    Heads come first, so that gathering blocks yields for every head the contiguous matrix that
    matrix products want.
    Slots that were never written hold zeros. `by_slot` has the same memory as one tensor
    [2 * num_kv_heads, num_blocks * block_size, head_dim] a layer. Layers that read another's have
    its tensor, recurrent ones an empty one. num_kv_heads and head_dim are those of most layers.
    """

    def __init__(
        self,
        config: DecoderConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"num_blocks is {num_blocks} and block_size {block_size}; both must be at least 1"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.dtype = dtype
        self.device = device
        self.layers: list[torch.Tensor] = []
        own = set(config.kv_layers)
        for index in range(config.num_all_layers):
            shape, blocks = config.shape(index), num_blocks if index in own else 0
            size = (2, shape.num_kv_heads, blocks, block_size, shape.head_dim)
            reads = self.layers[shape.kv_layer] if shape.kv_layer < index else None
            made = torch.zeros(size, dtype=dtype, device=device) if reads is None else reads
            self.layers.append(made)
        self.by_slot = [layer.flatten(0, 1).flatten(1, 2) for layer in self.layers]

    def of_heads(self, num_kv_heads: int, head_dim: int) -> PagedKVCache:
        """Return a view for the layers whose heads are these."""
        view = copy(self)
        view.num_kv_heads, view.head_dim = num_kv_heads, head_dim
        return view

    def of_layers(self, layers: Sequence[int]) -> PagedKVCache:
        """Return a view that has these layers."""
        view = copy(self)
        view.layers = [self.layers[i] for i in layers]
        view.by_slot = [self.by_slot[i] for i in layers]
        return view

    def write(self, layer: int, slots: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Store rows' keys and values.

        slots:       [num_tokens] int64, block * block_size + offset, without repetition
        keys_values: [num_tokens, 2 * num_kv_heads, head_dim], key heads before value heads
        """
        self.by_slot[layer].index_copy_(1, slots, keys_values.transpose(0, 1))
