"""Where a model lies: a folder or a GGUF file, in one view and under Hugging Face's names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from penstock.engine.models.quantized import QuantizedMatrix

GGUF_MAGIC = b"GGUF"
_GGUF_SUFFIX = ".gguf"


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message is one line naming the path and what is allowed."""

    def __init__(self, message: str) -> None:
        # Names in it may come from a file.
        super().__init__("".join(c if c.isprintable() else ascii(c).strip("'") for c in message))


def one_line(error: BaseException) -> str:
    """A library's message, folded onto one line."""
    return " ".join(str(error).split()) or type(error).__name__


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What a checkpoint says of its model.

    file:          what errors name
    content:       as config.json has it
    eos_token_ids: ids that end a text beside those of `content`
    """

    file: Path
    content: dict[str, Any]
    eos_token_ids: tuple[int, ...] = ()


class Tensors(Protocol):
    """A checkpoint's tensors by Hugging Face's names; mapped, and read one at a time."""

    def has(self, name: str) -> bool: ...

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Before memory is taken for it. Raises CheckpointError where it is missing or misshapen;
        of integers in groups only reading tells."""
        ...

    def read(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` with a tensor of its shape, converted to its type.

        Raises CheckpointError where it is missing, misshapen or of a type that is not read.
        """
        ...

    def quantized(self, name: str, shape: tuple[int, ...]) -> QuantizedMatrix | None:
        """A matrix as the file has it; None for one of floats. Raises: as `read`."""
        ...


class Checkpoint(ABC):
    """A model's description, tensors and tokenizer. All methods raise CheckpointError."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def description(self) -> ModelDescription: ...

    @abstractmethod
    def tensors(self) -> AbstractContextManager[Tensors]: ...

    @abstractmethod
    def tokenizer_source(self) -> bytes:
        """A digest of what the tokenizer is made from: where it is equal, so are the tokenizers.

        It takes a small part of the time. Equal tokenizers of unlike formats differ in it.
        """

    @abstractmethod
    def tokenizer(self) -> Any:
        """A fast tokenizer of transformers, or what does the same, with the chat template if there
        is one."""


def is_gguf(path: Path) -> bool:
    """Whether a path is a GGUF file's, by its content; or by its name, whatever is there."""
    if path.suffix.lower() == _GGUF_SUFFIX:
        return not path.is_dir()
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError:
        return False
