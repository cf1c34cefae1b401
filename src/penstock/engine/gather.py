"""Contiguous copies of the paged cache's tokens, for attention by matrix products."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.kv_cache import PagedKVCache
from penstock.engine.runner import RaggedBatch

IntArray = npt.NDArray[np.int64]

_MOST_VERIFIED = 32


@dataclass(frozen=True, slots=True)
class Gathered:
    """Views for the keys and values of some cache slots, in rows of equal length.

    slots: [num_rows * row_length] int64
    keys, values: [num_heads, num_rows, row_length, head_dim], views of `flat`; num_heads is that of
    the KV heads which are gathered at once"""

    slots: torch.Tensor
    flat: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


class KVGather:
    """Copies keys and values into one scratch buffer, since allocation costs more than filling.

    All places are views of its beginning, so one is filled and read before the next."""

    def __init__(self, cache: PagedKVCache) -> None:
        self._cache = cache
        self._scratch = torch.empty(0, dtype=cache.dtype, device=cache.device)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token in one layer."""
        return 2 * self._cache.num_kv_heads * self._cache.head_dim * self._scratch.itemsize

    @property
    def scratch_bytes(self) -> int:
        return self._scratch.numel() * self._scratch.itemsize

    def reserve(self, rows: int) -> None:
        """Make room for places of up to `rows` slots times KV heads."""
        elements = 2 * self._cache.head_dim * rows
        if self._scratch.shape[0] < elements:
            self._scratch = self._scratch.new_empty(elements)

    def slots(self, batch: RaggedBatch, seqs: IntArray, positions: IntArray) -> IntArray:
        """Return cache slots of `positions` of the sequences `seqs`; one shape, or broadcast."""
        block_size = self._cache.block_size
        blocks = batch.block_tables[seqs, positions // block_size].astype(np.int64)
        return blocks * block_size + positions % block_size

    def tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        """Return an array on the cache's device."""
        return torch.from_numpy(array).to(self._scratch.device)

    def added(self, visible: npt.NDArray[np.bool_]) -> torch.Tensor:
        """Return a mask to add to scores: 0 where `visible`, else minus infinity."""
        mask = np.where(visible, np.float32(0), np.float32("-inf"))
        return self.tensor(mask).to(self._scratch.dtype)

    def place(self, slots: IntArray, num_rows: int, num_heads: int | None = None) -> Gathered:
        """Return the views for slots, of all KV heads or of some at once.

        slots: num_rows * row_length, row after row"""
        tokens, num_heads = slots.size, num_heads or self._cache.num_kv_heads
        head_dim = self._cache.head_dim
        self.reserve(num_heads * tokens)
        flat = self._scratch[: 2 * num_heads * tokens * head_dim]
        flat = flat.view(2 * num_heads, tokens, head_dim)
        rows = flat.view(2, num_heads, num_rows, tokens // num_rows, head_dim)
        return Gathered(self.tensor(slots.reshape(-1)), flat, rows[0], rows[1])

    def fill(self, layer: int, place: Gathered, first_head: int = 0) -> None:
        """Gather the KV heads from `first_head` on."""
        by_slot, num_heads = self._cache.by_slot[layer], place.keys.shape[0]
        kv_heads = self._cache.num_kv_heads
        if num_heads == kv_heads:
            torch.index_select(by_slot, 1, place.slots, out=place.flat)
            return
        for i, first in enumerate((first_head, kv_heads + first_head)):
            into = place.flat[i * num_heads : (i + 1) * num_heads]
            torch.index_select(by_slot[first : first + num_heads], 1, place.slots, out=into)


def seen(
    keys: npt.NDArray[np.int64], queries: npt.NDArray[np.int64], window: int | None
) -> npt.NDArray[np.bool_]:
    """Return which key positions a query sees: none behind it, none before its window."""
    visible = keys <= queries
    return visible if window is None else visible & (keys > queries - window)


def by_kind(batch: RaggedBatch) -> list[IntArray]:
    """Return sequences that decode or verify, then those with chunks of prompts; none is empty."""
    counts = np.diff(batch.query_start)
    few = (counts > 0) & (counts <= _MOST_VERIFIED)
    kinds = [np.flatnonzero(few), np.flatnonzero(counts > _MOST_VERIFIED)]
    return [seqs for seqs in kinds if len(seqs)]
