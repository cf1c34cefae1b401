"""Memory of this machine, and of the models in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
MEMORY_SHARE = 0.8
"""Share of the free memory that models may take, as KV memory is added."""
CPU_KV_SHARE, GPU_KV_SHARE = 0.25, 0.8
"""Shares of the free memory for KV where no setting says, by convention."""
LESS_MEMORY = "smaller or quantised models, a lower kv_tokens or more memory would do"


def model_bytes(path: Path) -> int:
    """Return the bytes of a model's weights: of GGUF files, or of a folder's safetensors."""
    from penstock.engine.models.checkpoint import part_names

    files = list(path.glob("*.safetensors")) if path.is_dir() else part_names(path)
    return sum(file.stat().st_size for file in files if file.is_file())


def free_memory(meminfo: Path = _MEMINFO, cgroup: Path = CGROUP) -> int:
    """Return free bytes of the machine and the control group (version 2 or 1); else all bytes."""
    free: list[int] = []
    with suppress(OSError, ValueError):
        lines = meminfo.read_text(encoding="ascii").splitlines()
        free += [int(li.split()[1]) * 1024 for li in lines if li.startswith("MemAvailable:")]
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with suppress(OSError, ValueError):
            most = int((cgroup / limit).read_text(encoding="ascii"))
            free.append(most - int((cgroup / used).read_text(encoding="ascii")))
    return min(free) if free else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class MemoryNeed(NamedTuple):
    """Bytes of this machine that models take, and those that were free before.

    states: recurrent ones, of all requests at once."""

    weights: int
    kv: int
    free: int
    states: int = 0

    def __str__(self) -> str:
        weights, kv, free, states = (f"{num_bytes / 2**30:.1f} GiB" for num_bytes in self)
        told = f", recurrent states {states}" if self.states else ""
        return f"models take {weights} and their KV memory {kv}{told}; {free} are free"

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise ConfigError with these bytes, or with a GPU's, where an allocation fails."""
        from penstock.config import ConfigError

        try:
            yield
        except (MemoryError, OSError, RuntimeError) as error:
            if "allocate" not in str(error) and not isinstance(error, MemoryError):
                raise
            told = error if "CUDA" in str(error) else self
            raise ConfigError(f"{told}: {LESS_MEMORY}") from error
