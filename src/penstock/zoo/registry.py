"""What is bundled: model cards, prompts and the manifest. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

DOMAINS: tuple[str, ...] = (
    "instruction",
    "roleplay",
    "summary",
    "qa",
    "chat",
    "math",
    "sql",
    "entropy",
)
"""The eight domains, each standing for one data set of the Spin paper."""

DEFAULT_TARGET = "target-large"
DEFAULT_DRAFTER = "draft-tiny"

WEIGHTS = Path(__file__).parent / "weights"
DATA = Path(__file__).parent / "data"
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One bundled model."""

    name: str
    role: Literal["target", "drafter"]
    path: Path
    parameters: int
    description: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request: `prompt` is in template form and ends with ``<|assistant|>``."""

    prompt: str
    domain: str
    reference: str


def _manifest(weights: Path) -> dict[str, Any]:
    path = weights / MANIFEST
    if not path.exists():
        raise FileNotFoundError(f"no bundled models in {weights}: run `penstock zoo train`")
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def bundled_models(weights: Path = WEIGHTS) -> dict[str, ModelCard]:
    """Cards of the models in `weights` by name, targets first.

    Raises:
        FileNotFoundError: there is no manifest.
    """
    return {
        name: ModelCard(
            name, entry["role"], weights / name, entry["parameters"], entry["description"]
        )
        for name, entry in _manifest(weights)["models"].items()
    }


def model_path(name: str, weights: Path = WEIGHTS) -> Path:
    """Folder of a bundled model in Hugging Face layout.

    Raises:
        KeyError: no bundled model has that name; the message lists those there are.
    """
    models = bundled_models(weights)
    if name not in models:
        raise KeyError(f"no bundled model {name!r}; there are {', '.join(models)}")
    return models[name].path


def load_prompts(domain: str, data: Path = DATA) -> list[Prompt]:
    """The shipped prompts of `domain`, which no model was trained on.

    Raises:
        KeyError: there is no such domain.
    """
    if domain not in DOMAINS:
        raise KeyError(f"no domain {domain!r}; there are {', '.join(DOMAINS)}")
    text = (data / "prompts" / f"{domain}.jsonl").read_text(encoding="utf-8")
    return [Prompt(**json.loads(line)) for line in text.splitlines()]


def digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_manifest(weights: Path, cards: dict[str, dict[str, Any]]) -> None:
    """Write the manifest of `weights`: for each model its card and its files' digests."""
    models = {}
    for name, card in cards.items():
        files = sorted(p for p in (weights / name).iterdir() if p.is_file())
        models[name] = {**card, "files": {p.name: digest(p) for p in files}}
    path = weights / MANIFEST
    path.write_text(json.dumps({"format": 1, "models": models}, indent=2) + "\n")


def verify_manifest(weights: Path = WEIGHTS) -> list[str]:
    """Files that are missing or differ from the manifest, as ``model/file``; empty if none."""
    wrong = []
    for name, entry in _manifest(weights)["models"].items():
        for file, expected in entry["files"].items():
            path = weights / name / file
            if not path.exists() or digest(path) != expected:
                wrong.append(f"{name}/{file}")
    return wrong
