"""Fingerprint of models, machine and kernels: what learned numbers depend on."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from pathlib import Path
from typing import Any

import torch

import penstock
from penstock.config import EngineConfig, model_name
from penstock.engine.backends import Models
from penstock.engine.models.checkpoint import part_names
from penstock.engine.native.loading import load_library

_EDGE = 1 << 20  # bytes at each end of a file that are hashed


def machine_name(device: torch.device) -> str:
    """Return the name of a device's GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def fingerprint(config: EngineConfig, models: Models) -> dict[str, Any]:
    """Return everything that learned numbers depend on, without the models' folders."""
    is_native = models.place.backend == "native"
    kernels = _hash_of_file(Path(load_library()._name)) if is_native else torch.__version__
    settings = config.model_dump(
        mode="json", include={"drafter_weights", "kv_dtype", "attention", "vllm"}
    )
    head = {} if config.head is None else {config.head[0]: [_hash_of_model(config.head[1])]}
    own = {n: [x for x in (d.device, d.weights) if x] for n, d in config.drafters.items()}
    return {
        "target": _hash_of_model(config.target),
        "drafters": {
            name: [_hash_of_model(path), *own[name]] for name, path in config.drafter_models.items()
        }
        | head
        | {name: [url, model] for name, (url, model, _) in config.servers.items()},
        "look_up": list(config.text_look_up or ()),
        "machine": machine_name(models.place.device),
        "threads": models.place.num_threads,
        "kernels": f"{penstock.__version__} {kernels}",
        "dtype": str(models.dtype),
        "backend": models.backend,
        "settings": digest(settings),
    }


def _hash_of_model(path: Path) -> str:
    """Return a hash of a model's name and files: their names, sizes, first and last bytes."""
    files = part_names(path)
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if p.is_file())
    return digest([model_name(path), [[p.name, _hash_of_file(p)] for p in files]])


def _hash_of_file(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        found = hashlib.sha256(b"%d " % size + file.read(_EDGE))
        file.seek(max(0, size - _EDGE))
        found.update(file.read(_EDGE))
    return found.hexdigest()


def canonical(value: Any) -> str:
    """Return the one JSON text of a value. Raises ValueError for NaN and infinity."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any) -> str:
    """Return the SHA-256 of a value's JSON text."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()
