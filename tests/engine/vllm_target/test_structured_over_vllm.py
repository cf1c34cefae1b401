"""Grammars hold in vLLM's workers as they do natively, whoever drafts."""

from typing import Any

import pytest
from tests.engine.test_grammar import SAMPLINGS, check_valid
from tests.engine.vllm_target.programs import run, skip_if_it_computes_nothing
from tests.products import first_fast

from penstock.engine.tokenizer import load_tokenizer
from penstock.zoo.registry import model_path

pytest.importorskip("vllm")


@pytest.fixture(scope="module", params=first_fast([1, 2]))
def made(request: pytest.FixtureRequest) -> Any:
    """By as many workers of vLLM's."""
    skip_if_it_computes_nothing()
    return run("structured", request.param, num_workers=request.param)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_texts_are_valid_and_those_that_they_are_natively(made: Any, sampling: str) -> None:
    found = made["found"][sampling]
    check_valid(load_tokenizer(model_path("draft-base")), found["native"])
    for drafter, texts in found["over vllm"].items():
        assert texts == found["native"], drafter


def test_negative_control_workers_that_know_no_grammar_are_caught(made: Any) -> None:
    assert made["control"] != made["found"]["greedy"]["native"]
