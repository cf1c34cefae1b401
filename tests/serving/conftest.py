from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.serving.verified import World, verified_world


@pytest.fixture(scope="module")
def world(family: dict[str, Path]) -> Iterator[World]:
    """A verification server on this machine that takes any draft server."""
    with verified_world(family) as running:
        yield running
