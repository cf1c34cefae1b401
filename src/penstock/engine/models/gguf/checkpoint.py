"""A GGUF file, or a split one, as a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gguf.constants import PoolingType

from penstock.core.types import Pooling
from penstock.engine.models.checkpoint import Checkpoint, CheckpointError, ModelDescription, Tensors
from penstock.engine.models.gguf.file import open_gguf

_POOLING: dict[Any, Pooling] = {
    PoolingType.MEAN: "mean", PoolingType.CLS: "cls", PoolingType.LAST: "last",
}  # fmt: skip
"""Poolings of embedding models; a reranker's (4) is none."""


class GgufCheckpoint(Checkpoint):
    """Configuration, weights, tokenizer and chat template from one file or its parts.

    Reading the tokenizer alone does not import PyTorch, which takes a second."""

    def description(self) -> ModelDescription:
        from penstock.engine.models.gguf.config import config_json, end_token_ids

        file = open_gguf(self.path)
        return ModelDescription(self.path, config_json(file), end_token_ids(file))

    @contextmanager
    def tensors(self) -> Iterator[Tensors]:
        from penstock.engine.models.gguf.tensors import GgufTensors

        file = open_gguf(self.path)
        tensors = GgufTensors(file)
        yield tensors
        tensors.check_all_known()
        file.drop_pages()

    def head(self) -> dict[str, Any] | None:
        try:
            file = open_gguf(self.path)
            if file.metadata.get("general.architecture") == "gemma4-assistant":
                return self.description().content
            names = file.tensors
        except (CheckpointError, OSError):
            return None  # whoever reads it says why
        return {} if any(name.endswith(".nextn.eh_proj.weight") for name in names) else None

    def pooling(self) -> Pooling | None:
        metadata = open_gguf(self.path).metadata
        return _POOLING.get(metadata.get(f"{metadata.get('general.architecture')}.pooling_type"))

    def tokenizer_source(self) -> bytes:
        file, digest = open_gguf(self.path), hashlib.sha256()
        for key in sorted(file.keys("tokenizer.ggml.")):
            raw = file.raw(key)
            digest.update(f"{key} {len(raw)} ".encode() + raw)
        return digest.digest()

    def tokenizer(self) -> Any:
        from penstock.engine.models.gguf.tokenizer import fast_tokenizer

        return fast_tokenizer(open_gguf(self.path))
