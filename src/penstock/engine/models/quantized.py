"""Quantised matrices in memory: GGUF's blocks, and groups of integers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""ggml's types without blocks."""

_CHUNK = 1 << 17
"""Values dequantised at once, so that intermediate results stay in the cache."""


@dataclass(frozen=True, slots=True)
class GroupFormat:
    """Blocks of `size` codes of `bits` bits with a float32 scale d, and with `has_low` a float32 m.

    A weight is d * code + m, or d * (code - half of the codes' range). A block is d, m, then the
    codes, of two in a byte the low one first."""

    size: int
    bits: int
    has_low: bool = False

    @property
    def head_bytes(self) -> int:
        return 8 if self.has_low else 4

    @property
    def block_bytes(self) -> int:
        return self.head_bytes + self.size * self.bits // 8

    def encode(self, codes: torch.Tensor, *heads: torch.Tensor) -> torch.Tensor:
        """Return blocks as [rows, bytes of a row] uint8.

        codes: [rows, bytes of all codes] uint8; heads: d, and with `has_low` m, [rows, blocks]
        float32."""
        head = torch.stack(heads, dim=-1).view(torch.uint8)
        return torch.cat([head, codes.unflatten(1, (head.shape[1], -1))], dim=-1).flatten(1)

    def dequantize(self, data: torch.Tensor) -> torch.Tensor:
        """Return [rows, columns] float32 from [rows, bytes of a row] uint8."""
        blocks = data.unflatten(1, (-1, self.block_bytes))
        head = blocks[..., : self.head_bytes].contiguous().view(torch.float32)
        codes = unpack_bytes(blocks[..., self.head_bytes :], self.bits).float()
        if self.has_low:
            values = codes * head[..., :1] + head[..., 1:]
        else:
            values = (codes - (1 << (self.bits - 1))) * head
        return values.flatten(1)


GROUP_FORMATS = {
    "INT8_32": GroupFormat(32, 8),
    "INT8_128": GroupFormat(128, 8),
    "INT4_32": GroupFormat(32, 4),
    "INT4_128": GroupFormat(128, 4),
    "UINT4_32": GroupFormat(32, 4, has_low=True),
    "UINT4_128": GroupFormat(128, 4, has_low=True),
    "INT8_ROWS": GroupFormat(128, 8),
}
"""Formats by name. INT8_ROWS: models calibrated for activations with one scale per token."""


def unpack_bytes(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack codes of 4 or 8 bits along the last axis, one per byte."""
    if bits == 8:
        return packed
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A quantised matrix.

    kind:       ggml's name of the block format ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K",
                "Q5_K", "Q6_K", …) or a name in GROUP_FORMATS
    data:       [rows, bytes of a row] uint8, memory-mapped where the file allows
    drop_pages: releases the memory of mapped pages that were read"""

    kind: str
    rows: int
    columns: int
    data: torch.Tensor
    drop_pages: Callable[[], None] = field(default=lambda: None, compare=False)

    def dequantize(self) -> torch.Tensor:
        """Return [rows, columns] float32."""
        out = torch.empty(self.rows, self.columns)
        dequantize_into(self.kind, self.data, out)
        return out


NOT_FINITE = "has values that are not finite (NaN or infinity)"

_SCALES = {
    "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,), "Q4_1": (0, 2), "Q5_1": (0, 2),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (-2,), "IQ4_NL": (0,), "IQ4_XS": (0,),
}  # fmt: skip
"""Byte offsets of a block's float16 scales, of which all its values are multiples."""
_MOST_FP4_EXPONENT = 252
"""Largest byte of an MXFP4 block's scale 2^(byte - 128) whose multiple by 12 is finite."""
_HALF_EXPONENT = 0x7C00
"""Exponent bits of a float16, all set for NaN and infinity."""


def is_finite(values: torch.Tensor) -> bool:
    """Return whether all values are finite; the sum decides unless it overflows."""
    return bool(values.sum(dtype=torch.float32).isfinite()) or bool(values.isfinite().all())


def are_blocks_finite(kind: str, data: torch.Tensor) -> bool:
    """Return whether the scales of blocks are finite; data: [rows, bytes of a row] uint8.

    True for a kind of unknown scales."""
    block = GGML_QUANT_SIZES[GGMLQuantizationType[kind]][1]
    flat = data.numpy().reshape(-1)
    if kind == "MXFP4":
        return int(flat[::block].max(initial=0)) <= _MOST_FP4_EXPONENT
    for offset in _SCALES.get(kind, ()):
        scales = np.ndarray(len(flat) // block, "<u2", flat, offset % block, (block,))
        if ((scales & _HALF_EXPONENT) == _HALF_EXPONENT).any():
            return False
    return True


Stored = torch.Tensor | QuantizedMatrix

Weight = Stored | tuple[Stored, ...]
"""A matrix, or several stacked along rows: query, key and value, or gate and up."""


def dequantize_into(kind: str, data: torch.Tensor, out: torch.Tensor) -> None:
    """Fill `out` [rows, columns], of any float type, with the values of `data` [rows, bytes].

    Only a few rows are held in float32 at once. Raises NotImplementedError for a type that the
    `gguf` package does not dequantise."""
    if kind in FLOATS:
        out.copy_(data.view(FLOATS[kind]))
        return
    if kind in GROUP_FORMATS:
        out.copy_(GROUP_FORMATS[kind].dequantize(data))
        return
    at_once = max(1, _CHUNK // out.shape[1])
    for start in range(0, len(out), at_once):
        rows = slice(start, start + at_once)
        with np.errstate(invalid="ignore", over="ignore"):  # a file's values may be anything
            values = dequantize(data[rows].numpy(), GGMLQuantizationType[kind])
        out[rows] = torch.from_numpy(values)
