"""Shared by the engine's tests: no hub, one thread, and small checkpoints on disk."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from tests.engine.small_models import CASES, Checkpoint, write_checkpoint


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Checkpoints by case name, each written once; tests that break one take a copy."""
    written: dict[str, Checkpoint] = {}

    def get(name: str) -> Checkpoint:
        if name not in written:
            written[name] = write_checkpoint(tmp_path_factory.mktemp(name), CASES[name])
        return written[name]

    return get


@pytest.fixture
def broken(checkpoint: Callable[[str], Checkpoint], tmp_path: Path) -> Callable[[str], Path]:
    """A private copy of a checkpoint folder, to be damaged."""

    def copy(name: str) -> Path:
        for file in checkpoint(name).path.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        return tmp_path

    return copy
