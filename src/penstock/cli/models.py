"""Resolution of models: checkpoints, or names of bundled ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.config import (
    LOOK_UPS,
    NGRAM,
    SUFFIX,
    ConfigError,
    DrafterParts,
    each_once,
    model_name,
)
from penstock.engine.models.checkpoint import is_gguf, part_names
from penstock.zoo.registry import DEFAULT_DRAFTER, DEFAULT_TARGET, ModelCard, bundled_models

_TINY_BYTES = 128 << 20
"""Files of a model up to which its steps take a few milliseconds."""


def with_models(engine: dict[str, Any]) -> dict[str, Any]:
    """Return the settings `engine` with target and drafters resolved. Raises: ConfigError.

    The default target is bundled. A bundled target without drafters gets all bundled drafters and
    n-gram look-up. With a target that is not tiny, and not vLLM's, look-up comes before every
    model, and is the drafter where none is given.
    """
    target = str(engine.get("target") or DEFAULT_TARGET)
    path = _target_path(target)
    is_added = not _is_tiny(path) and engine.get("vllm") is None
    look_up = engine.get("look_up", SUFFIX if is_added else "none")
    if "drafters" in engine:
        given = settings_in(engine["drafters"], "engine.drafters")
        drafters = {name: _drafter_path(name, str(path)) for name, path in given.items()}
    else:
        drafters = _drafters_of(target)
        if not drafters and look_up in LOOK_UPS:
            drafters = {look_up: look_up}
    return {**engine, "target": path, "drafters": drafters, "look_up": look_up}


def checkpoint_folder(model: str) -> Path:
    """Return the path of a bundled model, or `model` if that exists. Raises: ConfigError."""
    path = Path(model)
    if path.exists():
        return path
    cards = {**_cards("target"), **_cards("drafter")}
    if model not in cards:
        raise ConfigError(
            f"model {model!r} is neither a checkpoint folder nor bundled; bundled are "
            f"{', '.join(cards)}"
        )
    return cards[model].path


def settings_in(value: Any, where: str) -> dict[str, Any]:
    """Return a part of a configuration; null is empty. Raises: ConfigError if not a mapping."""
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"{where} must be a mapping of settings", tuple(where.split(".")))
    return value or {}


def drafter_checkpoint(model: str | None) -> tuple[str, Path]:
    """Return name and checkpoint of a draft server's drafter. Raises: ConfigError.

    N-gram look-up uses the tokenizer of the bundled family.
    """
    if model not in (None, NGRAM) and DrafterParts.from_path(str(model)).look_up is not None:
        raise ConfigError(f"a draft server drafts with one model or with {NGRAM}, not {model!r}")
    if model == NGRAM:
        return NGRAM, Path(_drafter_path(NGRAM, DEFAULT_DRAFTER))
    path = Path(_drafter_path(model or DEFAULT_DRAFTER, model or DEFAULT_DRAFTER))
    return model_name(path.resolve()), path


def _cards(role: str) -> dict[str, ModelCard]:
    try:
        return {name: card for name, card in bundled_models().items() if card.role == role}
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error


def _is_checkpoint(text: str) -> bool:
    path = Path(text)
    return path.is_dir() or (path.is_file() and is_gguf(path))


def _is_tiny(path: Path) -> bool:
    """Return whether a step of the model takes no longer than looking up for its requests."""
    files = part_names(path) if path.is_file() else path.iterdir()
    return sum(file.stat().st_size for file in files if file.is_file()) < _TINY_BYTES


def _target_path(text: str) -> Path:
    if _is_checkpoint(text):
        return Path(text)
    targets = _cards("target")
    if text not in targets:
        raise ConfigError(
            f"target {text!r} is neither a checkpoint folder, a GGUF file nor a bundled target; "
            f"bundled are {', '.join(targets)}",
            ("engine", "target"),
        )
    return targets[text].path


def _drafters_of(target: str) -> dict[str, str]:
    """Return all drafters of a bundled target, the default first; none of any other target."""
    if _is_checkpoint(target):
        return {}
    cards = _cards("drafter")
    names = sorted(cards, key=lambda name: name != DEFAULT_DRAFTER)
    return {**{name: str(cards[name].path) for name in names}, NGRAM: NGRAM}


def named_drafters(options: Sequence[str]) -> dict[str, str]:
    """Parse `--drafter` options: NAME=PATH, or NAME as both. Raises: ConfigError."""
    parted = (option.partition("=") for option in options)
    pairs = ((name, path if given else name) for name, given, path in parted)
    return each_once(pairs, "--drafter")


def _drafter_path(name: str, path: str) -> str:
    parts = DrafterParts.from_path(path)
    model = parts.model
    if model is None or _is_checkpoint(model):
        return path
    cards = _cards("drafter")
    if model not in cards:
        raise ConfigError(
            f"drafter {name!r}: {model!r} is neither a checkpoint folder, a GGUF file nor a "
            f"bundled drafter; bundled are {', '.join(cards)}, {' and '.join(LOOK_UPS)}",
            ("engine", "drafters", name),
        )
    return parts.with_model(str(cards[model].path))
