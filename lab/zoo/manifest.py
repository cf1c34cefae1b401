"""The manifest of a folder of models, written and checked."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from penstock.zoo.registry import MANIFEST, WEIGHTS, ModelCard, bundled_models, manifest


def _digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def heads_of(target: str, weights: Path = WEIGHTS) -> list[ModelCard]:
    """Return the cards of a bundled target's heads. Raises: FileNotFoundError."""
    cards = bundled_models(weights).values()
    return [card for card in cards if card.role == "head" and card.name.startswith(f"{target}-")]


def write_manifest(weights: Path, cards: dict[str, dict[str, Any]]) -> None:
    """Write the manifest of `weights`: for each model its card and its files' digests."""
    models = {}
    for name, card in cards.items():
        files = sorted(p for p in (weights / name).iterdir() if p.is_file())
        models[name] = {**card, "files": {p.name: _digest(p) for p in files}}
    path = weights / MANIFEST
    path.write_text(json.dumps({"format": 1, "models": models}, indent=2) + "\n")


def verify_manifest(weights: Path = WEIGHTS) -> list[str]:
    """Files that are missing or differ from the manifest, as ``model/file``; empty if none."""
    wrong = []
    for name, entry in manifest(weights)["models"].items():
        for file, expected in entry["files"].items():
            path = weights / name / file
            if not path.exists() or _digest(path) != expected:
                wrong.append(f"{name}/{file}")
    return wrong
