"""Well-known small models of the hub that draft for larger ones of their family.

A pair is a hint: only equal tokenizers make it one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from penstock.engine.models.checkpoint import CheckpointError, is_gguf


class SmallModel(NamedTuple):
    """A drafter by its name on the hub, and about its size. A GGUF file's name has a `:QUANT`."""

    name: str
    gigabytes: float


FAMILIES: dict[str, tuple[SmallModel, ...]] = {
    r"qwen2\.5-coder": (
        SmallModel("Qwen/Qwen2.5-Coder-0.5B-Instruct", 1.0),
        SmallModel("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF:Q8_0", 0.6),
    ),
    r"qwen2\.5": (
        SmallModel("Qwen/Qwen2.5-0.5B-Instruct", 1.0),
        SmallModel("Qwen/Qwen2.5-0.5B-Instruct-GGUF:Q8_0", 0.6),
    ),
    r"qwen3(?![.\d])": (
        SmallModel("Qwen/Qwen3-0.6B", 1.5),
        SmallModel("Qwen/Qwen3-0.6B-GGUF:Q8_0", 0.7),
    ),
    r"llama-?3": (
        SmallModel("unsloth/Llama-3.2-1B-Instruct", 2.5),
        SmallModel("unsloth/Llama-3.2-1B-Instruct-GGUF:Q4_K_M", 0.8),
    ),
    r"gemma-?3(?!n)": (
        SmallModel("unsloth/gemma-3-270m-it", 0.6),
        SmallModel("unsloth/gemma-3-270m-it-GGUF:Q8_0", 0.3),
    ),
    r"smollm2": (
        SmallModel("HuggingFaceTB/SmolLM2-135M-Instruct", 0.3),
        SmallModel("bartowski/SmolLM2-135M-Instruct-GGUF:Q8_0", 0.2),
    ),
    r"mistral-(small|nemo)|devstral": (
        SmallModel("alamios/Mistral-Small-3.1-DRAFT-0.5B", 1.0),
        SmallModel("bartowski/alamios_Mistral-Small-3.1-DRAFT-0.5B-GGUF:Q8_0", 0.6),
    ),
    r"phi-4(?!-mini)": (SmallModel("rdsm/QwenPhi-4-0.5b-Draft", 1.0),),
}
"""Small models by a pattern of their family's names, the special families first."""

_GGUF_NAMES = re.compile(r"general\.(name|basename|base_model\.\d+\.(name|repo_url))")


def small_models(target: Path, name: str) -> list[SmallModel]:
    """Return small models of a target's family, those of its own format first.

    name: as the user gave it."""
    named = re.sub(r"[ _-]+", "-", " ".join([name, *_own_names(target)])).lower()
    found = next((models for family, models in FAMILIES.items() if re.search(family, named)), ())
    return sorted(found, key=lambda model: (":" in model.name) != is_gguf(target))


def _own_names(target: Path) -> Iterator[str]:
    """Yield names in the metadata of a checkpoint; none of an unreadable one."""
    if not is_gguf(target):
        try:
            yield str(json.loads((target / "config.json").read_bytes()).get("_name_or_path"))
        except (OSError, ValueError, AttributeError):
            return
    else:
        from penstock.engine.models.gguf.file import GgufFile

        try:
            metadata = GgufFile(target).metadata
        except CheckpointError:
            return
        yield from (str(v) for key, v in metadata.items() if _GGUF_NAMES.fullmatch(key))
