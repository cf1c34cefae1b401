"""How much KV memory an engine takes by default, and how it runs on a GPU."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.engine.test_attention import small_config

from penstock.config import ConfigError, EngineConfig
from penstock.engine import backends
from penstock.engine.backends import affordable_blocks, resolve_placement
from penstock.engine.kv_cache import kv_bytes_per_token
from penstock.engine.models.weight_specs import weight_bytes, weight_specs
from penstock.engine.native.runner import NativeRunner

GPU = torch.device("cuda")
MODEL = small_config()
FREE = 10_000_000


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (FREE, 2 * FREE))


def blocks(weights: int, max_model_len: int = 10**6) -> int:
    return affordable_blocks([MODEL, MODEL], torch.float32, GPU, 16, max_model_len, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_weights(dtype: torch.dtype) -> None:
    held = [torch.empty(spec.shape, dtype=dtype) for spec in weight_specs(MODEL)]
    assert weight_bytes(MODEL, dtype) == sum(weight.nbytes for weight in held)


def test_bytes_of_the_cache_are_counted_with_the_scales() -> None:
    config = replace(MODEL, head_dim=64)
    weights = {s.name: torch.zeros(s.shape) for s in weight_specs(config)}
    runner = NativeRunner(config, weights, torch.float32, 4, 16, 1, torch.int8)
    held = sum(tensor.nbytes for layer in runner._cache for tensor in layer)
    assert held == 4 * 16 * kv_bytes_per_token(config, torch.int8)
    assert held < 0.27 * 4 * 16 * kv_bytes_per_token(config, torch.float32)


def test_8_bits_of_kv_are_for_the_kernels(tmp_path: Path) -> None:
    settings = {"target": tmp_path, "dtype": "float32", "kv_dtype": "int8"}
    assert resolve_placement(EngineConfig(**settings)).kv_dtype == torch.int8
    for backend, more in {"eager": {"backend": "eager"}, "vllm": {"vllm": {}}}.items():
        with pytest.raises(ConfigError, match=f"kv_dtype int8 .* backend {backend} takes: auto"):
            resolve_placement(EngineConfig(**settings, **more))


@pytest.mark.parametrize("weights", [0, FREE // 2])
def test_kv_gets_a_share_of_what_weights_leave(weights: int) -> None:
    per_token = 2 * kv_bytes_per_token(MODEL, torch.float32)
    assert blocks(weights) == int(0.8 * (FREE - weights)) // per_token // 16


def test_no_more_than_64_texts_of_full_length_need() -> None:
    assert blocks(0, max_model_len=32) == 64 * 32 // 16


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"the models take 0\.0 GB and cuda has 0\.0 GB free"):
        blocks(FREE)


def test_models_on_a_gpu_run_eagerly(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = {"target": tmp_path, "device": "cuda", "dtype": "float32"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert resolve_placement(EngineConfig(**settings)).backend == "eager"
    with pytest.raises(ConfigError, match="it runs on the CPU, not on cuda"):
        resolve_placement(EngineConfig(backend="native", **settings))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="PyTorch sees no CUDA device"):
        resolve_placement(EngineConfig(**settings))


def test_without_kernels_pytorch_computes_and_says_so(monkeypatch, caplog, tmp_path) -> None:
    monkeypatch.setattr(backends, "why_not_native", lambda: "there are none")
    assert resolve_placement(EngineConfig(target=tmp_path)).backend == "eager"
    assert caplog.messages == [
        "PyTorch computes, slower than the CPU kernels would: there are none"
    ]
