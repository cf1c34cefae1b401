"""Names of devices: `cpu`, `cpu:CORES`, `cuda` or `cuda:N`."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

_CORES = r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*"


def checked_device(name: str) -> str:
    """Return a device's name as given. Raises ValueError for another."""
    if not re.fullmatch(rf"cpu(:{_CORES})?|cuda(:\d+)?", name, re.ASCII):
        raise ValueError(f"{name!r} is unknown; allowed: cpu, cpu:CORES as 0-3,6, cuda, cuda:N")
    if name.startswith("cpu:") and not cores_of(name):
        raise ValueError(f"{name!r} names no cores; a range rises, as in 0-3")
    return name


def cores_of(name: str) -> tuple[int, ...]:
    """Return the cores that a device is; empty where the system chooses."""
    kind, _, cores = name.partition(":")
    ranges = [part.partition("-") for part in cores.split(",") if kind == "cpu" and part]
    found = [range(int(first), int(last or first) + 1) for first, _, last in ranges]
    return tuple(sorted({core for cores in found for core in cores}))


DeviceName = Annotated[str, AfterValidator(checked_device)]
