"""What holds for all tests."""

from __future__ import annotations

import os


def pytest_configure() -> None:
    """Give each of several workers a core to itself, before PyTorch counts them: threads that wait
    for each other inside a step are slow on cores that another worker is using."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})
