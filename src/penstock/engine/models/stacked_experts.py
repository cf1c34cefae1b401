"""Experts of folders that keep those of a layer in one tensor."""

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

    These are matrices [experts, rows, columns], the rows of gates before those of ups; or as in
    gpt-oss, gates and ups in turn, biases [experts, rows], matrices [experts, columns, rows], or in
    MXFP4 two tensors: blocks [experts, rows, blocks, 16] and scales [experts, rows, blocks], all
    uint8.

    stacks: safetensors' slices of these tensors"""

    stacks: tuple[Any, ...]
    expert: int
    use: str
    of_gpt_oss: bool

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
        of_gpt_oss = has(f"{stack}_bias")
        if not (of_gpt_oss or (kind == "weight" and has(stack))):
            return None
        names = [f"{stack}_bias" if kind == "bias" else stack]
        if kind == "weight" and has(f"{stack}_blocks"):
            names = [f"{stack}_blocks", f"{stack}_scales"]
        return cls(tuple(map(slice_of, names)), int(expert), use, of_gpt_oss)

    def _rows(self, count: int) -> slice:
        """Return which of a stack's `count` rows are the tensor's."""
        if self.use == "down":
            return slice(0, count)
        if self.of_gpt_oss:
            return slice(int(self.use == "up"), count, 2)
        return slice(0, count // 2) if self.use == "gate" else slice(count // 2, count)

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
        _, *columns, rows = first if self.of_gpt_oss else (first[0], *reversed(first[1:]))
        return (len(range(rows)[self._rows(rows)]), *columns)

    def read(self) -> torch.Tensor | QuantizedMatrix:
        """Return the expert's tensor, matrices as [rows, columns]."""
        if not self.of_gpt_oss:
            part: torch.Tensor = self.stacks[0][
                self.expert, self._rows(self.stacks[0].get_shape()[1])
            ]
            return part
        first, *scales = (stack[self.expert] for stack in self.stacks)
        if not scales:
            values: torch.Tensor = first.t()
            return values[self._rows(len(values))]
        rows = self._rows(len(first))
        codes = unpack_bytes(first[rows], 4)
        half = _PER_BLOCK // 2
        # As ggml has them: the scale, then the first 16 codes beside the others.
        packed = codes[..., :half] | codes[..., half:] << 4
        data = torch.cat((scales[0][rows, :, None], packed), dim=-1).flatten(1)
        return QuantizedMatrix("MXFP4", len(data), codes[0].numel(), data)
