"""What only a GPU can show: kernels as compiled, and recordings that are really replayed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.small_family import VOCAB, write_family
from tests.engine.small_models import Paging
from tests.engine.test_attention import HEADS, small_config
from tests.engine.test_triton_paged import LENGTHS, error

from penstock.config import EngineConfig
from penstock.core.types import NO_DRAFTER, Request, SamplingParams
from penstock.engine.attention import make_backend
from penstock.engine.build import load_engine
from penstock.engine.kv_cache import PagedKVCache
from penstock.serving.offline import complete

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_attention(dtype: torch.dtype, kv_heads: int) -> None:
    device = torch.device("cuda")
    config = dataclasses.replace(small_config(kv_heads), head_dim=64)
    cache, meant = (PagedKVCache(config, 160, 8, kind, device) for kind in (dtype, torch.float32))
    cache.layers[1].copy_(torch.randn(cache.layers[1].shape, device=device))
    meant.layers[1].copy_(cache.layers[1].float())
    batch = Paging(160, 8).batch(
        *((str(i), np.zeros(n, dtype=np.int64), n - r, n) for i, (n, r) in enumerate(LENGTHS))
    )
    q = torch.randn(batch.num_tokens, HEADS, 64, device=device)
    q = q if dtype == torch.float32 else q.bfloat16()
    split = make_backend("triton_paged", cache, HEADS)
    plain = make_backend("reference", meant, HEADS)
    expected = plain.attend(q.float(), 1, plain.prepare(batch))
    found = split.attend(q, 1, split.prepare(batch))
    assert error(found, expected) < (1e-4 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_output_is_the_targets_own(tmp_path: Path, temperature: float) -> None:
    paths = write_family(tmp_path)
    engine = load_engine(
        EngineConfig(
            target=paths["target"],
            drafters={name: str(paths[name]) for name in ("same", "near", "far")},
            dtype="float32",
            device="cuda",
            kv_tokens=32 * 256,
        ),
        calibrated=False,
    )
    assert engine.backend == "graphs"
    texts = {}
    for drafter in (NO_DRAFTER, "same", "near", "far"):
        requests = [
            Request(
                id=f"{drafter}-{i}",
                prompt_len=5 + 7 * i,
                prompt_token_ids=tuple(
                    np.random.default_rng(i).integers(0, VOCAB, 5 + 7 * i).tolist()
                ),
                max_tokens=40,
                sampling=SamplingParams(temperature=temperature, seed=i, verification="coupled"),
                drafter=drafter,
            )
            for i in range(9)
        ]
        done = complete(engine.loop, requests, 9)
        texts[drafter] = [c.token_ids for c in done]
        if drafter == "same":
            assert sum(c.num_accepted for c in done) > 0.9 * sum(c.num_proposed for c in done) > 0
    assert all(text == texts[NO_DRAFTER] for text in texts.values())
