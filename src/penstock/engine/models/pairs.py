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


FAMILIES: dict[str, dict[str, float]] = json.loads(Path(__file__).with_suffix(".json").read_text())
"""Small models and gigabytes by a pattern of their family's names, the special families first."""

_GGUF_NAMES = re.compile(r"general\.(name|basename|base_model\.\d+\.(name|repo_url))")


def small_models(target: Path, name: str) -> list[SmallModel]:
    """Return small models of a target's family, those of its own format first.

    name: as the user gave it; folders far above a file say nothing of it."""
    given = "/".join(Path(name).parts[-2:])
    named = re.sub(r"[ _-]+", "-", " ".join([given, *_own_names(target)])).lower()
    found = next((known for family, known in FAMILIES.items() if re.search(family, named)), {})
    return sorted(
        (SmallModel(*pair) for pair in found.items()),
        key=lambda model: (":" in model.name) != is_gguf(target),
    )


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
