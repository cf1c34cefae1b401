"""An engine over vLLM makes the tokens that vLLM makes by itself, whatever happens on the way."""

import json
import math
from dataclasses import dataclass

import pytest
from tests.engine.small_family import write_family
from tests.engine.test_exactness import SAMPLINGS
from tests.engine.vllm_target.programs import run, skip_if_it_computes_nothing
from tests.products import first_fast

pytest.importorskip("vllm")

CIRCUMSTANCES: dict[str, tuple[int, dict[str, int]]] = {
    "8-requests": (8, {}),
    "64-requests": (64, {}),
    "tensor-parallel": (8, {"tensor_parallel": 2}),
    "pipeline-parallel": (8, {"pipeline_parallel": 2}),
}
"""Requests, and settings of `engine.vllm`."""

GREEDY = (
    *("alone", "near", "switches", "chunks", "a chunk alone"),
    *("preemption", "lanes", "prefix cache"),
    *("group", "group, chunks", "group, preemption"),
)


@dataclass(frozen=True)
class Played:
    """reference: what `LLM.generate` makes of the greedy requests."""

    reference: list[list[int]]
    outputs: dict[str, list[list[int]]]
    facts: dict[str, int]
    is_pipeline: bool


@pytest.fixture(scope="module", params=first_fast(CIRCUMSTANCES))
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Played:
    skip_if_it_computes_nothing()
    num, vllm = CIRCUMSTANCES[request.param]
    family = tmp_path_factory.mktemp("family")
    write_family(family)
    reference = run("reference", family / "target", num)
    workers = math.prod(vllm.values())
    made = run("scenes", family, num, json.dumps(vllm), num_workers=workers)
    return Played(reference, **made, is_pipeline="pipeline_parallel" in vllm)


def test_greedy_is_what_vllm_makes_by_itself(played: Played) -> None:
    assert {name: played.outputs[name] == played.reference for name in GREEDY} == dict.fromkeys(
        GREEDY, True
    )


def test_the_circumstances_have_come_about(played: Played) -> None:
    facts = played.facts
    assert facts["alone: accepted"] == 0
    for name in ("near", "switches", "chunks", "preemption", "lanes", "coupled"):
        assert facts[f"{name}: accepted"] > 0, name
    tight = ("preemption", "coupled", "coupled-filtered", "control")
    for name in (*tight, "group, preemption", "group, coupled", "group, control"):
        assert facts[f"{name}: preemptions"] > 0, name
    for name in ("group", "group, chunks", "group, preemption", "group, coupled"):
        assert facts[f"{name}: steps of the group"] > 10 or played.is_pipeline, name
    assert facts["prefix cache: cached"] > 0
    assert facts["cancels: cancelled"] == facts["group, cancels: cancelled"] == 2


@pytest.mark.parametrize("name", ["cancels", "group, cancels"])
def test_cancelled_requests_disturb_no_other(played: Played, name: str) -> None:
    """One id came again with the last request's prompt, the other never."""
    outputs, reference = played.outputs[name], played.reference
    expected = [reference[-1] if i == 1 else text for i, text in enumerate(reference)]
    assert [t for i, t in enumerate(outputs) if i != 3] == [
        t for i, t in enumerate(expected) if i != 3
    ]
    assert outputs[3] == []


@pytest.mark.parametrize("mode", [name for name in SAMPLINGS if name != "greedy"])
def test_a_seed_gives_the_text_that_it_gives_natively(played: Played, mode: str) -> None:
    """In float32, of other kernels, and though others drafted, in memory that preempts."""
    native = played.outputs[f"{mode}, native"]
    assert len(native) >= 8
    for name in (mode, f"group, {mode}"):
        assert played.outputs[name][: len(native)] == native


@pytest.mark.parametrize("name", ["control", "group, control"])
def test_negative_control_stale_block_tables_are_caught(played: Played, name: str) -> None:
    assert played.outputs[name] != played.reference
