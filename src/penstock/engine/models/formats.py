"""Opening a checkpoint of either format."""

from __future__ import annotations

from pathlib import Path

from penstock.engine.models.checkpoint import Checkpoint, is_gguf


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a GGUF file, or else a folder in Hugging Face layout, without reading tensors."""
    # Imported here: each brings slow imports of its own.
    if is_gguf(path):
        from penstock.engine.models.gguf.checkpoint import GgufCheckpoint

        return GgufCheckpoint(path)
    from penstock.engine.models.folder import FolderCheckpoint

    return FolderCheckpoint(path)
