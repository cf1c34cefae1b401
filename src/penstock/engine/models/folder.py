"""Checkpoint folder in Hugging Face layout: config.json, safetensors, tokenizer.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.core.types import Pooling
from penstock.engine.models.checkpoint import (
    ASSISTANTS,
    EAGLE3,
    GLM_HEAD,
    HEAD_PROJECTION,
    INDEX_FILE,
    LM_HEAD,
    SINGLE_FILE,
    Checkpoint,
    CheckpointError,
    ModelDescription,
    Tensors,
    one_line,
)
from penstock.engine.models.fields import token_ids

if TYPE_CHECKING:
    from penstock.engine.models.packed import PackedFormat

_SHARED = (
    "dtype",
    "torch_dtype",
    "eos_token_id",
    "tie_word_embeddings",
    "quantization_config",
)
"""Keys of a multimodal config.json that stand beside text_config."""

_POOLING: dict[str, Pooling] = {
    "lasttoken": "last", "mean": "mean", "mean_tokens": "mean", "cls": "cls", "cls_token": "cls",
    # The same but for a factor, and an embedding has length 1.
    "mean_sqrt_len_tokens": "mean",
}  # fmt: skip
"""Poolings by sentence-transformers' names, older and newer ones."""

_AS_WRITTEN = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes, two names of one, that read tokenizer.json without changes."""


class FolderCheckpoint(Checkpoint):
    """Weights in one safetensors file or in shards with an index, floats or quantised.

    Nothing is downloaded. Reading the tokenizer alone does not import PyTorch."""

    def description(self) -> ModelDescription:
        file, generation = self.path / "config.json", self.path / "generation_config.json"
        content = _text_part(file, _read_json(file))
        if self.pooling() is not None:
            content = _with_output(content, has_own=LM_HEAD in self._tensor_names())
        if self._packed_format(content) is not None:
            content = {k: v for k, v in content.items() if k != "quantization_config"}
        ends = _read_json(generation).get("eos_token_id") if generation.exists() else None
        return ModelDescription(file, content, token_ids(ends))

    @contextmanager
    def tensors(self) -> Iterator[Tensors]:
        from penstock.engine.models.folder_tensors import FolderTensors

        with ExitStack() as stack:
            config = self.path / "config.json"
            packed = self._packed_format(_read_json(config)) if config.exists() else None
            yield FolderTensors(self.path, stack, packed)

    def head(self) -> dict[str, Any] | None:
        names = self._tensor_names()
        if any(name == HEAD_PROJECTION or name.endswith(GLM_HEAD) for name in names):
            return {}
        with suppress(CheckpointError):  # whoever reads it says why
            content = _read_json(self.path / "config.json")
            known = [[name] for name in (EAGLE3, *ASSISTANTS)]
            return content if content.get("architectures") in known else None
        return None

    def pooling(self) -> Pooling | None:
        modules = self.path / "modules.json"
        if not modules.is_file():
            names = _read_json(self.path / "config.json").get("architectures")
            return "last" if _base_of(names) is not None else None
        return _pooling(modules)

    def _tensor_names(self) -> Collection[str]:
        """Return the names of all tensors; none where the files cannot be read."""
        single = self.path / SINGLE_FILE
        try:
            if not single.is_file():
                return list(json.loads((self.path / INDEX_FILE).read_bytes())["weight_map"])
            with single.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                return list(json.loads(file.read(min(size, single.stat().st_size))))
        except (OSError, ValueError, KeyError, TypeError):
            return ()

    def tokenizer_source(self) -> bytes:
        self._require_tokenizer()
        digest = hashlib.sha256()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            file = self.path / name
            content = file.read_bytes() if file.is_file() else b""
            digest.update(len(content).to_bytes(8, "little") + content)
        # The model type selects the class that reads them.
        digest.update(repr(_read_json(self.path / "config.json").get("model_type")).encode())
        return digest.digest()

    def tokenizer(self) -> Any:
        path = self.path
        self._require_tokenizer()
        try:
            tokenizer = self._tokenizer_class().from_pretrained(path, local_files_only=True)
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
        if isinstance(config, dict) and config.get("quant_method") == "mxfp4":
            return None  # StackedExpert tells it by the tensors' names
        from penstock.engine.models.packed import packed_format

        if not isinstance(config, dict):
            raise CheckpointError(
                f"{self.path / 'config.json'}: quantization_config is {config!r}; must be an object"
            )
        try:
            return packed_format(config)
        except (ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{self.path / 'config.json'}: quantization_config: {one_line(error)}"
            ) from error

    def _tokenizer_class(self) -> Any:
        """Return transformers' class that reads the tokenizer."""
        files = [self.path / name for name in ("config.json", "tokenizer_config.json")]
        model, settings = (_read_json(file) if file.is_file() else {} for file in files)
        is_as_written = settings.get("tokenizer_class") in _AS_WRITTEN
        if model.get("model_type") == "llama" and is_as_written and "auto_map" not in settings:
            # AutoTokenizer would import PyTorch and more for three seconds to choose this class.
            from transformers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast
        from transformers import AutoTokenizer

        return AutoTokenizer

    def _require_tokenizer(self) -> None:
        if not (self.path / "tokenizer.json").is_file():
            raise CheckpointError(f"{self.path}: has no tokenizer.json; a fast tokenizer is needed")


def _pooling(modules: Path) -> Pooling:
    """Return the pooling that the modules of sentence-transformers name. Raises CheckpointError."""
    try:
        listed = json.loads(modules.read_text(encoding="utf-8"))
        paths = {each["type"].rpartition(".")[2]: each["path"] for each in listed}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{modules}: not a list of modules ({one_line(error)})") from error
    if others := sorted(paths.keys() - {"Transformer", "Pooling", "Normalize"}):
        raise CheckpointError(
            f"{modules}: {others[0]} is not computed; allowed: Transformer, Pooling, Normalize"
        )
    if "Pooling" not in paths:
        return "last"
    file = modules.with_name(Path(str(paths["Pooling"])).name) / "config.json"
    content = _read_json(file)
    flags = [k for k, is_on in content.items() if k.startswith("pooling_mode_") and is_on is True]
    named = content.get("pooling_mode", [flag.removeprefix("pooling_mode_") for flag in flags])
    found = {_POOLING.get(str(name)) for name in ([named] if isinstance(named, str) else named)}
    (pooling,) = found if len(found) == 1 else (None,)
    if pooling is None:
        raise CheckpointError(f"{file}: pools by {named}; allowed: one of {', '.join(_POOLING)}")
    return pooling


def _base_of(architectures: Any) -> str | None:
    """Return the usual architecture of a model that was saved without its output matrix."""
    from penstock.engine.models.families import FAMILIES

    name = architectures[0] if isinstance(architectures, list) and architectures else None
    usual = f"{str(name).removesuffix('Model')}ForCausalLM"
    return usual if str(name).endswith("Model") and usual in FAMILIES else None


def _with_output(content: dict[str, Any], *, has_own: bool) -> dict[str, Any]:
    """Return an embedding model's configuration with an output matrix, which is not needed."""
    usual = _base_of(content.get("architectures"))
    content = content if usual is None else {**content, "architectures": [usual]}
    return content if has_own else {**content, "tie_word_embeddings": True}


def _text_part(file: Path, content: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of the text part of a model that also reads images."""
    from penstock.engine.models.families import FAMILIES, TEXT_PARTS

    whole = next((name for name in TEXT_PARTS if content.get("architectures") == [name]), None)
    if whole is None:
        return content
    text = content.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointError(f"{file}: has no text_config, which {whole} needs")
    shared = {key: content[key] for key in _SHARED if content.get(key) is not None}
    known = {family.model_type: name for name, family in FAMILIES.items()}
    architecture = known.get(str(text.get("model_type")), TEXT_PARTS[whole])
    return {**text, **shared, "architectures": [architecture]}


def _number(value: dict[str, Any]) -> Any:
    """Return infinity or NaN as transformers writes them, any other object as it is."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def _read_json(file: Path) -> dict[str, Any]:
    if not file.parent.is_dir():
        raise CheckpointError(f"{file.parent}: no such folder; a checkpoint folder is expected")
    try:
        content = json.loads(file.read_text(encoding="utf-8"), object_hook=_number)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: not valid JSON ({one_line(error)})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: must hold a JSON object")
    return content
