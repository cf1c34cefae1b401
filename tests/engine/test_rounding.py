"""Matrices of drafters in 4 bits: what is rounded, how well, and that the target is not."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tests.engine.small_family import small_llama, write_tokenizer
from tests.engine.test_exactness import DRAFTERS, SAMPLINGS, load, make_loop, make_requests, run

from penstock.config import ConfigError
from penstock.engine.backends import load_runner
from penstock.engine.drafters.model import ModelDrafter
from penstock.engine.executor import RunnerExecutor
from penstock.engine.models.quantized import QuantizedMatrix
from penstock.engine.models.rounding import KIND, encode, round_weights
from penstock.engine.native.runner import NativeRunner
from penstock.engine.runner import BatchWriter, ModelRunner


def stored(values: torch.Tensor, kind: str) -> QuantizedMatrix:
    data = gguf.quantize(values.numpy(), gguf.GGMLQuantizationType[kind])
    return QuantizedMatrix(kind, *values.shape, torch.from_numpy(data))


def squared_error(values: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Of every block; `data` as the format's own library reads it."""
    read = gguf.dequantize(data.numpy(), gguf.GGMLQuantizationType[KIND])
    return (torch.from_numpy(read) - values).square().unflatten(1, (-1, 32)).sum(-1)


@pytest.mark.parametrize("shape", ["normal", "with outliers", "far from zero"])
def test_codes_are_nearer_than_those_of_the_format_s_own_library(shape: str) -> None:
    values = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)) * 0.02
    if shape == "with outliers":
        values[:, ::32] *= 10
    if shape == "far from zero":
        values += 0.1
    own = squared_error(values, encode(values))
    theirs = squared_error(values, stored(values, KIND).data)
    assert own.sum() < 0.95 * theirs.sum()
    # It tries their range, too; what is stored in 16 bits is rounded once more.
    assert (own <= 1.1 * theirs).float().mean() > 0.95


def test_what_is_rounded() -> None:
    torch.manual_seed(2)
    large, embedding = torch.randn(64, 64), torch.randn(128, 64).to(torch.bfloat16)
    of_experts = torch.randn(4, 32, 64)
    weights = {
        "embed_tokens": embedding,
        "layers.0.qkv": (stored(large, "Q8_0"), stored(large, "Q5_0"), large),
        "layers.0.down": large,
        "layers.0.gate_up": of_experts,
        "layers.0.router": torch.randn(4, 64),
        "layers.0.norm": torch.randn(64),
        "layers.0.o": torch.randn(64, 48),
    }
    found = round_weights(weights, 2)
    for name in ("embed_tokens", "layers.0.router", "layers.0.norm", "layers.0.o"):
        assert found[name] is weights[name], name
    parts = found["layers.0.qkv"]
    assert isinstance(parts, tuple)
    assert [part.kind for part in parts if isinstance(part, QuantizedMatrix)] == [
        KIND,
        "Q5_0",
        KIND,
    ]
    assert parts[1] is weights["layers.0.qkv"][1]
    rounded = {"layers.0.down": large, "layers.0.gate_up": of_experts.flatten(0, 1)}
    for name, before in (rounded | {"lm_head": embedding.float()}).items():
        matrix = found[name]
        assert isinstance(matrix, QuantizedMatrix)
        error = (matrix.dequantize() - before).norm() / before.norm()
        assert 0.02 < error < 0.1, name


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    small_llama(2, seed=1, hidden_size=128, intermediate_size=128).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    return tmp_path


def logits_of(runner: ModelRunner) -> torch.Tensor:
    writer = BatchWriter()
    writer.add(0, list(range(20)), 20)
    return runner.forward(writer.batch(np.arange(2, dtype=np.int32)[None]))


@pytest.mark.parametrize("weights", ["stored", "int4"])
def test_drafters_are_rounded_and_the_target_is_not(checkpoint: Path, weights: str) -> None:
    engine = load(
        dict.fromkeys(("target", *DRAFTERS), checkpoint), "native", drafter_weights=weights
    )
    alone, _ = run(make_loop(engine), make_requests(SAMPLINGS["greedy"], 6, "none"))
    outputs, accepted = run(make_loop(engine), make_requests(SAMPLINGS["greedy"], 6, "same"))
    assert outputs == alone
    assert accepted > 0
    drafter, executor = engine.executor.drafters["same"], engine.executor
    assert isinstance(drafter, ModelDrafter)
    assert isinstance(executor, RunnerExecutor)
    expected = logits_of(NativeRunner.load(checkpoint, torch.float32, 2, 16, 1))
    assert torch.equal(logits_of(executor.target), expected)
    assert torch.equal(logits_of(drafter.runner), expected) == (weights == "stored")


def test_where_there_are_no_kernels_for_it(checkpoint: Path) -> None:
    paths = dict.fromkeys(("target", *DRAFTERS), checkpoint)
    with pytest.raises(ConfigError, match=r"int4 .* backend eager takes: auto, stored"):
        load(paths, "eager", drafter_weights="int4")
    with pytest.raises(ConfigError, match=r"int4 .* cannot be had here"):
        load_runner(checkpoint, "float16", rounding="int4")
