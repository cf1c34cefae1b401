"""A checkpoint folder in Hugging Face layout: config.json, safetensors, tokenizer.json."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from penstock.engine.models.checkpoint import (
    Checkpoint,
    CheckpointError,
    ModelDescription,
    Tensors,
    one_line,
)
from penstock.engine.models.config import DTYPES, token_ids
from penstock.engine.models.families import TEXT_PARTS
from penstock.engine.models.packed import GroupedMatrix, PackedFormat, packed_format
from penstock.engine.models.quantized import QuantizedMatrix

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_log = logging.getLogger(__name__)

_SHARED = (
    "dtype",
    "torch_dtype",
    "eos_token_id",
    "tie_word_embeddings",
    "quantization_config",
)
"""Keys that stand above text_config."""

_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
"""Both spellings of a text part's tensors, old and new."""


class FolderCheckpoint(Checkpoint):
    """Weights in one safetensors file, or in shards with an index, floats or quantised; no hub is
    ever asked."""

    def description(self) -> ModelDescription:
        file, generation = self.path / "config.json", self.path / "generation_config.json"
        content = _text_part(file, _read_json(file))
        if self._packed_format(content) is not None:
            content = {k: v for k, v in content.items() if k != "quantization_config"}
        ends = _read_json(generation).get("eos_token_id") if generation.exists() else None
        return ModelDescription(file, content, token_ids(ends))

    @contextmanager
    def tensors(self) -> Iterator[Tensors]:
        with ExitStack() as stack:
            packed = self._packed_format(_read_json(self.path / "config.json"))
            yield _Safetensors(self.path, stack, packed)

    def tokenizer_source(self) -> bytes:
        self._require_tokenizer()
        digest = hashlib.sha256()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            file = self.path / name
            content = file.read_bytes() if file.is_file() else b""
            digest.update(len(content).to_bytes(8, "little") + content)
        # Which class reads them.
        digest.update(repr(_read_json(self.path / "config.json").get("model_type")).encode())
        return digest.digest()

    def tokenizer(self) -> Any:
        path = self.path
        self._require_tokenizer()
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        except Exception as error:
            raise CheckpointError(
                f"{path}: tokenizer cannot be read ({one_line(error)})"
            ) from error
        if not tokenizer.is_fast:
            raise CheckpointError(f"{path}: {type(tokenizer).__name__} is not a fast tokenizer")
        return tokenizer

    def _packed_format(self, content: dict[str, Any]) -> PackedFormat | None:
        config = content.get("quantization_config")
        if not config:
            return None
        try:
            return packed_format(config)
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{self.path / 'config.json'}: quantization_config: {one_line(error)}"
            ) from error

    def _require_tokenizer(self) -> None:
        if not (self.path / "tokenizer.json").is_file():
            raise CheckpointError(f"{self.path}: has no tokenizer.json; a fast tokenizer is needed")


class _Safetensors:
    """Files are opened once and mapped, not read."""

    def __init__(self, path: Path, stack: ExitStack, packed: PackedFormat | None) -> None:
        self._path = path
        self._stack = stack
        self._packed = packed
        self._has_warned = False
        self._open: dict[Path, Any] = {}
        self._file_of = self._locate()
        self._names = {_text_name(name): name for name in self._file_of}

    def has(self, name: str) -> bool:
        return name in self._names

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        if not self._is_grouped(name, shape):
            self._stored(name, shape)

    def read(self, name: str, out: torch.Tensor) -> None:
        grouped = self._grouped(name, tuple(out.shape))
        if grouped is not None:
            out.copy_(grouped.values())
            return
        tensor = self._stored(name, tuple(out.shape))
        if tensor.dtype not in DTYPES:
            allowed = ", ".join(map(str, DTYPES))
            raise CheckpointError(
                f"{self._file_of[self._names[name]]}: tensor {name} is {tensor.dtype}; "
                f"allowed: {allowed}"
            )
        out.copy_(tensor)

    def _stored(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in self._names:
            raise CheckpointError(f"{self._path}: tensor {name} is missing; shape {shape} expected")
        name = self._names[name]
        file = self._file_of[name]
        try:
            tensor: torch.Tensor = self._handle(file).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{file}: tensor {name}: {one_line(error)}") from error
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{file}: tensor {name} has shape {tuple(tensor.shape)}; "
                f"config.json asks for {shape}"
            )
        return tensor

    def quantized(self, name: str, shape: tuple[int, ...]) -> QuantizedMatrix | None:
        grouped = self._grouped(name, shape)
        if grouped is None or self._packed is None:
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

    def _grouped(self, name: str, shape: tuple[int, ...]) -> GroupedMatrix | None:
        """A matrix that is quantised; None for any other tensor."""
        packed = self._packed
        if packed is None or not self._is_grouped(name, shape):
            return None
        module = name.removesuffix(".weight")
        try:
            return packed.read(module, (shape[0], shape[1]), self._stored, self.has)
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


def _text_part(file: Path, content: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the text part, where a model reads images, too."""
    whole = next((name for name in TEXT_PARTS if content.get("architectures") == [name]), None)
    if whole is None:
        return content
    text = content.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError(f"{file}: has no text_config, which {whole} needs")
    shared = {key: content[key] for key in _SHARED if content.get(key) is not None}
    return {**text, **shared, "architectures": [TEXT_PARTS[whole]]}


def _text_name(name: str) -> str:
    """A tensor's name in the text part by itself."""
    for prefix, of_text in _PREFIXES.items():
        if name.startswith(prefix):
            return of_text + name.removeprefix(prefix)
    return name


def _read_json(file: Path) -> dict[str, Any]:
    if not file.parent.is_dir():
        raise CheckpointError(f"{file.parent}: no such folder; a checkpoint folder is expected")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"{file}: not valid JSON ({one_line(error)})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: must hold a JSON object")
    return content
