"""Matrices as GGUF files have them: blocks of quantised values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from gguf import GGMLQuantizationType, dequantize

FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""ggml's names of types that are no blocks."""

_CHUNK = 1 << 17
"""Values that are dequantised at once: the steps of one chunk stay in the cache."""


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix as its file has it. kind: ggml's name of the block format ("Q8_0", "Q4_0", "Q4_1",
    "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"); rows, columns; data: [rows, bytes of a row] uint8,
    memory-mapped."""

    kind: str
    rows: int
    columns: int
    data: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """[rows, columns] float32"""
        out = torch.empty(self.rows, self.columns)
        dequantize_into(self.kind, self.data, out)
        return out


Stored = torch.Tensor | QuantizedMatrix

Weight = Stored | tuple[Stored, ...]
"""Of a tuple's matrices the rows follow each other: query, key and value, or gate and up."""


def dequantize_into(kind: str, data: torch.Tensor, out: torch.Tensor) -> None:
    """Fill `out` [rows, columns], of any float type, with the values of `data` [rows, bytes].

    No more than a few rows are held in float32 at once. Raises NotImplementedError for a type that
    the `gguf` package does not dequantise.
    """
    if kind in FLOATS:
        out.copy_(data.view(FLOATS[kind]))
        return
    at_once = max(1, _CHUNK // out.shape[1])
    for start in range(0, len(out), at_once):
        rows = slice(start, start + at_once)
        values = dequantize(data[rows].numpy(), GGMLQuantizationType[kind])
        out[rows] = torch.from_numpy(values)
