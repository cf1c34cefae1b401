"""A GGUF file as a checkpoint: its tensors under Hugging Face's names, in their order of rows."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from gguf import MODEL_ARCH, get_tensor_name_map

from penstock.engine.models.checkpoint import Checkpoint, ModelDescription, Tensors
from penstock.engine.models.gguf.config import ROPE_TENSORS, Metadata, config_json, end_token_ids
from penstock.engine.models.gguf.file import GgufFile, TensorEntry
from penstock.engine.models.gguf.tokenizer import fast_tokenizer
from penstock.engine.models.quantized import FLOATS, QuantizedMatrix

_ROTATED = (".self_attn.q_proj", ".self_attn.k_proj")
_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)(\..*)")


class GgufCheckpoint(Checkpoint):
    """Configuration, weights, tokenizer and chat template from one file."""

    def description(self) -> ModelDescription:
        file = GgufFile(self.path)
        return ModelDescription(self.path, config_json(file), end_token_ids(file))

    @contextmanager
    def tensors(self) -> Iterator[Tensors]:
        file = GgufFile(self.path)
        tensors = _GgufTensors(file)
        yield tensors
        tensors.check_all_read()
        file.drop_pages()

    def tokenizer_source(self) -> bytes:
        file, digest = GgufFile(self.path), hashlib.sha256()
        for key in sorted(file.keys("tokenizer.ggml.")):
            raw = file.raw(key)
            digest.update(f"{key} {len(raw)} ".encode() + raw)
        return digest.digest()

    def tokenizer(self) -> Any:
        return fast_tokenizer(GgufFile(self.path))


class _GgufTensors:
    """Architecture llama keeps the rows of a query or key head as pairs (i, i + head_dim / 2) side
    by side; they are put back into Hugging Face's order, where one half follows the other. Gemma's
    norms have in them the 1 that Hugging Face's lack. The matrices of all experts are one tensor.
    """

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._read = set(ROPE_TENSORS)  # with the configuration
        self._metadata = Metadata(file)
        architecture = self._metadata.architecture
        kind = {arch.name.lower(): arch for arch in MODEL_ARCH}[architecture]
        self._names = get_tensor_name_map(kind, self._metadata.whole("block_count"))
        self._pairs_rows = architecture == "llama"
        self._norm_offset = 1.0 if architecture == "gemma3" else 0.0

    def has(self, name: str) -> bool:
        return self._name(name) in self._file.tensors

    def read(self, name: str, out: torch.Tensor) -> None:
        entry = self._entry(name, tuple(out.shape))
        self._read.add(entry.name)
        self._file.read(entry, out)
        if self._is_rotated(name):
            out.copy_(out[self._order(name, len(out))])
        if self._norm_offset and name.endswith("norm.weight"):
            out.sub_(self._norm_offset)

    def quantized(self, name: str, shape: tuple[int, ...]) -> QuantizedMatrix | None:
        entry = self._entry(name, shape)
        if entry.kind in FLOATS:
            return None
        self._read.add(entry.name)
        data = self._file.data(entry)
        if self._is_rotated(name):
            data = data[self._order(name, len(data))]
        rows, columns = shape
        return QuantizedMatrix(entry.kind, rows, columns, data)

    def check_all_read(self) -> None:
        """Raises CheckpointError: a tensor that nobody asked for would change the model."""
        unread = next((name for name in self._file.tensors if name not in self._read), None)
        if unread is not None:
            raise self._file.error(
                f"tensor {unread} is not part of a plain {self._metadata.architecture} model"
            )

    def _name(self, name: str) -> str:
        base, _, suffix = name.rpartition(".")
        return f"{self._names.get_name(base)}.{suffix}"

    def _entry(self, name: str, shape: tuple[int, ...]) -> TensorEntry:
        if (expert := _EXPERT.fullmatch(name)) is not None:
            count = self._metadata.whole("expert_count")
            every = self._entry(expert[1] + expert[3], (count, *shape))
            size = every.num_bytes // count
            start = every.start + int(expert[2]) * size
            return replace(every, shape=shape, start=start, num_bytes=size)
        theirs = self._name(name)
        entry = self._file.tensors.get(theirs)
        if entry is None:
            raise self._file.error(f"tensor {theirs} is missing; shape {shape} expected")
        if entry.shape != shape:
            raise self._file.error(
                f"tensor {theirs} has shape {entry.shape}; its metadata asks for {shape}"
            )
        return entry

    def _is_rotated(self, name: str) -> bool:
        return self._pairs_rows and name.rpartition(".")[0].endswith(_ROTATED)

    def _order(self, name: str, rows: int) -> torch.Tensor:
        """Which row of the file is each row of Hugging Face's matrix."""
        head_dim = self._metadata.head_dim
        return torch.arange(rows).view(-1, head_dim // 2, 2).transpose(1, 2).flatten()
