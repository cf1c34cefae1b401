"""What only a GPU can show: kernels as compiled, and graphs that are really replayed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.gpu.test_triton_paged import LENGTHS, error
from tests.engine.small_family import VOCAB, write_family
from tests.engine.small_models import Paging
from tests.engine.test_attention import HEADS, small_config

from penstock.config import EngineConfig
from penstock.core.types import NO_DRAFTER, Request, SamplingParams
from penstock.engine.backends import make_attention
from penstock.engine.build import load_engine
from penstock.engine.gpu.operations import Projection
from penstock.engine.gpu.streams import spare_stream
from penstock.engine.gpu.torch_operations import TorchOperations
from penstock.engine.kv_cache import PagedKVCache
from penstock.engine.models.decoder import RmsNorm
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
    split = make_attention("triton_paged", cache, HEADS)
    plain = make_attention("reference", meant, HEADS)
    expected = plain.attend(q.float(), 1, plain.prepare(batch))
    found = split.attend(q, 1, split.prepare(batch))
    assert error(found, expected) < (1e-4 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 16, 24, 64, 128])
def test_products_by_every_tile(rows: int, gated: bool) -> None:
    """Elsewhere only those are used that turn out to be the fastest."""
    from penstock.engine.gpu.kernels.triton_operations import TritonOperations
    from penstock.engine.gpu.kernels.tuning import tiles

    device, (depth, size) = torch.device("cuda"), (768, 320)
    cache = PagedKVCache(small_config(), 1, 8, torch.bfloat16, device)
    matrix = torch.randn(depth, 2 * size if gated else size, device=device) / depth**0.5
    matrix = matrix.bfloat16() if gated else matrix.bfloat16().t().contiguous().t()
    norm = RmsNorm(1 + 0.2 * torch.randn(depth, device=device), 1e-5) if gated else None
    residual = None if gated else torch.randn(rows, size, device=device).bfloat16()
    x = 3 * torch.randn(rows, depth, device=device).bfloat16()
    expected = TorchOperations(cache, HEADS).project(
        x.float(),
        Projection(matrix.float(), norm, gated=gated),
        None if residual is None else residual.float(),
    )
    fused, by = TritonOperations(cache, HEADS), Projection(matrix, norm, gated=gated)
    tried = tiles(matrix.dtype, rows, depth, size, 132)
    assert any(tile.splits > 1 for tile in tried)
    for tile in tried:
        for _ in range(3):
            found = fused._product(x, by, matrix, residual, None, tile)
            assert error(found, expected) < 1e-2, tile


def test_streams_of_threads_differ() -> None:
    device = torch.device("cuda")
    with spare_stream(device) as mine:
        for _ in range(100):
            with spare_stream(device) as other:
                assert other.cuda_stream != mine.cuda_stream


@pytest.mark.parametrize("pipeline", ["off", "2"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_output_is_the_targets_own(tmp_path: Path, temperature: float, pipeline: str) -> None:
    """With drafts in the target's own steps, and from lanes with streams of their own."""
    paths = write_family(tmp_path)
    engine = load_engine(
        EngineConfig(
            target=paths["target"],
            drafters={name: str(paths[name]) for name in ("same", "near", "far")},
            dtype="float32",
            device="cuda",
            kv_tokens=32 * 256,
            pipeline=pipeline,
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
            accepted = sum(c.usage.num_accepted_tokens for c in done)
            assert accepted > 0.9 * sum(c.usage.num_draft_tokens for c in done) > 0
    assert all(text == texts[NO_DRAFTER] for text in texts.values())
