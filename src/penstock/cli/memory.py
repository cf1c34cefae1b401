"""Memory of this machine, and of the models in it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
MEMORY_SHARE = 0.8
"""Share of the free memory that models may take, as KV memory is added."""


def free_memory(meminfo: Path, cgroup: Path) -> int | None:
    """Return free bytes of the machine and the control group (version 2 or 1); None: unknown."""
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
    return min(free, default=None)
