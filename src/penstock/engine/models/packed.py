"""Quantised matrices of checkpoint folders: compressed-tensors, GPTQ and AWQ, read as floats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

Read = Callable[[str, tuple[int, ...]], torch.Tensor]
"""The tensor of a name, which must have the shape given."""

_WORD = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns each four bits of a word are, the lowest first."""


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """How a checkpoint's quantised matrices are stored.

    method:     compressed-tensors (packed), int-quantized (compressed-tensors in whole bytes), gptq
                or awq
    bits:       of a value: 4 or 8
    group_size: columns that share a scale; None: all of a row
    zero_shift: what is added to stored zero points
    """

    method: str
    bits: int
    group_size: int | None
    zero_shift: int = 0

    @property
    def marker(self) -> str:
        """The tensor that every quantised module has."""
        packed = {"compressed-tensors": "weight_packed", "int-quantized": "weight_scale"}
        return packed.get(self.method, "qweight")

    def read(self, module: str, read: Read, has: Callable[[str], bool], out: torch.Tensor) -> None:
        """Fill `out` [rows, columns] with a module's weight. Raises ValueError for a bad size."""
        rows, columns = out.shape
        size = self.group_size or columns
        per_word = _WORD // self.bits
        if columns % size or columns % per_word or rows % per_word:
            raise ValueError(f"{module} has shape {(rows, columns)}, not whole groups of {size}")
        groups = columns // size
        if self.method in ("gptq", "awq"):
            values, zeros, scales = self._gptq_or_awq(module, read, (rows, columns), groups)
        else:
            scales = read(f"{module}.weight_scale", (rows, groups)).float()
            values, zeros = self._symmetric(module, read, (rows, columns)), torch.zeros(1, 1)
        index = torch.arange(columns) // size
        order = {"gptq": f"{module}.g_idx"}.get(self.method, f"{module}.weight_g_idx")
        if has(order):
            index = read(order, (columns,)).long()
            if not ((index >= 0) & (index < groups)).all():
                raise ValueError(f"{order} names groups beyond the {groups} there are")
        if zeros.numel() > 1:
            values = values - zeros[:, index]
        torch.mul(values, scales[:, index], out=values)
        out.copy_(values)

    def _symmetric(self, module: str, read: Read, shape: tuple[int, int]) -> torch.Tensor:
        if self.method == "int-quantized":
            return _typed(read, f"{module}.weight", shape, torch.int8).float()
        rows, columns = shape
        words = _words(read, f"{module}.weight_packed", (rows, columns * self.bits // _WORD))
        return (_unpack(words, self.bits) - (1 << (self.bits - 1))).float()

    def _gptq_or_awq(
        self, module: str, read: Read, shape: tuple[int, int], groups: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Values [rows, columns], zero points and scales [rows, groups]."""
        (rows, columns), per_word = shape, _WORD // self.bits
        scales = read(f"{module}.scales", (groups, rows)).float().t()
        zeros = _unpack(_words(read, f"{module}.qzeros", (groups, rows // per_word)), self.bits)
        if self.method == "gptq":
            words = _words(read, f"{module}.qweight", (columns // per_word, rows))
            values = _unpack(words.t().contiguous(), self.bits)
        else:
            words = _words(read, f"{module}.qweight", (columns, rows // per_word))
            values = _in_order(_unpack(words, self.bits)).t()
            zeros = _in_order(zeros)
        return values.float(), (zeros + self.zero_shift).t().float(), scales


def packed_format(config: Mapping[str, Any]) -> PackedFormat:
    """Of a config.json's quantization_config. Raises ValueError for one that is not read."""
    method = config.get("quant_method")
    if method == "compressed-tensors":
        return _compressed(config)
    if method not in ("gptq", "awq"):
        raise ValueError(f"quant_method is {method!r}; allowed: compressed-tensors, gptq, awq")
    bits = config.get("bits", config.get("w_bit"))
    allowed = (4,) if method == "awq" else (4, 8)
    if bits not in allowed:
        raise ValueError(f"{method} of {bits!r} bits; allowed: {' or '.join(map(str, allowed))}")
    size = _group_size(config.get("group_size", config.get("q_group_size")))
    if method == "awq":
        version = str(config.get("version", "gemm")).lower()
        if version != "gemm" or config.get("zero_point", True) is not True:
            raise ValueError(f"awq version {version!r}; allowed: gemm, with zero points")
        return PackedFormat(method, bits, size)
    kind = config.get("checkpoint_format", "gptq")
    if kind not in ("gptq", "gptq_v2"):
        raise ValueError(f"gptq checkpoint_format is {kind!r}; allowed: gptq, gptq_v2")
    # The older format stores zero points less one.
    return PackedFormat(method, bits, size, zero_shift=1 if kind == "gptq" else 0)


def _compressed(config: Mapping[str, Any]) -> PackedFormat:
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise ValueError("compressed-tensors with several config_groups; allowed: one")
    (group,) = groups.values()
    weights = group.get("weights") or {}
    kind = group.get("format") or config.get("format")
    methods = {"pack-quantized": "compressed-tensors", "int-quantized": "int-quantized"}
    if kind not in methods:
        raise ValueError(f"compressed-tensors format is {kind!r}; allowed: {', '.join(methods)}")
    if (config.get("sparsity_config") or {}).get("format", "dense") != "dense":
        raise ValueError("compressed-tensors with a sparsity_config; allowed: dense")
    bits, strategy = weights.get("num_bits", 0), weights.get("strategy")
    allowed = (4, 8) if kind == "pack-quantized" else (8,)
    symmetric = weights.get("symmetric", True)
    if weights.get("type") != "int" or bits not in allowed or not symmetric:
        raise ValueError(
            f"compressed-tensors {kind} weights of {bits!r} bits, type {weights.get('type')!r}, "
            f"symmetric {symmetric!r}; allowed: symmetric int of "
            f"{' or '.join(map(str, allowed))}"
        )
    if strategy not in ("group", "channel"):
        raise ValueError(f"compressed-tensors strategy is {strategy!r}; allowed: group, channel")
    size = _group_size(weights.get("group_size")) if strategy == "group" else None
    return PackedFormat(methods[kind], int(bits), size)


def _group_size(size: Any) -> int | None:
    if size in (None, -1):
        return None
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"group_size is {size!r}; must be above 0, or -1 for whole rows")
    return size


def _typed(read: Read, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    tensor = read(name, shape)
    if tensor.dtype != dtype:
        raise ValueError(f"tensor {name} is {tensor.dtype}; {dtype} is expected")
    return tensor


def _words(read: Read, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return _typed(read, name, shape, torch.int32)


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """[n, m] int32 -> [n, m * 32 / bits], the lowest bits first."""
    shifts = torch.arange(0, _WORD, bits, dtype=torch.int32)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(1)


def _in_order(values: torch.Tensor) -> torch.Tensor:
    """AWQ's columns in their own order."""
    inverse = torch.tensor(_AWQ_ORDER).argsort()
    return values.unflatten(1, (-1, len(inverse)))[..., inverse].flatten(1)
