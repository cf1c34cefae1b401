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


def manifest(weights: Path = WEIGHTS) -> dict[str, Any]:
    """The manifest of `weights`: for each model its card and its files' digests.

    Raises:
        FileNotFoundError: there is none.
    """
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
        for name, entry in manifest(weights)["models"].items()
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
