"""Writing weights in Hugging Face layout: one safetensors file, or several with an index."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from penstock.config import ConfigError
from penstock.engine.models.checkpoint import INDEX_FILE, SINGLE_FILE

SHARD_BYTES = 1 << 30
"""Limit of a file, whose tensors are held in memory at once."""


def new_folder(out: Path, num_bytes: int) -> None:
    """Make a folder for models of `num_bytes`, or take an empty one.

    Raises ConfigError where it is not empty, or the disk has too little space."""
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise ConfigError(f"{out} exists and is not an empty folder; choose another")
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out}: {error.strerror}") from error
    free = shutil.disk_usage(out).free
    if num_bytes > free:
        raise ConfigError(
            f"{out}: the models take {num_bytes / 1e9:.1f} GB, and the disk has {free / 1e9:.1f} GB"
        )


def save_sharded(
    folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int = SHARD_BYTES
) -> None:
    """Write tensors by name in files of at most `shard_bytes`, or of one larger tensor.

    Raises OSError."""
    parts: list[tuple[Path, list[str]]] = []
    total = held = 0
    shard: dict[str, torch.Tensor] = {}

    def write() -> None:
        file = folder / f"part-{len(parts)}.safetensors"  # until it is known how many there are
        save_file(shard, file, metadata={"format": "pt"})
        parts.append((file, [*shard]))
        shard.clear()

    for name, tensor in tensors:
        if shard and held + tensor.nbytes > shard_bytes:
            write()
            held = 0
        shard[name] = tensor
        held += tensor.nbytes
        total += tensor.nbytes
    write()
    if len(parts) == 1:
        parts[0][0].rename(folder / SINGLE_FILE)
        return
    weight_map: dict[str, str] = {}
    for number, (file, names) in enumerate(parts, 1):
        name = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        file.rename(folder / name)
        weight_map |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
