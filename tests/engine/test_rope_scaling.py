"""Scaled rotary embeddings beyond the length that a model was trained for first."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.small_gguf import write_gguf
from tests.engine.small_models import CASES, Case, Checkpoint, Paging, tokens, write_checkpoint
from tests.engine.test_architectures import settings

from penstock.engine.build import load_engine
from penstock.engine.eager import EagerRunner
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.weights import load_weights
from penstock.engine.native.runner import NativeRunner
from penstock.engine.runner import ModelRunner

LENGTH = 250
CPU = torch.device("cpu")

# What the positions are said to be, and what there are.
SCALED: dict[str, tuple[dict[str, Any], int]] = {
    "llama-linear": ({"max_position_embeddings": 64}, 256),
    "llama-yarn": ({"max_position_embeddings": 64}, 256),
    "llama-llama3": ({}, 256),
    "phi3-longrope-beyond": ({}, 256),
}


def case_of(name: str, **changes: Any) -> Case:
    return dataclasses.replace(CASES[name], changes=CASES[name].changes | changes)


def logits(runner: ModelRunner, length: int = LENGTH) -> torch.Tensor:
    place, ids = Paging(runner.num_blocks, runner.block_size), tokens(LENGTH)
    batches = [
        place.batch(("a", ids, 0, length // 2)),
        place.batch(("a", ids, length // 2, length)),
    ]
    return torch.cat([runner.forward(batch) for batch in batches])


def runners(path: Path, **options: Any) -> tuple[ModelRunner, ModelRunner]:
    return (
        EagerRunner.load(path, torch.float32, CPU, 64, 16, **options),
        NativeRunner.load(path, torch.float32, 64, 16, 1, **options),
    )


def write(path: Path, case: Case, kind: str) -> Checkpoint:
    if kind == "gguf":
        return write_gguf(path / "model.gguf", case)
    return write_checkpoint(path, case)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
@pytest.mark.parametrize("name", SCALED)
def test_texts_beyond_the_first_length(name: str, kind: str, tmp_path: Path) -> None:
    changes, positions = SCALED[name]
    saved = write(tmp_path, case_of(name, **changes), kind)
    assert DecoderConfig.from_pretrained(saved.path).max_position_embeddings == positions
    expected = saved.logits(tokens(LENGTH))
    for runner in runners(saved.path):
        torch.testing.assert_close(logits(runner), expected, atol=2e-4, rtol=2e-4)
    # Negative control: without the scaling the logits are others.
    config = DecoderConfig.from_pretrained(saved.path)
    weights = load_weights(saved.path, config)
    config = dataclasses.replace(config, rope=dataclasses.replace(config.rope, rope_type="default"))
    plain = EagerRunner(config, weights, CPU, 64, 16)
    assert not torch.allclose(logits(plain), expected, atol=0.01)


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_longrope_takes_one_list_of_factors_for_all_texts(kind: str, tmp_path: Path) -> None:
    """Short ones where no text is longer than the first length, as transformers has them then."""
    case = case_of("phi3-longrope", original_max_position_embeddings=200)
    saved = write(tmp_path, case, kind)
    short = 180
    expected = saved.logits(tokens(LENGTH)[:short])
    for within, beyond in zip(
        runners(saved.path, max_model_len=200), runners(saved.path), strict=True
    ):
        torch.testing.assert_close(logits(within, short), expected, atol=2e-4, rtol=2e-4)
        assert within.config.max_position_embeddings == 200
        assert not torch.allclose(logits(beyond, short), expected, atol=0.01)


def test_the_longest_text_of_the_settings_decides(tmp_path: Path) -> None:
    case = case_of("phi3-longrope", original_max_position_embeddings=200, vocab_size=512)
    write_checkpoint(tmp_path, case)
    for most in (128, None):
        engine = load_engine(settings(tmp_path, max_model_len=most), calibrated=False)
        assert engine.max_model_len == (most or 256)
        assert (
            engine.executor.verifier.runner.config.max_position_embeddings == engine.max_model_len
        )


def test_gemmas_positions_are_scaled_ones(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, CASES["gemma3-scaled"])
    assert DecoderConfig.from_pretrained(tmp_path).max_position_embeddings == 256
