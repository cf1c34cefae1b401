"""What Penstock relies on inside vLLM, whose interfaces below its server are not public ones. For a
version that moves one of them, this says which."""

import pytest
from tests.engine.vllm_target.contract import moved
from tests.engine.vllm_target.programs import run

from penstock.engine.vllm import check_installed

pytest.importorskip("vllm")


def test_what_is_relied_on_is_there() -> None:
    moved_in = {part: names for part, names in run("contract").items() if names}
    assert not moved_in, "\n".join(f"{part}: {n}" for part, ns in moved_in.items() for n in ns)


def test_negative_control_what_has_moved_is_named() -> None:
    found = moved(
        {"a": lambda: "", "b": lambda: "takes (x), not (y)", "c": lambda: {"d": ""}["gone"]}
    )
    assert found == ["b: takes (x), not (y)", "c: KeyError: 'gone'"]


def test_the_version_is_one_that_was_tried() -> None:
    check_installed()


def test_workers_keep_the_texts_and_blocks_that_steps_bring() -> None:
    """In vLLM's own model runner, without a model."""
    found = run("worker_runs")
    assert found["facts"].pop("wrong") == 0
    assert min(found["facts"].values()) > 10
    assert found["control"]["wrong"] > 0
