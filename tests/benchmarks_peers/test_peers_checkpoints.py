"""The checkpoints of the comparison, and their conversion."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from lab.bench.peers.__main__ import parse
from lab.bench.peers.checkpoints import (
    DRAFTER_LAYERS,
    Weights,
    first_layers,
    random_llama,
    silence,
    write_checkpoint,
)
from lab.bench.peers.workers.gguf_file import interleave, read_safetensors


@pytest.fixture(scope="module")
def weights() -> Weights:
    return random_llama()


def logits(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.arange(8, 40)[None]).logits


@pytest.mark.slow
def test_the_silent_layers_make_the_first_ones_always_right(weights, tmp_path) -> None:
    silent = silence(weights, DRAFTER_LAYERS)
    whole = logits(write_checkpoint(tmp_path / "whole", weights))
    target = logits(write_checkpoint(tmp_path / "target", silent))
    drafter = logits(write_checkpoint(tmp_path / "drafter", first_layers(silent, DRAFTER_LAYERS)))
    assert torch.equal(target, drafter)
    assert (whole.argmax(-1) != target.argmax(-1)).any()


def test_safetensors_are_read_as_they_were_written(weights: Weights, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model", weights)
    read = read_safetensors(folder / "model.safetensors")
    assert read.keys() == weights.keys()
    for name, tensor in read.items():
        np.testing.assert_array_equal(tensor, weights[name].float().numpy())


def test_query_rows_go_from_halves_to_pairs() -> None:
    """Rotating neighbours after the permutation is rotating halves before it."""
    heads, head_dim, hidden = 3, 8, 5
    generator = np.random.default_rng(0)
    weight = generator.normal(size=(heads * head_dim, hidden))
    x, angles = generator.normal(size=hidden), generator.normal(size=head_dim // 2)
    cos, sin = np.cos(angles), np.sin(angles)
    halves = (weight @ x).reshape(heads, 2, head_dim // 2)
    a, b = halves[:, 0], halves[:, 1]
    wanted = np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)
    pairs = (interleave(weight, heads) @ x).reshape(heads, head_dim // 2, 2)
    c, d = pairs[..., 0], pairs[..., 1]
    got = np.concatenate([c * cos - d * sin, d * cos + c * sin], axis=1)
    np.testing.assert_allclose(got, wanted)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--gguf", "missing.gguf"], "missing.gguf is not a GGUF file that is there"),
        (["--gguf", __file__], "is not a GGUF file"),
    ],
)
def test_a_real_model_that_is_not_there_ends_it(arguments, says, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
