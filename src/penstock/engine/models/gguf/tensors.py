"""Tensors of a GGUF file under Hugging Face's names, with Hugging Face's order of rows."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial

import torch
from gguf import MODEL_ARCH, get_tensor_name_map

from penstock.engine.models.gguf.config import ROPE_TENSORS, Metadata
from penstock.engine.models.gguf.file import GgufFile, TensorEntry
from penstock.engine.models.gguf.values import read_values
from penstock.engine.models.quantized import (
    FLOATS,
    NOT_FINITE,
    QuantizedMatrix,
    are_blocks_finite,
    is_finite,
)

_ROTATED = (".self_attn.q_proj", ".self_attn.k_proj")
_DECAY, _CONV, _PLAIN_NORM = ".A_log", ".conv1d.weight", "linear_attn.norm.weight"
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)(\..*)")


_SPELT = {
    ".dt_bias": ".dt_proj.bias",
    ".layer_scalar": ".layer_scalar.weight",
    ".experts.gate_up_proj": ".experts.gate_up_proj.weight",
    ".experts.down_proj": ".experts.down_proj.weight",
    ".router.scale": ".router.proj.scale",
    ".router.per_expert_scale": ".experts.down_proj.scale",
}
"""Names of tensors as matrices and vectors are called here."""


class GgufTensors:
    """Tensors of a GGUF file.

    Architecture llama stores the rotary pairs (i, i + head_dim / 2) of query and key rows side by
    side; they are put back into halves. Gemma's and Qwen3.5's norms include the 1 that Hugging
    Face's lack, and decays are stored as they are multiplied. The matrices of all experts are one
    tensor. Layers behind the model's, of heads that predict further tokens, are not read."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._known = set(ROPE_TENSORS)  # read with the configuration
        self._metadata = Metadata(file)
        architecture = self._metadata.architecture
        kind = {arch.name.lower(): arch for arch in MODEL_ARCH}[architecture]
        self._names = get_tensor_name_map(kind, self._metadata.whole("block_count"))
        self._pairs_rows = architecture == "llama"
        self._norm_offset = 1.0 if architecture in ("gemma3", "qwen35") else 0.0
        behind = range(self._metadata.num_layers, self._metadata.whole("block_count"))
        prefixes = tuple(f"blk.{i}." for i in behind)
        self._known |= {name for name in file.tensors if name.startswith(prefixes)}
        # Of layers that read another's keys and values.
        shared = self._metadata.get("attention.shared_kv_layers", 0)
        reading = range(self._metadata.num_layers - shared, self._metadata.num_layers)
        unused = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
        self._known |= {f"blk.{i}.{name}" for i in reading for name in unused}

    def has(self, name: str) -> bool:
        return self._name(name) in self._file.tensors

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        self._entry(name, shape)

    def read(self, name: str, out: torch.Tensor) -> None:
        entry = self._entry(name, tuple(out.shape))
        read_values(self._file, entry, out)
        self._file.drop_pages(entry)
        if name.endswith(_DECAY):
            out.neg_().log_()
        self._require(is_finite(out), entry)
        if self._is_rotated(name):
            out.copy_(out[self._order(name, len(out))])
        if self._norm_offset and name.endswith("norm.weight") and not name.endswith(_PLAIN_NORM):
            out.sub_(self._norm_offset)

    def quantized(self, name: str, shape: tuple[int, ...]) -> QuantizedMatrix | None:
        entry = self._entry(name, shape)
        if entry.kind in FLOATS:
            return None
        data = torch.from_numpy(self._file.data(entry))
        self._require(are_blocks_finite(entry.kind, data), entry)
        if self._is_rotated(name):
            data = data[self._order(name, len(data))]
        *axes, columns = shape
        rows = math.prod(axes)
        drop = partial(self._file.drop_pages, entry)
        return QuantizedMatrix(entry.kind, rows, columns, data, drop)

    def _require(self, finite: bool, entry: TensorEntry) -> None:
        """Raises CheckpointError."""
        if not finite:
            raise self._file.error(f"tensor {entry.name} {NOT_FINITE}")

    def check_all_known(self) -> None:
        """Raises CheckpointError for a tensor nobody asked for, as it would change the model."""
        unknown = next((name for name in self._file.tensors if name not in self._known), None)
        if unknown is not None:
            raise self._file.error(
                f"tensor {unknown} is not part of a plain {self._metadata.architecture} model"
            )

    def _name(self, name: str) -> str:
        if name.endswith(_DECAY):
            return str(self._names.get_name(name))
        for theirs, ours in _SPELT.items():
            name = name.replace(theirs, ours)
        base, _, suffix = name.rpartition(".")
        return f"{self._names.get_name(base)}.{suffix}"

    def _entry(self, name: str, shape: tuple[int, ...]) -> TensorEntry:
        if (expert := _EXPERT.fullmatch(name)) is not None:
            count = self._metadata.whole("expert_count")
            every = self._entry(expert[1] + expert[3], (count, *shape))
            size = every.num_bytes // count
            start = every.start + int(expert[2]) * size
            return replace(every, shape=shape, start=start, num_bytes=size)
        if name.endswith(_CONV):  # without the axis of one input channel
            shape = (shape[0], *shape[2:])
        theirs = self._name(name)
        entry = self._file.tensors.get(theirs)
        if entry is None:
            raise self._file.error(f"tensor {theirs} is missing; shape {shape} expected")
        if entry.shape != shape:
            raise self._file.error(
                f"tensor {theirs} has shape {entry.shape}; its metadata asks for {shape}"
            )
        self._known.add(theirs)
        return entry

    def _is_rotated(self, name: str) -> bool:
        return self._pairs_rows and name.rpartition(".")[0].endswith(_ROTATED)

    def _order(self, name: str, rows: int) -> torch.Tensor:
        """Return the file's row for each row of Hugging Face's matrix."""
        head_dim = self._metadata.head_dim
        return torch.arange(rows).view(-1, head_dim // 2, 2).transpose(1, 2).flatten()
