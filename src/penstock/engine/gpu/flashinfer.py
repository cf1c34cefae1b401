"""Paged attention by FlashInfer, where that package is installed and the device is a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from penstock.engine.attention import BackendUnavailableError
from penstock.engine.batch import RaggedBatch
from penstock.engine.kv_cache import PagedKVCache

_WORKSPACE_BYTES = 128 << 20


class FlashInferAttention:
    """See AttentionBackend. Raises BackendUnavailableError without the package or a CUDA device."""

    def __init__(self, cache: PagedKVCache, num_heads: int) -> None:
        if cache.device.type != "cuda":
            raise BackendUnavailableError(
                f"attention flashinfer cannot be used: it runs on CUDA devices, not on "
                f"{cache.device}"
            )
        try:
            import flashinfer
        except ImportError as error:
            raise BackendUnavailableError(
                "attention flashinfer cannot be used: the package flashinfer is not installed "
                "(flashinfer-python)"
            ) from error
        self._cache = cache
        self._num_heads = num_heads
        workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=cache.device)
        self._wrapper: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "HND")
        # Pages first, as it reads them; the strides say where they really lie.
        self._pages = [tuple(layer.transpose(1, 2).unbind()) for layer in cache.layers]

    def prepare(self, batch: RaggedBatch, window: int | None = None) -> RaggedBatch:
        """Plans the batch: one is in flight at a time."""
        if window is not None:
            raise BackendUnavailableError("attention flashinfer has no sliding windows")
        size = self._cache.block_size
        num_blocks = -(-batch.seq_lens // size)
        used = np.arange(batch.block_tables.shape[1]) < num_blocks[:, None]
        self._wrapper.plan(
            torch.from_numpy(batch.query_start),
            torch.from_numpy(np.concatenate(([0], np.cumsum(num_blocks))).astype(np.int32)),
            torch.from_numpy(batch.block_tables[used]).to(self._cache.device),
            torch.from_numpy((batch.seq_lens - 1) % size + 1),
            self._num_heads,
            self._cache.num_kv_heads,
            self._cache.head_dim,
            size,
            causal=True,
            q_data_type=torch.bfloat16
            if self._cache.dtype == torch.float8_e4m3fn
            else self._cache.dtype,
            kv_data_type=self._cache.dtype,
        )
        return batch

    def attend(self, q: torch.Tensor, layer: int, metadata: RaggedBatch) -> torch.Tensor:
        scales: dict[str, float] = {}
        if self._cache.dtype == torch.float8_e4m3fn:
            k_scale, v_scale = self._cache.scales[layer].tolist()
            scales = {"k_scale": k_scale, "v_scale": v_scale}
        out: torch.Tensor = self._wrapper.run(q.contiguous(), self._pages[layer], **scales)
        return out
