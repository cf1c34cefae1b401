"""Drafters that a target gets without naming them: its head, its assistant or a small model."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from penstock.engine.memory import MEMORY_SHARE, free_memory, model_bytes
from penstock.engine.models.checkpoint import CheckpointError, is_gguf
from penstock.engine.models.formats import open_checkpoint
from penstock.engine.models.hub import HubName, Say, cached, fetch
from penstock.engine.models.pairs import SmallModel, small_models

_SMALLER = 2
"""Times that a target must be as large as a drafter, in bytes: a choice."""


def own_head(target: Path, name: str) -> dict[str, str]:
    """Return name and path of a target's head, or of its assistant if that is here, or nothing.

    name: of the target, as the user gave it."""
    if open_checkpoint(target).head() == {}:
        return {"mtp": "mtp"}
    found = assistant_beside(target, name)
    return {} if found is None else {"assistant": str(found)}


def assistant_beside(target: Path, name: str) -> Path | None:
    """Return a target's assistant where publishers put it, if it is here and fits.

    That is a file `mtp-*.gguf` beside a GGUF file, else a folder, or a model of the hub, that is
    called as the target with `-assistant` behind it."""
    hub = None if Path(name).exists() else HubName.parse(f"{name.partition('@')[0]}-assistant")
    if is_gguf(target):
        known: list[Path | None] = [*sorted(target.parent.glob("mtp-*.gguf"))]
    else:
        known = [target.with_name(f"{target.name}-assistant") if hub is None else cached(hub)]
    return next((path for path in known if path is not None and _assists(path, target)), None)


def _assists(path: Path, target: Path) -> bool:
    with suppress(CheckpointError):
        content = open_checkpoint(path).head() or {}
        if size := content.get("backbone_hidden_size"):
            return bool(open_checkpoint(target).description().content.get("hidden_size") == size)
    return False


def cached_drafter(target: Path, name: str) -> tuple[SmallModel, Path] | None:
    """Return a cached small model that suits a target and has its tokenizer, and its path.

    name: of the target, as the user gave it."""
    for model in small_models(target, name):
        path = cached(_name(model))
        if path is not None and _suits(target, model_bytes(path)) and _reads_alike(target, path):
            return model, path
    return None


def automatic_drafter(target: Path, name: str, say: Say, *, download: bool) -> dict[str, str]:
    """Return name and path of a target's drafter, or nothing, and say which or why none.

    download: get one that is not in the cache. Raises ConfigError."""
    found = cached_drafter(target, name)
    if found is not None:
        say(f"{found[0].name} drafts; it was in the cache")
        return _entry(*found)
    known = small_models(target, name)
    fitting = [model for model in known if _suits(target, int(model.gigabytes * 1e9))]
    absent = [model for model in fitting if cached(_name(model)) is None]
    if not absent:
        if download:
            why = "that is known fits" if known else "is known"
            say(f"{name}: no small model of its family {why}; --drafter NAME=MODEL names one")
        return {}
    model = absent[0]
    if not download:
        say(f"{model.name} would help as a drafter: --drafter auto fetches it")
        return {}
    path = fetch(_name(model), say)
    if not _reads_alike(target, path):
        say(f"{model.name} has another tokenizer than {name}, so it does not draft")
        return {}
    say(f"{model.name} drafts")
    return _entry(model, path)


def _name(model: SmallModel) -> HubName:
    name = HubName.parse(model.name)
    assert name is not None
    return name


def _entry(model: SmallModel, path: Path) -> dict[str, str]:
    return {_name(model).repo.partition("/")[2]: str(path)}


def _suits(target: Path, num_bytes: int) -> bool:
    """Return whether a drafter of this size is small beside the target, and fits in memory."""
    beside = model_bytes(target)
    fits = beside + num_bytes <= MEMORY_SHARE * free_memory()
    return fits and _SMALLER * num_bytes <= beside


def _reads_alike(target: Path, drafter: Path) -> bool:
    from penstock.engine.tokenizer import unlike_tokenizers

    try:
        return unlike_tokenizers(target, drafter) is None
    except CheckpointError:
        return False
