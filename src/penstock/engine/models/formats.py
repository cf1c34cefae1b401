"""Opens a checkpoint of either format."""

from __future__ import annotations

from pathlib import Path

from penstock.engine.models.checkpoint import Checkpoint, is_gguf


def open_checkpoint(path: Path) -> Checkpoint:
    """A GGUF file, else a folder in Hugging Face layout. No tensor is read yet."""
    # Each brings libraries of its own, which take their time to import.
    if is_gguf(path):
        from penstock.engine.models.gguf.checkpoint import GgufCheckpoint

        return GgufCheckpoint(path)
    from penstock.engine.models.folder import FolderCheckpoint

    return FolderCheckpoint(path)
