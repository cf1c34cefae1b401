"""The bundled family: model cards and prompts. Imports no torch."""

from __future__ import annotations

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
"""Domains, each in place of one data set of the Spin paper."""

DEFAULT_TARGET = "target-large"
DEFAULT_DRAFTER = "draft-tiny"

WEIGHTS = Path(__file__).parent / "weights"
DATA = Path(__file__).parent / "data"
MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One bundled model; a head belongs to the target with which its name begins."""

    name: str
    role: Literal["target", "drafter", "head"]
    path: Path
    parameters: int
    description: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt in template form, which ends with ``<|assistant|>``, with its reference answer."""

    prompt: str
    domain: str
    reference: str


def manifest(weights: Path = WEIGHTS) -> dict[str, Any]:
    """Return the manifest: card and digests of each model. Raises: FileNotFoundError."""
    path = weights / MANIFEST
    if not path.exists():
        raise FileNotFoundError(f"no bundled models in {weights}: run `penstock zoo train`")
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def bundled_models(weights: Path = WEIGHTS) -> dict[str, ModelCard]:
    """Return the cards of the models by name, targets first. Raises: FileNotFoundError."""
    return {
        name: ModelCard(
            name, entry["role"], weights / name, entry["parameters"], entry["description"]
        )
        for name, entry in manifest(weights)["models"].items()
    }


def model_path(name: str, weights: Path = WEIGHTS) -> Path:
    """Return the Hugging Face folder of a bundled model. Raises: KeyError for an unknown name."""
    models = bundled_models(weights)
    if name not in models:
        raise KeyError(f"no bundled model {name!r}; there are {', '.join(models)}")
    return models[name].path


def load_prompts(domain: str, data: Path = DATA) -> list[Prompt]:
    """Return the prompts of `domain`, on which no model was trained. Raises: KeyError."""
    if domain not in DOMAINS:
        raise KeyError(f"no domain {domain!r}; there are {', '.join(DOMAINS)}")
    text = (data / "prompts" / f"{domain}.jsonl").read_text(encoding="utf-8")
    return [Prompt(**json.loads(line)) for line in text.splitlines()]
