"""Experts of folders that keep those of a layer in one tensor, as gpt-oss's do."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from penstock.engine.models.quantized import QuantizedMatrix, unpack_bytes

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")
_PER_BLOCK = 32
"""Columns of a block of MXFP4."""


@dataclass(frozen=True, slots=True)
class StackedExpert:
    """One expert's matrix or bias in tensors of all experts.

    These are biases [experts, rows], matrices [experts, columns, rows], or in MXFP4 two tensors:
    blocks [experts, rows, blocks, 16] and scales [experts, rows, blocks], all uint8.

    stacks: safetensors' slices of these tensors
    rows:   of gate and up every second one"""

    stacks: tuple[Any, ...]
    expert: int
    rows: slice

    @classmethod
    def find(
        cls, name: str, has: Callable[[str], bool], slice_of: Callable[[str], Any]
    ) -> StackedExpert | None:
        """Return the part that has the name of an expert's own tensor; None where no stack has."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return None
        folder, expert, use, kind = match.groups()
        stack = f"{folder}.{'down_proj' if use == 'down' else 'gate_up_proj'}"
        if not has(f"{stack}_bias"):
            return None
        names = [f"{stack}_bias" if kind == "bias" else stack]
        if kind == "weight" and has(f"{stack}_blocks"):
            names = [f"{stack}_blocks", f"{stack}_scales"]
        rows = slice(None) if use == "down" else slice(int(use == "up"), None, 2)
        return cls(tuple(map(slice_of, names)), int(expert), rows)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """Shape of the expert's tensor; None where the stacks do not have it."""
        first, *scales = (tuple(stack.get_shape()) for stack in self.stacks)
        if scales:
            are_bytes = all(stack.get_dtype() == "U8" for stack in self.stacks)
            is_whole = are_bytes and first[3:] == (_PER_BLOCK // 2,) and scales == [first[:3]]
            first = (first[0], _PER_BLOCK * first[2], first[1]) if is_whole else ()
        if len(first) not in (2, 3) or self.expert >= first[0]:
            return None
        return (len(range(first[-1])[self.rows]), *first[1:-1])

    def read(self) -> torch.Tensor | QuantizedMatrix:
        """Return the expert's tensor, matrices as [rows, columns]."""
        first, *scales = (stack[self.expert] for stack in self.stacks)
        if not scales:
            values: torch.Tensor = first.t()[self.rows]
            return values
        codes = unpack_bytes(first[self.rows], 4)
        half = _PER_BLOCK // 2
        # As ggml has them: the scale, then the first 16 codes beside the others.
        packed = codes[..., :half] | codes[..., half:] << 4
        data = torch.cat((scales[0][self.rows, :, None], packed), dim=-1).flatten(1)
        return QuantizedMatrix("MXFP4", len(data), codes[0].numel(), data)
