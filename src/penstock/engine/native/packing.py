"""Weights and cache in the memory layout of the kernels."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.rope import RopeTable

Weights = dict[str, torch.Tensor]

_HUGE_PAGE = 1 << 21


def round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class Arena:
    """Zeroed memory in one mapping, in huge pages where the system has them.

    Every row of every matrix is read once a step, and with small pages the address translation
    of 20 MB misses its cache on the way.
    """

    def __init__(self, num_bytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, round_up(max(num_bytes, 1), _HUGE_PAGE), flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._used = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """The next tensor of the arena, at a cache line's start."""
        count = 1
        for size in shape:
            count *= size
        start = self._used
        self._used += self.size_of(count * dtype.itemsize)
        flat = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start)
        return flat.view(*shape)

    @staticmethod
    def size_of(num_bytes: int) -> int:
        return round_up(num_bytes, 64)


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes that follow from the vector width. lanes: float32 values in a vector."""

    config: DecoderConfig
    lanes: int

    @property
    def panel(self) -> int:
        """Columns of a packed panel (kPanel in simd.h)."""
        return 2 * self.lanes

    @property
    def head_width(self) -> int:
        return round_up(self.config.head_dim, self.panel)

    def panels(self, matrix: torch.Tensor) -> torch.Tensor:
        """[rows, K] -> [rows / panel, K, panel]: row k of a panel holds column k of its rows.

        bfloat16 alternates between the panel's halves (load_panel_row in simd.h).
        """
        rows, width = matrix.shape
        if matrix.dtype == torch.bfloat16:
            halves = matrix.view(rows // self.panel, 2, self.lanes, width).permute(0, 3, 2, 1)
            return halves.reshape(rows // self.panel, width, self.panel)
        return matrix.view(rows // self.panel, self.panel, width).transpose(1, 2).contiguous()

    def plain(self, matrix: torch.Tensor) -> torch.Tensor:
        return self.panels(_pad(matrix, 0, self.panel))

    def heads(self, qkv: torch.Tensor) -> torch.Tensor:
        """Every head begins a panel of its own."""
        by_head = qkv.view(-1, self.config.head_dim, qkv.shape[-1])
        return self.panels(_pad(by_head, 1, self.panel).reshape(-1, qkv.shape[-1]))

    def gate_up(self, matrix: torch.Tensor) -> torch.Tensor:
        """A panel's left half is gate rows, its right half the up rows of the same numbers."""
        width = matrix.shape[-1]
        halves = [_pad(x, 0, self.lanes).view(-1, self.lanes, width) for x in matrix.chunk(2)]
        return self.panels(torch.cat(halves, dim=1).view(-1, width))

    def vector(self, values: torch.Tensor) -> torch.Tensor:
        return _pad(values.float(), 0, self.panel)

    def head_vectors(self, values: torch.Tensor) -> torch.Tensor:
        """[n * head_dim] -> [n, head_width]"""
        return _pad(values.float().view(-1, self.config.head_dim), 1, self.panel).contiguous()

    def rope(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin: [num_positions, head_dim / 2 rounded up to whole vectors]"""
        table = RopeTable.build(self.config, num_positions)
        half = self.config.head_dim // 2
        cos, sin = (_pad(x[:, :half], 1, self.lanes).contiguous() for x in (table.cos, table.sin))
        return cos, sin

    def key_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        heads, dim = self.config.num_kv_heads, self.config.head_dim
        return (num_blocks, heads, dim, round_up(block_size, self.lanes))

    def value_shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        heads, dim = self.config.num_kv_heads, self.config.head_dim
        return (num_blocks, heads, block_size, round_up(dim, self.lanes))


def pack_weights(weights: Weights, layout: Layout) -> Weights:
    """The tensors of `load_weights`, packed, under the same names; "lm_head" always present.

    All lie in one arena.
    """
    how: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "embed_tokens": torch.Tensor.contiguous,
        "qkv": layout.heads,
        "gate_up": layout.gate_up,
        "o": layout.plain,
        "down": layout.plain,
        "lm_head": layout.plain,
        "qkv_bias": layout.head_vectors,
        "q_norm": layout.head_vectors,
        "k_norm": layout.head_vectors,
    }
    given = {"lm_head": weights["embed_tokens"], **weights}

    def pack(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return how.get(name.rpartition(".")[2], layout.vector)(tensor)

    # Sizes first, from tensors without data: one matrix at a time is held twice, not all of them.
    sizes = (pack(name, tensor.to("meta")).nbytes for name, tensor in given.items())
    arena = Arena(sum(map(Arena.size_of, sizes)))
    packed = {}
    for name, tensor in given.items():
        values = pack(name, tensor)
        packed[name] = arena.take(values.shape, values.dtype).copy_(values)
    return packed


def _pad(values: torch.Tensor, dim: int, multiple: int) -> torch.Tensor:
    """Zeros appended along `dim` up to a multiple."""
    missing = -values.shape[dim] % multiple
    if not missing:
        return values
    shape = list(values.shape)
    shape[dim] = missing
    return torch.cat([values, values.new_zeros(shape)], dim=dim)
