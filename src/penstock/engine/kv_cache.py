"""The paged KV cache of one model: fixed memory, addressed by block id."""

from __future__ import annotations

import torch

from penstock.engine.models.config import DecoderConfig

LARGEST_E4M3 = torch.finfo(torch.float8_e4m3fn).max


def kv_bytes_per_token(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token occupies over all layers."""
    return 2 * config.num_layers * config.kv_size * dtype.itemsize


class PagedKVCache:
    """Keys and values of every layer, in blocks of `block_size` tokens.

    A layer is one tensor [2, num_kv_heads, num_blocks, block_size, head_dim], keys before values.
    Heads come first, so that gathering blocks yields for every head the contiguous matrix that
    matrix products want, and a kernel that walks blocks reads each of them in one stretch.
    Slots that were never written hold zeros.

    In float8 (e4m3) what is stored is the number over the layer's scale: `scales` [num_layers, 2]
    float32, of keys and of values; 1 everywhere until someone knows better. What gathers keys and
    values reads them as `read_dtype`, which otherwise is `dtype`.
    """

    def __init__(
        self,
        config: DecoderConfig,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        read_dtype: torch.dtype = torch.float32,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"num_blocks is {num_blocks} and block_size {block_size}; both must be at least 1"
            )
        shape = (2, config.num_kv_heads, num_blocks, block_size, config.head_dim)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = config.head_dim
        self.dtype = dtype
        self.is_float8 = dtype == torch.float8_e4m3fn
        self.read_dtype = read_dtype if self.is_float8 else dtype
        self.device = device
        self.layers = [
            torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.num_layers)
        ]
        self.scales = torch.ones(config.num_layers, 2, device=device)
        self._by_slot = [
            layer.view(2 * self.num_kv_heads, num_blocks * block_size, self.head_dim)
            for layer in self.layers
        ]

    def write(self, layer: int, slots: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Store rows' keys and values.

        slots:       [num_tokens] int64, block * block_size + offset, without repetition
        keys_values: [num_tokens, 2 * num_kv_heads, head_dim], key heads before value heads
        """
        rows = keys_values.transpose(0, 1)
        if self.is_float8:
            scale = self.scales[layer].repeat_interleave(self.num_kv_heads)[:, None, None]
            rows = (rows / scale).clamp(-LARGEST_E4M3, LARGEST_E4M3).to(self.dtype)
            # Bytes, because few operations know the type itself.
            self._by_slot[layer].view(torch.uint8).index_copy_(1, slots, rows.view(torch.uint8))
            return
        self._by_slot[layer].index_copy_(1, slots, rows)
