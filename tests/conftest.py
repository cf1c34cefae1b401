"""What holds for all tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest

from penstock.cli import main

Cli = Callable[..., tuple[int, str, str]]


def pytest_configure() -> None:
    """Give each of several workers a core to itself, before PyTorch counts them: threads that wait
    for each other inside a step are slow on cores that another worker is using."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if worker and hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs the program here; returns exit code, standard output and standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["penstock", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return run
