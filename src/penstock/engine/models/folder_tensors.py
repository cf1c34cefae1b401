"""Tensors of a folder in Hugging Face layout."""

from __future__ import annotations

import json
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from penstock.engine.models.checkpoint import (
    GLM_HEAD,
    HEAD_PROJECTION,
    INDEX_FILE,
    SINGLE_FILE,
    CheckpointError,
    one_line,
)
from penstock.engine.models.dtypes import DTYPES
from penstock.engine.models.packed import Fp8Matrix, GroupedMatrix, PackedFormat
from penstock.engine.models.quantized import (
    NOT_FINITE,
    QuantizedMatrix,
    are_blocks_finite,
    is_finite,
)
from penstock.engine.models.stacked_experts import StackedExpert

_log = logging.getLogger(__name__)

_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""Old and new spellings of a text part's tensor names."""

_GLM_HEAD = {
    HEAD_PROJECTION: GLM_HEAD,
    "mtp.pre_fc_norm_embedding.weight": ".enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": ".hnorm.weight",
    "mtp.norm.weight": ".shared_head.norm.weight",
}
"""Ends of names in the layer of a head, in GLM's folders."""


class FolderTensors:
    """Tensors of safetensors files, each opened once and mapped."""

    def __init__(self, path: Path, stack: ExitStack, packed: PackedFormat | None) -> None:
        self._path = path
        self._stack = stack
        self._packed = packed
        self._has_warned = False
        self._open: dict[Path, Any] = {}
        self._file_of = self._locate()
        self._names = {_text_name(name): name for name in self._file_of}
        if "embed_tokens.weight" in self._names:  # of a model without an output matrix
            flat = {f"model.{name}": theirs for name, theirs in self._names.items()}
            self._names = flat | self._names
        self._names |= _names_of_head(self._names)

    def has(self, name: str) -> bool:
        return name in self._names

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        expert = self._expert(name)
        if expert is not None and expert.shape != shape:
            raise CheckpointError(
                f"{self._path}: {name}: the tensor of all experts has shape "
                f"{tuple(expert.stacks[0].get_shape())}; config.json asks for {shape} of each"
            )
        if expert is None and not self._is_grouped(name, shape):
            self._stored(name, shape)

    def read(self, name: str, out: torch.Tensor) -> None:
        if (expert := self._expert(name)) is not None:
            found = expert.read()
            found = found.dequantize() if isinstance(found, QuantizedMatrix) else found
            return self._fill(name, found, out)
        grouped = self._grouped(name, tuple(out.shape))
        if grouped is not None:
            out.copy_(grouped.values())
            return None
        return self._fill(name, self._stored(name, tuple(out.shape)), out)

    def _fill(self, name: str, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """Copy a tensor of the type that it may have. Raises CheckpointError."""
        if tensor.dtype not in DTYPES and tensor.dtype != out.dtype:
            allowed = ", ".join(map(str, DTYPES))
            raise CheckpointError(
                f"{self._where(name)}: tensor {name} is {tensor.dtype}; allowed: {allowed}"
            )
        out.copy_(tensor)
        self._require_finite(name, out)

    def _where(self, name: str) -> Path:
        return self._file_of[self._names[name]] if name in self._names else self._path

    def _expert(self, name: str) -> StackedExpert | None:
        """Return an expert's part of a tensor of all experts; None for a tensor of its own."""

        def slice_of(stack: str) -> Any:
            if not self.has(stack):
                raise CheckpointError(f"{self._path}: tensor {stack} is missing")
            file = self._where(stack)
            try:
                return self._handle(file).get_slice(self._names[stack])
            except SafetensorError as error:
                raise CheckpointError(f"{file}: tensor {stack}: {one_line(error)}") from error

        return StackedExpert.find(name, self.has, slice_of)

    def _require_finite(self, name: str, values: torch.Tensor) -> None:
        """Raises CheckpointError."""
        if not is_finite(values):
            raise CheckpointError(f"{self._where(name)}: tensor {name} {NOT_FINITE}")

    def _stored(self, name: str, shape: tuple[int, ...] | None) -> torch.Tensor:
        if name not in self._names:
            raise CheckpointError(f"{self._path}: tensor {name} is missing; shape {shape} expected")
        name = self._names[name]
        file = self._file_of[name]
        try:
            tensor: torch.Tensor = self._handle(file).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{file}: tensor {name}: {one_line(error)}") from error
        if shape is not None and tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{file}: tensor {name} has shape {tuple(tensor.shape)}; "
                f"config.json asks for {shape}"
            )
        return tensor

    def quantized(self, name: str, shape: tuple[int, ...]) -> QuantizedMatrix | None:
        if (expert := self._expert(name)) is not None and len(expert.stacks) > 1:
            blocks = expert.read()
            assert isinstance(blocks, QuantizedMatrix)
            if not are_blocks_finite(blocks.kind, blocks.data):
                raise CheckpointError(f"{self._path}: tensor {name} {NOT_FINITE}")
            return blocks
        grouped = self._grouped(name, shape)
        if not isinstance(grouped, GroupedMatrix) or self._packed is None:
            return None
        matrix = grouped.quantized(per_token=self._packed.per_token)
        if matrix is None and not self._has_warned:
            self._has_warned = True
            why = (
                "columns are out of order (act-order)"
                if grouped.index is not None
                else f"groups of {grouped.group_size} columns of {grouped.bits} bits have no kernel"
            )
            _log.warning("%s: %s and maybe others are widened: %s", self._path, name, why)
        return matrix

    def _is_grouped(self, name: str, shape: tuple[int, ...]) -> bool:
        module, _, kind = name.rpartition(".")
        if self._packed is None or kind != "weight" or len(shape) != 2:
            return False
        return self.has(f"{module}.{self._packed.marker}")

    def _grouped(self, name: str, shape: tuple[int, ...]) -> GroupedMatrix | Fp8Matrix | None:
        """Return a quantised matrix; None for any other tensor."""
        packed = self._packed
        if packed is None or not self._is_grouped(name, shape):
            return None
        module = name.removesuffix(".weight")
        try:
            grouped = packed.read(module, (shape[0], shape[1]), self._stored, self.has)
            self._require_finite(name, grouped.scales)
            return grouped
        except CheckpointError:
            raise
        except ValueError as error:
            raise CheckpointError(f"{self._path}: {one_line(error)}") from error

    def _locate(self) -> dict[str, Path]:
        single, index = self._path / SINGLE_FILE, self._path / INDEX_FILE
        if single.is_file():
            return dict.fromkeys(self._handle(single).keys(), single)
        if not index.is_file():
            raise CheckpointError(
                f"{self._path}: has neither {SINGLE_FILE} nor {INDEX_FILE}; "
                "weights are read from safetensors only"
            )
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: self._path / Path(file).name for name, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{index}: not an index of safetensors files ({one_line(error)})"
            ) from error

    def _handle(self, file: Path) -> Any:
        if file not in self._open:
            try:
                self._open[file] = self._stack.enter_context(safe_open(file, framework="pt"))
            except OSError as error:
                raise CheckpointError(f"{file}: cannot be read ({one_line(error)})") from error
            except SafetensorError as error:
                raise CheckpointError(
                    f"{file}: not a whole safetensors file ({one_line(error)})"
                ) from error
        return self._open[file]


def _names_of_head(names: dict[str, str]) -> dict[str, str]:
    """Return GLM's names of a head, a layer behind the model's, by those that Qwen's have."""
    layer = next((n.removesuffix(GLM_HEAD) for n in names if n.endswith(GLM_HEAD)), None)
    if layer is None:
        return {}
    own = {n.removeprefix(layer): theirs for n, theirs in names.items() if n.startswith(layer)}
    of_layer = {f"mtp.layers.0{name}": theirs for name, theirs in own.items()}
    return of_layer | {ours: own[theirs] for ours, theirs in _GLM_HEAD.items() if theirs in own}


def _text_name(name: str) -> str:
    """Return a tensor's name in the text part by itself."""
    for prefix, of_text in _PREFIXES.items():
        if name.startswith(prefix):
            return of_text + name.removeprefix(prefix)
    return name
