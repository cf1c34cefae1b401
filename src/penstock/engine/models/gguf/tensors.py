"""Tensors of a GGUF file under Hugging Face's names, with Hugging Face's order of rows."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial

import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

from penstock.engine.models.checkpoint import HEAD_PROJECTION
from penstock.engine.models.gguf.config import ASSISTANT, RECURRENT, ROPE_TENSORS, Metadata
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
_HEAD_NAMES = {
    HEAD_PROJECTION: "eh_proj",
    "mtp.pre_fc_norm_embedding.weight": "enorm",
    "mtp.pre_fc_norm_hidden.weight": "hnorm",
    "mtp.norm.weight": "shared_head_norm",
}
_ASSISTANT_NAMES = {
    f"{x}_projection.weight": f"nextn.{x}_projection.weight" for x in ("pre", "post")
}
_UNUSED = ("masked_embd_centroids.weight", "masked_embd_ordering", "masked_embd_ordering.weight")
"""Tensors that find an assistant's likely tokens without computing the others."""
_SHARED_GATE = ".shared_expert_gate.weight"
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)(\..*)")
_DECAY, _PLAIN_NORM = ".A_log", "linear_attn.norm.weight"
_CONV = (".conv1d.weight", ".conv.conv.weight")
_PAIRS = ("llama", "smollm3", "mistral3", "granite", "granitehybrid")
"""Architectures whose rotary pairs lie side by side."""


_SPELT = {
    ".dt_bias": ".dt_proj.bias",
    ".layer_scalar": ".layer_scalar.weight",
    ".experts.gate_up_proj": ".experts.gate_up_proj.weight",
    ".experts.down_proj": ".experts.down_proj.weight",
    ".router.scale": ".router.proj.scale",
    ".router.per_expert_scale": ".experts.down_proj.scale",
    ".e_score_correction_bias": ".e_score_correction.bias",
    ".self_attn.sinks": ".self_attn.sinks.weight",
}
"""Ends of tensors' names, and what they are as names of matrices and vectors."""


class GgufTensors:
    """Tensors of a GGUF file.

    Architecture llama and others store the rotary pairs (i, i + head_dim / 2) of query and key rows
    side by side; they are put back into halves. Gemma's and Qwen3.5's norms include the 1 that
    Hugging Face's lack, and decays are stored as they are multiplied. The matrices of all experts
    are one tensor, in some files with gates and ups together. A layer behind the model's is that of
    a head that predicts further tokens (`mtp`)."""

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._known = {*ROPE_TENSORS, *_UNUSED}  # the first are read with the configuration
        self._metadata = Metadata(file)
        architecture = self._metadata.architecture
        usual = "gemma4" if architecture == ASSISTANT else architecture
        kind = {name: arch for arch, name in MODEL_ARCH_NAMES.items()}[usual]
        self._names = get_tensor_name_map(kind, self._metadata.whole("block_count"))
        self._pairs_rows = architecture in _PAIRS
        self._norm_offset = 1.0 if architecture in ("gemma3", *RECURRENT) else 0.0
        self._head = self._metadata.num_layers
        behind = range(self._head, self._metadata.whole("block_count"))
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
        is_norm = name.endswith("norm.weight") or (name in _HEAD_NAMES and out.dim() == 1)
        if self._norm_offset and is_norm and not name.endswith(_PLAIN_NORM):
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
        if (of_head := _HEAD_NAMES.get(name)) is not None:
            return f"blk.{self._head}.nextn.{of_head}.weight"
        if name in _ASSISTANT_NAMES:
            return _ASSISTANT_NAMES[name]
        name = name.replace("mtp.layers.0.", f"model.layers.{self._head}.")
        if name.endswith(_DECAY):
            return str(self._names.get_name(name))
        for theirs, ours in _SPELT.items():
            if name.endswith(theirs):
                name = name.removesuffix(theirs) + ours
        base, _, suffix = name.rpartition(".")
        return f"{self._names.get_name(base)}.{suffix}"

    def _entry(self, name: str, shape: tuple[int, ...]) -> TensorEntry:
        if (expert := _EXPERT.fullmatch(name)) is not None:
            folder, number, use, suffix = expert.groups()
            count, fused = self._metadata.whole("expert_count"), f"{folder}.gate_up_proj{suffix}"
            place, uses = int(number), 1
            if use != "down_proj" and self.has(fused):
                place, uses = 2 * place + (use == "up_proj"), 2
            source = fused if uses == 2 else f"{folder}.{use}{suffix}"
            every = self._entry(source, (count, uses * shape[0], *shape[1:]))
            size = every.num_bytes // (count * uses)
            return replace(every, shape=shape, start=every.start + place * size, num_bytes=size)
        if name.endswith(_CONV):  # without the axis of one input channel
            shape = (shape[0], *shape[2:])
        theirs = self._name(name)
        entry = self._file.tensors.get(theirs)
        if entry is None:
            raise self._file.error(f"tensor {theirs} is missing; shape {shape} expected")
        if name.endswith(_SHARED_GATE) and len(entry.shape) == 1:  # its one row, by older writers
            shape = shape[1:]
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
