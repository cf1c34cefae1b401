"""Architectures beside Llama's through the whole engine: speculation changes nothing, and what a
backend's kernels do not compute is computed eagerly or refused in one line."""

import dataclasses
from pathlib import Path

import pytest
import torch
from tests.engine.small_family import VOCAB, write_tokenizer
from tests.engine.small_models import CASES, parameters, write_checkpoint
from tests.engine.test_exactness import (
    DRAFTERS,
    SAMPLINGS,
    Alone,
    load,
    make_loop,
    make_requests,
    run,
)
from tests.products import covering, slow

from penstock.config import EngineConfig
from penstock.engine.backends import why_not_native
from penstock.engine.build import Engine

FIRST = ("mistral-window", "qwen3-moe-norm", "gpt-oss", "gemma4-shared")
"""With windows, experts, both, and keys of other layers. That no logits depend on the batch,
test_native.py shows of all."""
OTHERS = ("phi3-longrope", "gemma3-scaled", "ministral3", "granite", "glm4-moe", "gemma4-moe")
CHOICES = (["greedy", "coupled-filtered"], ["none", *DRAFTERS])

needs_native = pytest.mark.skipif(why_not_native() is not None, reason="no native kernels")


def write_family(root: Path, name: str) -> dict[str, Path]:
    """target, and drafters `same` (its copy), `near` (with noise) and `far` (with more of it)."""
    changes = CASES[name].changes | {"vocab_size": VOCAB, "max_position_embeddings": 512}
    if "vocab_size_per_layer_input" in changes:
        changes["vocab_size_per_layer_input"] = VOCAB
    case = dataclasses.replace(CASES[name], changes=changes)
    paths = {}
    for drafter, noise in {"target": 0.0, "same": 0.0, "near": 0.02, "far": 1.0}.items():
        paths[drafter] = root / drafter
        model = write_checkpoint(paths[drafter], case).model
        torch.manual_seed(2)
        with torch.no_grad():
            for _, parameter in parameters(model):
                spread = parameter.std(correction=0)
                parameter.add_(noise * spread * torch.randn_like(parameter))
        model.save_pretrained(paths[drafter])
        write_tokenizer(paths[drafter])
    return paths


@pytest.fixture(scope="module", params=(*FIRST, *OTHERS))
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    return write_family(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def engine(family: dict[str, Path]) -> Engine:
    return load(family, "auto")


@pytest.fixture(scope="module")
def alone(engine: Engine) -> Alone:
    return Alone(engine, num=8)


@pytest.mark.parametrize(
    ("family", "sampling", "drafter"),
    covering(FIRST, *CHOICES, strength=1) + slow(OTHERS, *CHOICES),
    indirect=["family"],
)
def test_output_is_the_targets_own(engine, alone, drafter, sampling) -> None:
    loop = make_loop(engine)
    outputs, accepted = run(loop, make_requests(SAMPLINGS[sampling], 8, drafter))
    assert outputs == alone[sampling]
    if drafter in ("same", "near"):
        assert accepted > 0


@needs_native
@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, "native") for name in ("phi3-partial", "gemma3", "qwen3-moe", "gpt-oss")],
)
def test_auto_takes_the_kernels_where_they_suffice(tmp_path: Path, name: str, backend: str) -> None:
    assert load(write_family(tmp_path, name), "auto").backend == backend


def settings(path: Path, **changes: object) -> EngineConfig:
    write_tokenizer(path)
    defaults = {"dtype": "float32", "kv_tokens": 4096, "num_threads": 1}
    return EngineConfig(target=path, **defaults | changes)
