"""Checkpoints: a folder or a GGUF file, with one interface and Hugging Face's names."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from penstock.core.types import Pooling
    from penstock.engine.models.quantized import QuantizedMatrix

GGUF_MAGIC = b"GGUF"
_GGUF_SUFFIX = ".gguf"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
LM_HEAD = "lm_head.weight"
HEAD_PROJECTION = "mtp.fc.weight"
"""Tensor of a head for multi-token prediction."""
GLM_HEAD = ".eh_proj.weight"
"""The end of its name in GLM's folders."""
EAGLE3 = "LlamaForCausalLMEagle3"
"""Architecture of a folder with an EAGLE-3 head."""
ASSISTANTS = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
"""Architectures of small models that draft from a target's states, keys and values."""
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.\w+$")
"""Suffix of the parts of a split model."""


class CheckpointError(ValueError):
    """Unusable checkpoint; the message is one line with the path and the allowed values."""

    def __init__(self, message: str) -> None:
        # Names in it may come from a file, so unprintable characters are escaped.
        super().__init__("".join(c if c.isprintable() else ascii(c).strip("'") for c in message))


def one_line(error: BaseException) -> str:
    """Return a library's message on one line."""
    return " ".join(str(error).split()) or type(error).__name__


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Model description of a checkpoint.

    file:          file that errors name
    content:       fields as in config.json
    eos_token_ids: end-of-text ids beside those of `content`"""

    file: Path
    content: dict[str, Any]
    eos_token_ids: tuple[int, ...] = ()


class Tensors(Protocol):
    """Tensors of a checkpoint by Hugging Face's names; mapped, and read one at a time."""

    def has(self, name: str) -> bool: ...

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Check a tensor before memory is allocated for it.

        Raises CheckpointError where it is missing or misshapen. Grouped integers are checked on
        reading."""
        ...

    def read(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` with a tensor of its shape, converted to its type.

        Raises CheckpointError where it is missing, misshapen or of an unsupported type."""
        ...

    def quantized(self, name: str, shape: tuple[int, ...]) -> QuantizedMatrix | None:
        """Return a quantised matrix as stored; None for floats. Raises as `read`."""
        ...


class Checkpoint(ABC):
    """Description, tensors and tokenizer of a model. All methods raise CheckpointError."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def description(self) -> ModelDescription: ...

    @abstractmethod
    def tensors(self) -> AbstractContextManager[Tensors]: ...

    def head(self) -> dict[str, Any] | None:
        """Return config.json of an EAGLE-3 head or an assistant; of another head nothing.

        None where there is none. Read without PyTorch, but for an assistant's GGUF file."""
        return None

    @abstractmethod
    def pooling(self) -> Pooling | None:
        """Return how an embedding model's prompts are pooled; None of any other model.

        Read without PyTorch."""

    @abstractmethod
    def tokenizer_source(self) -> bytes:
        """Return a digest of the tokenizer's source: equal digests mean equal tokenizers.

        Cheaper than loading the tokenizer. Equal tokenizers of different formats have different
        digests."""

    @abstractmethod
    def tokenizer(self) -> Any:
        """Return a fast tokenizer of transformers, or an equivalent, with its chat template."""


def is_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF file, by its name or content."""
    if path.suffix.lower() == _GGUF_SUFFIX:
        return not path.is_dir()
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError:
        return False


def part_names(path: Path) -> list[Path]:
    """Return all files of a split model, the first one first, by any of them; else `path`."""
    named = _PART.search(path.name)
    if named is None or not 1 <= int(named[1]) <= int(named[2]):
        return [path]
    stem, digits, suffix = path.name[: named.start()], named[2], path.name[named.end(2) :]
    numbers = range(1, int(digits) + 1)
    return [path.with_name(f"{stem}-{number:05d}-of-{digits}{suffix}") for number in numbers]
