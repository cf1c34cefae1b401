"""A decoder's steps by Triton against the same by PyTorch; see test_triton_paged for how to run."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tests.engine.gpu.test_triton_paged import error, needs_triton
from tests.engine.small_models import Paging
from tests.engine.test_attention import HEADS, KV_HEADS, small_config

from penstock.engine.gpu.operations import Operations, Projection
from penstock.engine.gpu.static_batch import BatchShape, StaticBatch
from penstock.engine.gpu.torch_operations import TorchOperations
from penstock.engine.kv_cache import PagedKVCache
from penstock.engine.models.decoder import RmsNorm
from penstock.engine.sampling.noise import row_keys

CPU = torch.device("cpu")
ROWS = {"one": 1, "few": 7, "many": 33, "by the library": 130}
pytestmark = needs_triton


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def ways(dtype: torch.dtype = torch.float32) -> tuple[PagedKVCache, Operations, Operations]:
    from penstock.engine.gpu.kernels.triton_operations import TritonOperations

    cache = PagedKVCache(small_config(), 8, 8, dtype, CPU)
    return cache, TorchOperations(cache, HEADS), TritonOperations(cache, HEADS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("kind", ["norm, bias", "residual", "norm, gated", "bias, residual"])
def test_projections(kind: str, rows: int, dtype: torch.dtype) -> None:
    _, plain, fused = ways()
    depth, size = 72, 40
    norm = RmsNorm(1 + 0.2 * randn(depth), 1e-5)
    gated = "gated" in kind
    matrix = randn(depth, 2 * size if gated else size, dtype=dtype) / depth**0.5
    by = Projection(
        matrix if "norm" in kind else matrix.t().contiguous().t(),
        norm if "norm" in kind else None,
        randn(size, dtype=dtype) if "bias" in kind else None,
        gated,
    )
    residual = randn(rows, size, dtype=dtype) if "residual" in kind else None
    x = 3 * randn(rows, depth, dtype=dtype)
    exact = Projection(by.matrix.float(), norm, None if by.bias is None else by.bias.float(), gated)
    if "norm" not in kind:
        exact = dataclasses.replace(exact, norm=None)
    expected = plain.project(x.float(), exact, None if residual is None else residual.float())
    found = fused.project(x, by, residual)
    assert found.dtype == dtype
    assert error(found, expected) < (1e-5 if dtype == torch.float32 else 1e-2)
    unnormed = fused.project(x * 2, by, residual)
    assert (error(unnormed, expected) > 0.1) == ("norm" not in kind), "a norm forgets the size"


@pytest.mark.parametrize("splits", [2, 3, 5])
@pytest.mark.parametrize("kind", ["norm", "bias, residual", "norm, gated"])
def test_sums_split_over_the_depth(kind: str, splits: int) -> None:
    """Whoever arrives last adds up what all have brought, and leaves nothing to the next product.
    72 depths are five blocks, the last of them half full."""
    from penstock.engine.gpu.kernels.triton_operations import TritonOperations
    from penstock.engine.gpu.kernels.tuning import Tile

    depth, size, rows = 72, 40, 7
    cache = PagedKVCache(small_config(), 8, 8, torch.float32, CPU)
    fused, plain = TritonOperations(cache, HEADS), TorchOperations(cache, HEADS)
    gated = "gated" in kind
    norm = RmsNorm(1 + 0.2 * randn(depth), 1e-5) if "norm" in kind else None
    bias = randn(size) if "bias" in kind else None
    residual = randn(rows, size) if "residual" in kind else None
    matrix = randn(depth, 2 * size if gated else size) / depth**0.5
    by = Projection(matrix, norm, bias, gated)
    tile = Tile(16, 16, 4, 2, splits)
    for x in (3 * randn(rows, depth), randn(rows, depth + 1)[:, 1:]):
        found = fused._product(x, by, matrix, residual, None, tile)
        assert error(found, plain.project(x, by, residual)) < 1e-5
        assert not fused._arrivals.any()
    fused._arrivals[1] = 1  # as if somebody had arrived already: the last share goes missing
    spoiled = fused._product(x, by, matrix, residual, None, tile)
    assert not torch.allclose(spoiled[:, 16:32], found[:, 16:32])


def test_which_sums_are_split() -> None:
    """Those of which there are fewer programs than multiprocessors, and none beyond its depth."""
    from penstock.engine.gpu.kernels.tuning import tiles

    narrow = tiles(torch.bfloat16, 16, 3072, 1024, 132)
    split = [tile for tile in narrow if tile.splits > 1]
    assert {(t.block_n, t.splits) for t in split} == {(16, 5), (32, 9), (64, 12), (128, 24)}
    assert all(t.splits * 2 * t.block_k <= 3072 for t in split)
    assert all(tile.splits == 1 for tile in tiles(torch.bfloat16, 16, 4096, 32_000, 132))
    assert all(tile.splits == 1 for tile in tiles(torch.bfloat16, 16, 256, 1024, 4))


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("kv", [torch.float32, torch.float8_e4m3fn])
def test_rotation_and_store(kv: torch.dtype, qk_norm: bool) -> None:
    found, expected = [], []
    for number, into in ((1, expected), (2, found)):
        cache, *operations = ways(kv)
        cache.scales[1] = torch.tensor([0.5, 2.0])
        batch = StaticBatch.allocate(BatchShape(5, 5, 1, 2, 8), CPU)
        batch.positions.copy_(torch.tensor([3, 0, 9, 1, 0]))
        batch.slots.copy_(torch.tensor([5, 60, 17, 8, 63]))
        qkv = randn(5, HEADS + 2 * KV_HEADS, cache.head_dim)
        angles = randn(12, 1, cache.head_dim // 2)
        rotations = torch.complex(angles.cos(), angles.sin())
        norm = RmsNorm(randn(HEADS + KV_HEADS, cache.head_dim), 1e-5) if qk_norm else None
        q = operations[number - 1].rotate_and_store(qkv, rotations, norm, batch, 1)
        into += [q.clone(), cache.layers[1].float(), cache.layers[0].float()]
    for mine, theirs in zip(found, expected, strict=True):
        wrong = ~torch.isclose(mine, theirs, rtol=1e-5, atol=1e-5)
        # Triton's interpreter forgets the carry where float8 rounds up to a power of two.
        assert float(wrong.float().mean()) <= (0.01 if kv == torch.float8_e4m3fn else 0)
    assert float(found[1].abs().sum()) > 0
    assert float(found[2].abs().sum()) == 0


def test_samples() -> None:
    _, plain, fused = ways()
    vocab = 4096 + 700
    logits = randn(6, vocab + 50)
    logits[:, vocab:] = 100.0
    logits[0, 17] = logits[0, 4500] = 50.0
    temperature = torch.tensor([0.0, 0.0, 0.7, 1.0, 1.3, 0.01])
    words = row_keys(np.arange(6, dtype=np.uint64), np.arange(6) + 40, 0).view(np.int32)
    keys = torch.from_numpy(words)
    expected = plain.sample(logits.clone(), temperature, keys, vocab)
    found = fused.sample(logits, temperature, keys, vocab)
    assert found.tolist() == expected.tolist()
    assert found[0] == 17, "the lowest of equals"
    assert found.tolist() != fused.sample(logits, temperature, keys.flip(0), vocab).tolist()


def test_attention_of_both_is_the_same_over_a_static_batch() -> None:
    cache, plain, fused = ways()
    for layer in cache.layers:
        layer.copy_(randn(*layer.shape))
    batch = Paging(8, 8).batch(
        *(
            (str(i), np.zeros(n, dtype=np.int64), n - r, n)
            for i, (n, r) in enumerate([(20, 3), (9, 1)])
        )
    )
    capacity = BatchShape(8, 4, 4, 4, fused.num_pieces(4))
    static = StaticBatch.allocate(capacity, CPU)
    static.fill(batch, 8, scratch_slot=63, grows_by=0)
    q = randn(8, HEADS, cache.head_dim)
    found, expected = (do.attend(q, 0, do.plan(static))[:4] for do in (fused, plain))
    assert error(found, expected) < 1e-5
