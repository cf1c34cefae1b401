"""Resolution of models: checkpoints, names of bundled ones, or names on the hub."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.cli.drafters import assistant_beside, automatic_drafter, own_head
from penstock.cli.terminal import note
from penstock.config import (
    HEADS,
    LOOK_UPS,
    NGRAM,
    SUFFIX,
    ConfigError,
    DrafterParts,
    Where,
    each_once,
    model_name,
)
from penstock.engine.models.checkpoint import is_gguf
from penstock.engine.models.hub import HubName, Progress, cached, fetch
from penstock.zoo.registry import DEFAULT_DRAFTER, DEFAULT_TARGET, ModelCard, bundled_models

_AUTOMATIC = "auto"
"""In place of a drafter: a small model of the target's family, fetched from the hub."""
_ASSISTANT = "assistant"
"""The same: a target's assistant, where publishers put it."""

_HUB_FORMS = "models of the hub are owner/name[@revision], owner/name:QUANT or owner/name/FILE.gguf"


def with_models(engine: dict[str, Any], *, download: bool = True) -> dict[str, Any]:
    """Return the settings `engine` with target and drafters resolved. Raises: ConfigError.

    The default target is bundled. A bundled target without drafters gets all bundled drafters and
    look-up in the text. With another target, that is not vLLM's, all requests have look-up.

    download: of models on the hub; else a name that is not in the cache stays as it is."""
    say = note if download else lambda line: None
    target = str(engine.get("target") or DEFAULT_TARGET)
    where = ("engine", "target")
    path = _model_path(target, f"target {target!r}", "target", where, download=download)
    is_added = engine.get("vllm") is None and not _drafters_of(target)
    look_up = engine.get("look_up", SUFFIX if is_added else "none")
    if "drafters" in engine:
        drafters: dict[str, Any] = {}
        for name, given in settings_in(engine["drafters"], "engine.drafters").items():
            own = given if isinstance(given, dict) else {"path": given}
            model = str(own.get("path", name))
            if name == model == _ASSISTANT:
                model = str(assistant_beside(path, target) or f"{target}-{_ASSISTANT}")
            if name == model == _AUTOMATIC:
                drafters |= automatic_drafter(path, target, say, download=download)
            else:
                found = _drafter_path(name, model, download, target)
                drafters[name] = {**own, "path": found} if len({*own, "path"}) > 1 else found
    else:
        drafters = _drafters_of(target)
        if not drafters and is_added:
            drafters = own_head(path, target)
            drafters = drafters or automatic_drafter(path, target, say, download=False)
    paths = [given["path"] if isinstance(given, dict) else given for given in drafters.values()]
    is_bare = all(DrafterParts.from_path(path).server for path in paths)
    if is_bare and look_up in LOOK_UPS and engine.get("drafters", True):
        drafters[look_up] = look_up
    return {**engine, "target": path, "drafters": drafters, "look_up": look_up}


def _model_path(text: str, what: str, role: str, where: Where, *, download: bool = True) -> Path:
    """Return the path of a model. what, where: of errors. Raises: ConfigError."""
    if _is_checkpoint(text):
        return Path(text)
    cards = _cards(role)
    found = cards[text].path if text in cards else _hub_path(text, download)
    if found is None:
        others = LOOK_UPS if role == "drafter" else ()
        told = "is no checkpoint folder or GGUF file" if Path(text).exists() else "does not exist"
        raise ConfigError(
            f"{what} {told}; bundled {role}s are {', '.join([*cards, *others])}; {_HUB_FORMS}",
            where,
        )
    return found


def label_of(target: str) -> str:
    """Return the name of one of several models: of a path its last part, else the text itself."""
    path = Path(target)
    return model_name(Path(os.path.abspath(path))) if path.exists() else target


def fetched(name: str, progress: Progress) -> Path:
    """Return a bundled target's path, or that of a model of the hub, which is downloaded.

    No other path is looked at: the name is a client's. Raises: ConfigError."""
    cards, parsed = _cards("target"), HubName.parse(name)
    if name in cards:
        return cards[name].path
    if parsed is None:
        raise ConfigError(f"{name!r} is no model; bundled are {', '.join(cards)}; {_HUB_FORMS}")
    return fetch(parsed, note, progress)


def hub_name(text: str) -> HubName | None:
    """Return the parsed name of a model on the hub; None for others. A local path comes first."""
    return None if Path(text).exists() else HubName.parse(text)


def _hub_path(text: str, download: bool = True) -> Path | None:
    """Return the path of a model on the hub; None for other texts. Raises: ConfigError."""
    name = hub_name(text)
    if name is None:
        return None
    return fetch(name, note) if download else cached(name) or Path(text)


def settings_in(value: Any, where: str) -> dict[str, Any]:
    """Return a part of a configuration; null is empty. Raises: ConfigError if not a mapping."""
    if value is not None and not isinstance(value, dict):
        raise ConfigError(f"{where} must be a mapping of settings", tuple(where.split(".")))
    return value or {}


def drafter_checkpoint(model: str | None) -> tuple[str, Path]:
    """Return name and checkpoint of a draft server's drafter. Raises: ConfigError.

    N-gram look-up uses the tokenizer of the bundled family.
    """
    if model not in (None, NGRAM) and DrafterParts.from_path(str(model)).model != model:
        raise ConfigError(f"a draft server drafts with one model or with {NGRAM}, not {model!r}")
    if model == NGRAM:
        return NGRAM, Path(_drafter_path(NGRAM, DEFAULT_DRAFTER))
    path = Path(_drafter_path(model or DEFAULT_DRAFTER, model or DEFAULT_DRAFTER))
    return model_name(Path(os.path.abspath(path))), path


def _cards(role: str) -> dict[str, ModelCard]:
    try:
        return {name: card for name, card in bundled_models().items() if card.role == role}
    except FileNotFoundError as error:
        raise ConfigError(str(error)) from error


def _is_checkpoint(text: str) -> bool:
    path = Path(text)
    return path.is_dir() or (path.is_file() and is_gguf(path))


def _drafters_of(target: str) -> dict[str, str]:
    """Return all drafters of a bundled target, the default first; none of any other target."""
    if _is_checkpoint(target) or target not in _cards("target"):
        return {}
    cards = _cards("drafter")
    names = sorted(cards, key=lambda name: name != DEFAULT_DRAFTER)
    return {**{name: str(cards[name].path) for name in names}, NGRAM: NGRAM}


def named_drafters(options: Sequence[str]) -> dict[str, str]:
    """Parse `--drafter` options: NAME=PATH, or NAME as both. Raises: ConfigError."""
    parted = (option.partition("=") for option in options)
    pairs = ((name, path if given else name) for name, given, path in parted)
    return each_once(pairs, "--drafter")


def _drafter_path(name: str, path: str, download: bool = True, target: str = "") -> str:
    """Return a drafter's path with the model resolved. target: whose bundled head a head is."""
    role = "head" if name in HEADS else "drafter"
    if role == "head" and path == name:
        own = _cards(role).get(f"{target}-{name}")
        return path if own is None else str(own.path)
    parts = DrafterParts.from_path(path)
    model = parts.model
    if model is None or _is_checkpoint(model):
        return path
    told, where = f"drafter {name!r}: {model!r}", ("engine", "drafters", name)
    return parts.with_model(str(_model_path(model, told, role, where, download=download)))
