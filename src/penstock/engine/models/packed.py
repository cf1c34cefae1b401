"""Quantised matrices of checkpoint folders: compressed-tensors, GPTQ, AWQ and FP8."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.engine.models.dtypes import DTYPES
from penstock.engine.models.quantized import (
    GROUP_FORMATS,
    NOT_FINITE,
    QuantizedMatrix,
    unpack_bytes,
)

Read = Callable[[str, tuple[int, ...] | None], torch.Tensor]
"""Reader of a tensor by name, which must have the given shape, if any."""

WORD = 32
"""Bits of a packed word (int32), as in all three formats."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column of each four bits of a word, the lowest first, as AWQ packs them."""


@dataclass(frozen=True, slots=True)
class GroupedMatrix:
    """Integers in groups of columns that share a scale: a weight is scale * (code - zero).

    bits:   of a code
    codes:  [rows, columns * bits / 8] uint8, unsigned; of two in a byte the low one first
    scales: [rows, groups] float32
    zeros:  [rows, groups] float32; None: half of the codes' range
    index:  [columns] group of each column, where they are not in order"""

    bits: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    index: torch.Tensor | None = None

    @property
    def columns(self) -> int:
        return self.codes.shape[1] * 8 // self.bits

    @property
    def group_size(self) -> int:
        return self.columns // self.scales.shape[1]

    def values(self) -> torch.Tensor:
        """Return the weights [rows, columns] float32."""
        index = self.index
        if index is None:
            index = torch.arange(self.columns) // self.group_size
        values = unpack_bytes(self.codes, self.bits).float()
        if self.zeros is None:
            values -= 1 << (self.bits - 1)
        else:
            values -= self.zeros[:, index]
        return values.mul_(self.scales[:, index])

    def quantized(self, *, per_token: bool) -> QuantizedMatrix | None:
        """Return the matrix for the CPU kernels, or None where they do not support it.

        Unsupported are groups that are not whole blocks of 32 columns, columns out of order and
        zero points of 8 bits. per_token: one scale per row of activations, where rows are whole
        blocks of 128."""
        if self.index is not None or self.group_size % 32:
            return None
        if self.zeros is not None and self.bits != 4:
            return None
        size = 32 if self.group_size % 128 else 128
        kind = f"{'INT' if self.zeros is None else 'UINT'}{self.bits}_{size}"
        if per_token and kind == "INT8_128":
            kind = "INT8_ROWS"
        heads = [self.scales]
        if self.zeros is not None:
            # A scale of 16 bits times a zero point of 4 is exact in 32.
            heads.append(-self.zeros * self.scales)
        of_blocks = [x.repeat_interleave(self.group_size // size, dim=1) for x in heads]
        data = GROUP_FORMATS[kind].encode(self.codes, *of_blocks)
        return QuantizedMatrix(kind, len(data), self.columns, data)


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """Floats of 8 bits [rows, columns], and the scale of each block by which they are multiplied.

    block: rows and columns of one; those at the ends may be smaller"""

    floats: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]

    def values(self) -> torch.Tensor:
        """Return the weights [rows, columns] float32."""
        rows, columns = self.floats.shape
        scales = self.scales.repeat_interleave(self.block[0], 0)[:rows]
        return self.floats.float().mul_(scales.repeat_interleave(self.block[1], 1)[:, :columns])


@dataclass(frozen=True, slots=True)
class PackedFormat:
    """Storage of a checkpoint's quantised matrices.

    method:     compressed-tensors (packed), int-quantized (compressed-tensors in whole bytes),
                gptq, awq or fp8
    bits:       of a value: 4 or 8
    group_size: columns that share a scale; None: all of a row
    zero_shift: added to stored zero points
    has_zeros:  zero points are stored
    per_token:  the model expects activations rounded to 8 bits with one scale per token
    block:      rows and columns that share a scale in fp8; None: all of a matrix"""

    method: str
    bits: int
    group_size: int | None
    zero_shift: int = 0
    has_zeros: bool = True
    per_token: bool = False
    block: tuple[int, int] | None = None

    @property
    def marker(self) -> str:
        """Name of a tensor that every quantised module has."""
        scaled = {"int-quantized": "weight_scale", "fp8": "weight_scale_inv"}
        return {"compressed-tensors": "weight_packed", **scaled}.get(self.method, "qweight")

    def read(
        self, module: str, shape: tuple[int, int], read: Read, has: Callable[[str], bool]
    ) -> GroupedMatrix | Fp8Matrix:
        """Read a module's weight [rows, columns]. Raises ValueError for a bad size."""
        if self.method == "fp8":
            return self._fp8(module, shape, read)
        rows, columns = shape
        size = self.group_size or columns
        per_word = WORD // self.bits
        if columns % size or columns % per_word or rows % per_word:
            raise ValueError(f"{module} has shape {shape}, not whole groups of {size}")
        groups = columns // size
        by_method = self._gptq_or_awq if self.method in ("gptq", "awq") else self._compressed
        codes, zeros, scales = by_method(module, read, shape, groups)
        if zeros is not None and bool((zeros == 1 << (self.bits - 1)).all()):
            zeros = None
        order = f"{module}.g_idx" if self.method == "gptq" else f"{module}.weight_g_idx"
        index = None
        if has(order):
            index = read(order, (columns,)).long()
            if not ((index >= 0) & (index < groups)).all():
                raise ValueError(f"{order} names groups beyond the {groups} there are")
            if torch.equal(index, torch.arange(columns) // size):
                index = None
        return GroupedMatrix(self.bits, codes, scales, zeros, index)

    def _fp8(self, module: str, shape: tuple[int, int], read: Read) -> Fp8Matrix:
        floats = _typed(read, f"{module}.weight", shape, torch.float8_e4m3fn)
        if (floats.view(torch.uint8) & 127 == 127).any():
            raise ValueError(f"tensor {module}.weight {NOT_FINITE}")
        name, block = f"{module}.{self.marker}", self.block or shape
        blocks = -(-shape[0] // block[0]), -(-shape[1] // block[1])
        scales = read(name, None if self.block is None else blocks)
        if scales.dtype not in DTYPES or scales.numel() != blocks[0] * blocks[1]:
            raise ValueError(f"tensor {name} is {scales.dtype} {tuple(scales.shape)}")
        return Fp8Matrix(floats, scales.float().view(blocks), block)

    def _compressed(
        self, module: str, read: Read, shape: tuple[int, int], groups: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Return codes, zero points [rows, groups] (or None) and scales [rows, groups]."""
        rows, columns = shape
        scales = read(f"{module}.weight_scale", (rows, groups)).float()
        if self.method == "int-quantized":
            values = _typed(read, f"{module}.weight", shape, torch.int8)
            return values.view(torch.uint8) ^ 0x80, None, scales
        words = _words(read, f"{module}.weight_packed", (rows, columns * self.bits // WORD))
        codes = words.view(torch.uint8)
        if not self.has_zeros:
            return codes, None, scales
        shape = (rows * self.bits // WORD, groups)
        zeros = _unpack(_words(read, f"{module}.weight_zero_point", shape).t(), self.bits)
        return codes, zeros.t().float(), scales

    def _gptq_or_awq(
        self, module: str, read: Read, shape: tuple[int, int], groups: int
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
        """Return codes, zero points and scales, the latter two [rows, groups]."""
        (rows, columns), per_word = shape, WORD // self.bits
        scales = read(f"{module}.scales", (groups, rows)).float().t().contiguous()
        zeros = _unpack(_words(read, f"{module}.qzeros", (groups, rows // per_word)), self.bits)
        if self.method == "gptq":
            words = _words(read, f"{module}.qweight", (columns // per_word, rows))
            codes = words.t().contiguous().view(torch.uint8)
        else:
            words = _words(read, f"{module}.qweight", (columns, rows // per_word))
            values = _in_order(_unpack(words, self.bits)).t()
            codes = (values[:, ::2] | values[:, 1::2] << 4).contiguous()
            zeros = _in_order(zeros)
        return codes, zeros.t().float() + self.zero_shift, scales


def packed_format(config: Mapping[str, Any]) -> PackedFormat:
    """Parse a config.json's quantization_config. Raises ValueError for an unsupported one."""
    method = config.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_format(config)
    if method == "fp8":
        block = config.get("weight_block_size", (128, 128))
        kind = config.get("fmt", "e4m3"), config.get("expert_dtype", "fp8")
        if kind != ("e4m3", "fp8") or (block is not None and (len(block) != 2 or min(block) < 1)):
            raise ValueError(f"fp8 is {kind}, blocks {block!r}; allowed: e4m3, two sizes or none")
        return PackedFormat(method, 8, None, block=block and (int(block[0]), int(block[1])))
    if method not in ("gptq", "awq"):
        raise ValueError(f"quant_method is {method!r}; allowed: compressed-tensors, gptq, awq, fp8")
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
    # The older format stores zero points minus one.
    return PackedFormat(method, bits, size, zero_shift=1 if kind == "gptq" else 0)


def _compressed_format(config: Mapping[str, Any]) -> PackedFormat:
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
    symmetric = bool(weights.get("symmetric", True))
    one_sided = symmetric or kind == "pack-quantized"
    if weights.get("type") != "int" or bits not in allowed or not one_sided:
        raise ValueError(
            f"compressed-tensors {kind} weights of {bits!r} bits, type {weights.get('type')!r}, "
            f"symmetric {symmetric!r}; allowed: int of {' or '.join(map(str, allowed))}, "
            "symmetric or (pack-quantized) with zero points"
        )
    if strategy not in ("group", "channel"):
        raise ValueError(f"compressed-tensors strategy is {strategy!r}; allowed: group, channel")
    size = _group_size(weights.get("group_size")) if strategy == "group" else None
    return PackedFormat(
        methods[kind],
        int(bits),
        size,
        has_zeros=not symmetric,
        per_token=_is_per_token(group.get("input_activations") or {}),
    )


def _is_per_token(activations: Mapping[str, Any]) -> bool:
    rounding = (activations.get("num_bits"), activations.get("type"), activations.get("strategy"))
    return rounding == (8, "int", "token") and bool(activations.get("symmetric"))


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
    """Unpack [n, m] int32 into [n, m * 32 / bits] uint8, the lowest bits first."""
    return unpack_bytes(words.contiguous().view(torch.uint8), bits)


def _in_order(values: torch.Tensor) -> torch.Tensor:
    """Return AWQ's columns in the matrix's order."""
    inverse = torch.tensor(_AWQ_ORDER).argsort()
    return values.unflatten(1, (-1, len(inverse)))[..., inverse].flatten(1)
