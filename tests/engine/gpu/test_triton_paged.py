"""Split-KV attention by Triton: what the suite of all backends does not reach.

On a machine without a GPU `make test-kernels` runs it in the interpreter; `make test` skips it.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from tests.engine.small_models import Paging
from tests.engine.test_attention import HEADS, WHY_NOT, small_config

from penstock.engine.attention import BackendUnavailableError
from penstock.engine.backends import make_attention
from penstock.engine.batch import RaggedBatch
from penstock.engine.gpu.static_batch import PIECE_STEP, piece_length
from penstock.engine.kv_cache import PagedKVCache

CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(
    WHY_NOT["triton_paged"] is not None, reason=str(WHY_NOT["triton_paged"])
)
LENGTHS = [(500, 5), (70, 1), (3, 3), (260, 16), (64, 2), (129, 4)]


def scene(
    dtype: torch.dtype,
    kv_heads: int = 2,
    head_dim: int = 16,
    lengths: list[tuple[int, int]] = LENGTHS,
) -> tuple[PagedKVCache, RaggedBatch, torch.Tensor]:
    """A cache filled all over, a batch of several pieces, and its queries."""
    generator = torch.Generator().manual_seed(3)
    config = dataclasses.replace(small_config(kv_heads), head_dim=head_dim)
    cache = PagedKVCache(config, 160, 8, dtype, CPU)
    for layer in cache.layers:
        layer.copy_(torch.randn(layer.shape, generator=generator).to(dtype))
    paging = Paging(160, 8)
    spans = [
        (str(i), np.zeros(total, dtype=np.int64), total - rows, total)
        for i, (total, rows) in enumerate(lengths)
    ]
    batch = paging.batch(*spans)
    q = torch.randn(batch.num_tokens, HEADS, head_dim, generator=generator)
    return cache, batch, q if dtype == torch.float32 else q.bfloat16()


def both(cache: PagedKVCache, batch: RaggedBatch, q: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """By Triton, and by the plain reference in float32 over what the cache really means."""
    backend = make_attention("triton_paged", cache, HEADS)
    found = backend.attend(q, 1, backend.prepare(batch))
    meant = PagedKVCache(
        dataclasses.replace(small_config(cache.num_kv_heads), head_dim=cache.head_dim),
        cache.num_blocks,
        cache.block_size,
        torch.float32,
        CPU,
    )
    meant.layers[1].copy_(cache.layers[1].float() * cache.scales[1][:, None, None, None, None])
    plain = make_attention("reference", meant, HEADS)
    return found, plain.attend(q.float(), 1, plain.prepare(batch))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, over the whole tensor."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@needs_triton
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("head_dim", [16, 24])
def test_several_pieces_are_merged(kv_heads: int, head_dim: int) -> None:
    assert error(*both(*scene(torch.float32, kv_heads, head_dim))) < 1e-5


@needs_triton
def test_bfloat16() -> None:
    assert error(*both(*scene(torch.bfloat16))) < 1e-2


@needs_triton
def test_float8_with_scales() -> None:
    cache, batch, q = scene(torch.float8_e4m3fn)
    cache.scales[1] = torch.tensor([0.5, 3.0])
    found, expected = both(cache, batch, q)
    assert found.dtype == torch.bfloat16
    assert error(found, expected) < 1e-2
    cache.scales[1, 1] = 1.0
    assert error(both(cache, batch, q)[0], expected) > 0.5, "the scale must matter"


@needs_triton
def test_float8_chunks_go_through_windows() -> None:
    cache, batch, q = scene(torch.float8_e4m3fn, lengths=[(60, 50), (30, 1), (17, 17)])
    assert error(*both(cache, batch, q)) < 1e-2


@needs_triton
def test_scores_too_large_for_an_exponential() -> None:
    cache, batch, q = scene(torch.float32)
    cache.layers[1][0] *= 300
    assert error(*both(cache, batch, q)) < 1e-4


@needs_triton
def test_negative_control_pieces_merged_without_weights_are_caught() -> None:
    cache, batch, q = scene(torch.float32)
    backend = make_attention("triton_paged", cache, HEADS)
    metadata = backend.prepare(batch)
    _, expected = both(cache, batch, q)
    (part,) = metadata
    backend.attend(q, 1, metadata)
    logs = part.metadata.partial_log
    first = int(part.metadata.first_piece[1])
    assert first > 1, "the first sequence must have pieces to merge"
    mean = part.metadata.partial_out[:first, :, :15].mean(0).view(-1, 5, 3, 16)
    assert float(logs[:first, :, :15].std(0).max()) > 0.05
    assert error(mean.transpose(0, 1).reshape(5, HEADS, 16), expected[:5]) > 1e-2


def test_written_in_float8_by_scale() -> None:
    cache = PagedKVCache(small_config(), 4, 8, torch.float8_e4m3fn, CPU)
    cache.scales[0] = torch.tensor([0.01, 2.0])
    rows = torch.randn(3, 4, 16, generator=torch.Generator().manual_seed(1))
    rows[0, 0, 0] = 1e6
    cache.write(0, torch.tensor([5, 0, 9]), rows)
    stored = cache.layers[0].view(4, 32, 16)[:, [5, 0, 9]].float().transpose(0, 1)
    meant = stored * torch.tensor([0.01, 0.01, 2.0, 2.0])[:, None]
    assert float(meant[0, 0, 0]) == pytest.approx(4.48)
    assert error(meant[1:], rows[1:]) < 0.05


@pytest.mark.parametrize("spare", [1, 3, 40])
def test_pieces_always_suffice(spare: int) -> None:
    rng = np.random.default_rng(spare)
    for _ in range(200):
        lens = rng.integers(0, 3000, rng.integers(1, 70)).astype(np.int32)
        length = piece_length(lens, len(lens) + spare)
        assert length % PIECE_STEP == 0
        assert (-(-lens // length)).sum() <= len(lens) + spare


def test_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    cache = PagedKVCache(small_config(), 1, 1, torch.float32, CPU)
    for name in ("triton_paged", "flashinfer"):
        with pytest.raises(BackendUnavailableError, match=f"attention {name} cannot be used") as e:
            make_attention(name, cache, HEADS)
        assert "\n" not in str(e.value)
