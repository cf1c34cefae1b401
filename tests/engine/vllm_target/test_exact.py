"""An engine over vLLM makes the tokens that vLLM makes by itself, whatever happens on the way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.engine.small_family import write_family

pytest.importorskip("vllm")

GREEDY = ("alone", "near", "switches", "chunks", "preemption", "lanes", "prefix cache")
ROOT = Path(__file__).parents[3]


def run(module: str, *arguments: object) -> Any:
    """What a program says in the last line of its output."""
    command = [sys.executable, "-m", f"tests.engine.vllm_target.{module}", *map(str, arguments)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@dataclass(frozen=True)
class Played:
    """reference: what `LLM.generate` makes of the greedy requests."""

    reference: list[list[int]]
    outputs: dict[str, list[list[int]]]
    facts: dict[str, int]


@pytest.fixture(
    scope="module", params=[8, pytest.param(64, marks=pytest.mark.slow)], ids="{}-requests".format
)
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Played:
    family = tmp_path_factory.mktemp("family")
    write_family(family)
    reference = run("reference", family / "target", request.param)
    return Played(reference, **run("scenes", family, request.param))


def test_greedy_is_what_vllm_makes_by_itself(played: Played) -> None:
    assert {name: played.outputs[name] == played.reference for name in GREEDY} == dict.fromkeys(
        GREEDY, True
    )


def test_the_circumstances_have_come_about(played: Played) -> None:
    facts = played.facts
    assert facts["alone: accepted"] == 0
    for name in ("near", "switches", "chunks", "preemption", "lanes", "coupled"):
        assert facts[f"{name}: accepted"] > 0, name
    for name in ("preemption", "coupled", "coupled-filtered", "control"):
        assert facts[f"{name}: preemptions"] > 0, name
    assert facts["prefix cache: cached"] > 0
    assert facts["cancels: cancelled"] == 2


def test_cancelled_requests_disturb_nobody(played: Played) -> None:
    """One id came again with the last request's prompt, the other never."""
    outputs, reference = played.outputs["cancels"], played.reference
    expected = [reference[-1] if i == 1 else text for i, text in enumerate(reference)]
    assert [t for i, t in enumerate(outputs) if i != 3] == [
        t for i, t in enumerate(expected) if i != 3
    ]
    assert outputs[3] == []


@pytest.mark.parametrize("mode", ["coupled", "coupled-filtered"])
def test_a_seed_gives_the_text_that_it_gives_natively(played: Played, mode: str) -> None:
    """In float32, of other kernels, and though others drafted, in memory that preempts."""
    native = played.outputs[f"{mode}, native"]
    assert len(native) >= 8
    assert played.outputs[mode][: len(native)] == native


def test_negative_control_stale_block_tables_are_caught(played: Played) -> None:
    assert played.outputs["control"] != played.reference
