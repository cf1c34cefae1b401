"""lab.bench.gpu without a GPU: it says so, and all that it does can be rehearsed on the CPU."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from lab.bench.gpu import host as gpu_host
from lab.bench.gpu import numerics as gpu_numerics
from lab.bench.gpu import report as gpu
from lab.bench.gpu import tools
from penstock.engine.models import random as random_models

TINY = {
    "vocab_size": 150,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 4096,
}
QWEN = {**TINY, "variant": {"qk_norm": True}, "tie_word_embeddings": True}


SMALL = gpu.GpuSetting(
    torch.device("cpu"),
    torch.float32,
    attention="packed",
    target="tiny",
    drafters=(("qwen", 1.3), ("tiny", None)),
    decode_batches=(1, 3),
    verify_batches=(3,),
    context=60,
    mean=50,
    draft_batch=3,
    loops=tools.GpuLoops("qwen", contexts=(40,), batch=3, draft_lengths=(2, 3), tokens=12),
    sweep=tools.BatchSweep((2,), "tiny"),
    repeats=3,
    small=True,
)


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> gpu.GpuSetting:
    monkeypatch.setattr(random_models, "_shapes", lambda: {"tiny": TINY, "qwen": QWEN})
    return SMALL


@pytest.mark.slow
def test_every_item_can_be_rehearsed(
    setting: gpu.GpuSetting, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu.report(setting, gpu.ITEMS, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["synthetic_acceptance"] == 0.7
    rows = found["rows"]
    assert {row["item"] for row in rows} == set(gpu.ITEMS)
    assert not [row for row in rows if row["case"] == "failed"]
    assert all(row["passed"] is not False for row in rows if row["item"] == "numerics")
    cases = " ".join(row["case"] for row in rows)
    for bar in ("batch 1", "5 positions", "padded SDPA", "4 tokens", "drafted", "host between"):
        assert bar in cases
    assert all(row["low"] <= row["median"] <= row["high"] for row in rows if row["median"])


@pytest.mark.slow
def test_wrong_numerics_end_it(
    setting: gpu.GpuSetting, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_numerics, "relative_error", lambda found, expected: float("nan"))
    assert gpu.report(setting, ("decode",), as_json=True) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["item"] for row in rows} == {"numerics"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_says_that_there_is_no_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert gpu.main() == 2
    said = capsys.readouterr().err
    assert said == "gpu: PyTorch sees no CUDA device; this needs an NVIDIA GPU\n"
    monkeypatch.setattr(sys, "argv", ["gpu", "--items", "decode,speed"])
    assert gpu.main() == 2
    assert "no item 'speed'; allowed: numerics" in capsys.readouterr().err


@pytest.mark.slow
def test_the_hosts_work_is_measured_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_models, "_shapes", lambda: {"tiny": gpu_host.TINY})
    for num_drafted in (0, 4):
        row = gpu_host.row(3, num_drafted, gpu_host.Device(0.05, 0.01), passes=1)
        assert 0 < row["low_ms"] <= row["ms"] <= row["high_ms"]
        assert 0 <= row["idle_ahead"] < row["idle"] < 1
