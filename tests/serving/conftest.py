from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engine.small_family import write_family
from tests.serving.verified import World, verified_world


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_family(tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="module")
def world(family: dict[str, Path]) -> Iterator[World]:
    """A verification server on this machine that takes any draft server."""
    with verified_world(family) as running:
        yield running
