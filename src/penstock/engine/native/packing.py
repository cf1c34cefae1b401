"""Weights and cache in the memory layout of the kernels."""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.quantized import QuantizedMatrix, Stored, Weight
from penstock.engine.models.rope_table import RopeTable
from penstock.engine.native.library import DELTA_MATRICES, address, native_library

_HUGE_PAGE = 1 << 21
"""Bytes of a huge page on x86-64 and ARM."""


def round_up(size: int, multiple: int) -> int:
    """Return the smallest multiple that is not below `size`."""
    return -(-size // multiple) * multiple


class Arena:
    """Zeroed memory in one mapping, in huge pages where available.

    Every row of every matrix is read once per step; with small pages address translation would miss
    its cache."""

    def __init__(self, num_bytes: int, *, huge: bool = True) -> None:
        """huge: pages may be huge; others are taken from the machine as they are written."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = mmap.mmap(-1, round_up(max(num_bytes, 1), _HUGE_PAGE), flags=flags)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE if huge else mmap.MADV_NOHUGEPAGE)
        self._used = 0

    def next_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the next tensor of the arena, aligned to a cache line."""
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
    """Sizes that depend on the vector width. lanes: float32 values in a vector."""

    config: DecoderConfig
    lanes: int

    @property
    def panel(self) -> int:
        """Columns of a packed panel (kPanel in simd.h)."""
        return 2 * self.lanes

    @property
    def head_width(self) -> int:
        return round_up(self.config.head_dim, self.panel)

    def of_tensor(self, name: str) -> Layout:
        """Return the layout with the sizes of the layer that a tensor belongs to."""
        first, _, rest = name.partition(".")
        if first != "layers":
            return self
        return replace(self, config=self.config.at(int(rest.partition(".")[0])))

    def columns(self, rows: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
        """Pad row addresses so that every `size` rows (a head, an expert) begin a panel.

        0 is a column of zeros."""
        return np.pad(rows.reshape(-1, size), ((0, 0), (0, -size % self.panel))).reshape(-1)

    def vector(self, values: torch.Tensor) -> torch.Tensor:
        return _pad(values.float(), 0, self.panel)

    def head_vectors(self, values: torch.Tensor) -> torch.Tensor:
        """Return [n * head_dim] as [n, head_width]."""
        return _pad(values.float().view(-1, self.config.head_dim), 1, self.panel).contiguous()

    def expert_vectors(self, values: torch.Tensor) -> torch.Tensor:
        """Return [experts * size] as [experts, size rounded up to whole panels]."""
        experts = self.config.variant.experts
        assert experts is not None
        return _pad(values.float().view(experts.count, -1), 1, self.panel).contiguous()

    def conv(self, values: torch.Tensor) -> torch.Tensor:
        """Return [channels, 1, kernel] as [kernel, conv_stride] (model.h)."""
        by_row = _pad(values.float().squeeze(1).t(), 1, self.panel)
        return torch.nn.functional.pad(by_row, (0, self.panel)).contiguous()

    @property
    def inputs_stride(self) -> int:
        """Numbers in a row of a recurrent layer's inputs (model.h)."""
        delta = self.config.variant.delta
        assert delta is not None
        gates = 2 * round_up(delta.value_heads, self.panel)
        return round_up(delta.conv_size, self.panel) + self.panel + gates

    def rope(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin: [num_positions, head_dim / 2 rounded up to whole vectors]."""
        table = RopeTable.build(self.config, num_positions)
        half = self.config.head_dim // 2
        cos, sin = (_pad(x[:, :half], 1, self.lanes).contiguous() for x in (table.cos, table.sin))
        return cos, sin

    def key_shape(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> tuple[int, ...]:
        rows = self.config.head_dim + _scale_bytes(dtype)
        return (num_blocks, self.config.num_kv_heads, rows, round_up(block_size, self.lanes))

    def value_shape(self, num_blocks: int, block_size: int, dtype: torch.dtype) -> tuple[int, ...]:
        rows = block_size if dtype == torch.float32 else round_up(block_size, 2)
        return (num_blocks, self.config.num_kv_heads, rows, self.head_width + _scale_bytes(dtype))


def _scale_bytes(dtype: torch.dtype) -> int:
    """Return bytes of a position's scale, which follow a block's numbers."""
    return torch.float32.itemsize if dtype == torch.int8 else 0


class Kind(IntEnum):
    """Storage of a matrix, numbered as in formats.h.

    BF16_PAIRS: bfloat16 weights that are multiplied by activations rounded to bfloat16."""

    F32 = 0
    BF16 = 1
    BF16_PAIRS = 2
    Q8_0 = 3
    Q4_0 = 4
    Q4_1 = 5
    Q5_0 = 6
    Q5_1 = 7
    Q4_K = 8
    Q5_K = 9
    Q6_K = 10
    INT8_32 = 11
    INT8_128 = 12
    INT4_32 = 13
    INT4_128 = 14
    UINT4_32 = 15
    UINT4_128 = 16
    INT8_ROWS = 17
    IQ4_NL = 18
    IQ4_XS = 19
    MXFP4 = 20


EMBEDDINGS = ("embed_tokens", "ple_embed")
"""Matrices of which single rows are read, as stored."""

BLOCK_FORMATS = frozenset(kind.name for kind in Kind if kind > Kind.BF16_PAIRS)
"""Values of `QuantizedMatrix.kind` that the kernels support."""

_KINDS = {torch.float32: Kind.F32, torch.bfloat16: Kind.BF16}


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a matrix as stored in its file, in memory that `owners` keep.

    addresses: [rows] int64; 0 stands for a row of zeros."""

    kind: Kind
    width: int
    addresses: npt.NDArray[np.int64]
    owners: tuple[Stored, ...]

    @classmethod
    def from_stored(cls, stored: Stored) -> Rows:
        if isinstance(stored, QuantizedMatrix):
            stored = replace(stored, data=stored.data.contiguous())
            data, kind, width = stored.data, Kind[stored.kind], stored.columns
        else:
            data = stored = stored.contiguous().view(-1, stored.shape[-1])
            kind, width = _KINDS[stored.dtype], stored.shape[1]
        starts = data.data_ptr() + np.arange(len(data)) * (data.stride(0) * data.itemsize)
        return cls(kind, width, starts, (stored,))


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """Matrix of the kernels: packed panels, or the embedding's rows as stored."""

    kind: Kind
    data: torch.Tensor


def stacked_rows(weight: Weight, sizes: Sequence[int]) -> list[Rows]:
    """Cut `weight` (matrices stacked along rows) into pieces of `sizes` rows, per expert.

    Returns the first pieces of all experts as one, then the second ones, and so on; each has one
    kind."""
    parts = weight if isinstance(weight, tuple) else (weight,)
    stored = [Rows.from_stored(part) for part in parts]
    addresses = np.concatenate([rows.addresses for rows in stored])
    part_of = np.repeat(np.arange(len(stored)), [rows.addresses.size for rows in stored])
    piece_of = np.resize(np.repeat(np.arange(len(sizes)), sizes), part_of.size)
    pieces = []
    for piece in range(len(sizes)):
        is_own = piece_of == piece
        found = [stored[part] for part in np.unique(part_of[is_own])]
        owners = tuple(owner for rows in found for owner in rows.owners)
        pieces.append(replace(found[0], addresses=addresses[is_own], owners=owners))
    return pieces


class Packer:
    """Packer of a model's tensors into one arena, several matrices at a time."""

    def __init__(self, weights: Mapping[str, Weight], layout: Layout, *, bf16_pairs: bool) -> None:
        """Set `bf16_pairs` to multiply bfloat16 matrices by activations rounded to bfloat16."""
        self._weights = {"lm_head": weights["embed_tokens"], **weights}
        if layout.config.variant.value_norm:
            for i in layout.config.kv_layers:
                ones = torch.ones(layout.config.shape(i).head_dim)
                self._weights[f"layers.{i}.v_norm"] = ones
        self._layout = layout
        self._bf16_pairs = bf16_pairs
        self._library = native_library()

    def pack(self, num_threads: int) -> tuple[dict[str, PackedMatrix], dict[str, torch.Tensor]]:
        """Return matrices by the kernels' field names, and padded vectors by their own.

        Embeddings are not copied."""
        matrices: dict[str, tuple[Kind, Rows]] = {}
        vectors = {}
        for name, weight in self._weights.items():
            if name in EMBEDDINGS:
                continue
            if isinstance(weight, torch.Tensor) and (weight.dim() == 1 or name.endswith(".conv")):
                vectors[name.replace("a_log", "rate")] = self._vector(name, weight)
                continue
            for field, rows in self._pieces(name, weight).items():
                pairs = self._bf16_pairs and rows.kind is Kind.BF16
                matrices[field] = (Kind.BF16_PAIRS if pairs else rows.kind, rows)
        sizes = {name: self._size(kind, rows) for name, (kind, rows) in matrices.items()}
        vector_bytes = sum(Arena.size_of(vector.nbytes) for vector in vectors.values())
        arena = Arena(vector_bytes + sum(map(Arena.size_of, sizes.values())))
        packed = {
            name: PackedMatrix(kind, arena.next_tensor((sizes[name],), torch.uint8))
            for name, (kind, _) in matrices.items()
        }
        with ThreadPoolExecutor(max_workers=num_threads) as pool:
            list(pool.map(self._fill, [rows for _, rows in matrices.values()], packed.values()))
        for name, vector in vectors.items():
            vectors[name] = arena.next_tensor(vector.shape, vector.dtype).copy_(vector)
        for name in self._weights.keys() & set(EMBEDDINGS):
            (embedding,) = stacked_rows(self._weights[name], [self._layout.config.vocab_size])
            (owner,) = embedding.owners
            data = owner.data if isinstance(owner, QuantizedMatrix) else owner
            packed[name] = PackedMatrix(embedding.kind, data)
        return packed, vectors

    def _pieces(self, name: str, weight: Weight) -> dict[str, Rows]:
        layout = self._layout.of_tensor(name)
        config = layout.config
        prefix, _, last = name.rpartition(".")
        fields: tuple[str, ...]
        delta, experts = config.variant.delta, config.variant.experts
        if last == "qkv":
            sizes = [config.q_size, config.kv_size, config.kv_size]
            fields, width = ("query", "key", "value"), config.head_dim
            if config.variant.gated:
                fields, sizes = ("query", "query_gate", "key", "value"), [config.q_size, *sizes]
            if f"{prefix}.k_norm" not in self._weights and config.variant.qk_norm:
                fields, sizes = fields[:1], sizes[:1]  # the others are of another layer
        elif last in ("gate_up", "shared_gate_up"):
            width, own = config.shape(int(prefix.rpartition(".")[2])).inner_size, ""
            if last != "gate_up" and experts is not None:
                width, own = experts.shared_size, "shared_"
            fields, sizes = (f"{own}gate", f"{own}up"), [width] * 2
        elif last == "experts_gate_up":
            width = self._layout.config.intermediate_size
            fields, sizes = ("experts_gate", "experts_up"), [width] * 2
        elif last == "linear_in" and delta is not None:
            width = delta.value_size
            fields, sizes = ("beta", "linear_z", "linear_qkv"), [width] * 3
        else:
            width = config.vocab_size if last == "lm_head" else config.hidden_size
            if name == "head.lm_head" and config.head is not None:
                width = config.head.vocab_size
            if name == "head.out":
                width = config.variant.assists
            if last == "router" and experts is not None:
                width = experts.router_rows
            if last in ("ple_gate", "ple_proj"):
                width = config.variant.ple_size
            if last in DELTA_MATRICES and delta is not None:
                widths = {"linear_qkv": delta.conv_size, "linear_z": delta.value_size}
                width = widths.get(last, delta.value_heads)
            fields, sizes = (last,), [config.num_layers * width if last == "ple_proj" else width]
        return {
            f"{prefix}.{field}" if prefix else field: replace(
                rows, addresses=layout.columns(rows.addresses, width)
            )
            for field, rows in zip(fields, stacked_rows(weight, sizes), strict=True)
        }

    def _vector(self, name: str, values: torch.Tensor) -> torch.Tensor:
        of_heads = name.endswith(("qkv_bias", "q_norm", "k_norm", "qk_scale", "v_norm"))
        layout = self._layout.of_tensor(name)
        if name.endswith(".conv"):
            return layout.conv(values)
        if name.endswith(".a_log"):
            values = -values.exp()
        if name.endswith(".sinks"):
            values = values * math.log2(math.e)
        if name.endswith((".gate_bias", ".up_bias", ".down_bias")):
            return self._layout.expert_vectors(values)
        if name.endswith("router_norm"):
            values = values.float() * layout.config.hidden_size**-0.5
        if name.endswith("q_norm"):
            values = values.float() * layout.config.variant.query_scale
        return (layout.head_vectors if of_heads else layout.vector)(values)

    def _size(self, kind: Kind, rows: Rows) -> int:
        return int(self._library.penstock_matrix_bytes(kind, rows.addresses.size, rows.width))

    def _fill(self, rows: Rows, packed: PackedMatrix) -> None:
        addresses = np.ascontiguousarray(rows.addresses)
        self._library.penstock_pack(
            packed.kind, address(addresses), addresses.size, rows.width, packed.data.data_ptr()
        )
        for owner in rows.owners:
            if isinstance(owner, QuantizedMatrix):
                # Otherwise the whole file would be in memory beside the packed matrices.
                owner.drop_pages()


def _pad(values: torch.Tensor, dim: int, multiple: int) -> torch.Tensor:
    """Append zeros along `dim` up to a multiple."""
    missing = -values.shape[dim] % multiple
    if not missing:
        return values
    shape = list(values.shape)
    shape[dim] = missing
    return torch.cat([values, values.new_zeros(shape)], dim=dim)
