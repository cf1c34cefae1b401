"""Every kind of attention against plain attention over the sequence's own keys and values."""

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from tests.engine.reference_attention import ReferenceAttention
from tests.engine.small_models import Paging
from tests.products import covering

from penstock.engine.attention import AttentionFactory, decomposed
from penstock.engine.attention.decomposed import DecomposedAttention, Planner
from penstock.engine.attention.packed import _MAX_GATHERED_BYTES, PackedAttention
from penstock.engine.backends import ATTENTION
from penstock.engine.gather import KVGather
from penstock.engine.kv_cache import PagedKVCache, kv_bytes_per_token
from penstock.engine.models.config import DecoderConfig
from penstock.engine.runner import RaggedBatch
from penstock.fluid.packing import cut, decompose

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16
NUM_BLOCKS, BLOCK_SIZE = 128, 8


# Each: (tokens in the cache afterwards, of which are query rows).
BATCHES = {
    "decode": [(1, 1), (9, 1), (200, 1), (12, 1), (16, 1)],
    "equal decode": [(40, 1)] * 5,
    "verify": [(30, 4), (25, 4), (31, 4), (4, 4), (100, 7)],
    "whole prompts": [(5, 5), (8, 8), (33, 33), (80, 80), (5, 5)],
    "chunks": [(100, 33), (100, 64), (70, 20), (140, 100)],
    "mixed": [(50, 1), (60, 60), (90, 40), (17, 5), (51, 1), (18, 5), (3, 2)],
}


def small_config(num_kv_heads: int = KV_HEADS) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_layers=2,
        num_heads=HEADS,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=1024,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
    )


every_kind = pytest.mark.parametrize("kind", ATTENTION.values(), ids=ATTENTION)


@dataclasses.dataclass
class Scene:
    """A filled cache, a batch over it, its queries, and what attention must give."""

    cache: PagedKVCache
    batch: RaggedBatch
    q: torch.Tensor
    expected: torch.Tensor

    def attend(
        self,
        kind: AttentionFactory,
        layer: int = 1,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        attention = kind(self.cache, HEADS)
        return attention.attend(self.q, layer, attention.prepare(self.batch, window), sinks)


def ids(count: int) -> npt.NDArray[np.int64]:
    return np.zeros(count, dtype=np.int64)


def make_scene(
    lengths: list[tuple[int, int]], num_kv_heads: int = KV_HEADS, dtype: Any = torch.float32
) -> Scene:
    generator = torch.Generator().manual_seed(0)
    cache = PagedKVCache(small_config(num_kv_heads), NUM_BLOCKS, BLOCK_SIZE, dtype, CPU)
    paging = Paging(NUM_BLOCKS, BLOCK_SIZE)
    queries, expected = [], []
    for i, (total, rows) in enumerate(lengths):
        kv = torch.randn(total, 2 * num_kv_heads, HEAD_DIM, generator=generator).to(dtype)
        whole = paging.batch((str(i), ids(total), 0, total))
        cache.write(1, torch.from_numpy(whole.slot_mapping(BLOCK_SIZE)), kv)
        q = torch.randn(rows, HEADS, HEAD_DIM, generator=generator).to(dtype)
        keys, values = kv.float().transpose(0, 1).split(num_kv_heads)
        repeats = HEADS // num_kv_heads
        visible = torch.ones(rows, total, dtype=torch.bool).tril(total - rows)
        out = F.scaled_dot_product_attention(
            q.float().transpose(0, 1),
            keys.repeat_interleave(repeats, 0),
            values.repeat_interleave(repeats, 0),
            attn_mask=visible,
        )
        queries.append(q)
        expected.append(out.transpose(0, 1))
    spans = [(str(i), ids(total), total - rows, total) for i, (total, rows) in enumerate(lengths)]
    return Scene(cache, paging.batch(*spans), torch.cat(queries), torch.cat(expected))


@every_kind
@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_equals_plain_attention(kind, lengths, num_kv_heads) -> None:
    scene = make_scene(lengths, num_kv_heads)
    out = scene.attend(kind)
    assert out.is_contiguous()
    torch.testing.assert_close(out, scene.expected, rtol=0, atol=1e-5)
    assert not torch.allclose(scene.attend(kind, layer=0), scene.expected, atol=1e-2)


@every_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(kind: AttentionFactory, dtype: torch.dtype) -> None:
    scene = make_scene(BATCHES["mixed"], dtype=dtype)
    out = scene.attend(kind)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), scene.expected, rtol=0, atol=2e-2)


@every_kind
def test_a_broken_sequence_spoils_no_other(kind: AttentionFactory) -> None:
    """What is left over in freed blocks, and what others compute, never gets through a mask."""
    scene = make_scene(BATCHES["mixed"])
    lengths = BATCHES["mixed"]
    used = {
        int(slot) for i, (total, _) in enumerate(lengths) for slot in _slots(scene.batch, i, total)
    }
    unused = [slot for slot in range(NUM_BLOCKS * BLOCK_SIZE) if slot not in used]
    broken_rows = slice(*scene.batch.query_start[4:6])
    by_slot = scene.cache.layers[1].view(2 * KV_HEADS, -1, HEAD_DIM)
    by_slot[:, unused] = float("nan")
    by_slot[:, _slots(scene.batch, 4, 3)] = float("nan")
    out = scene.attend(kind)
    assert out[broken_rows].isnan().all()
    out[broken_rows] = scene.expected[broken_rows]
    torch.testing.assert_close(out, scene.expected, rtol=0, atol=1e-5)


def _slots(batch: RaggedBatch, sequence: int, count: int) -> npt.NDArray[np.int64]:
    positions = np.arange(count)
    table = batch.block_tables[sequence].astype(np.int64)
    return table[positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE


@every_kind
def test_sequences_without_rows_are_skipped(kind: AttentionFactory) -> None:
    scene = make_scene([(10, 2), (20, 3)])
    starts, lens, tables = (scene.batch.query_start, scene.batch.seq_lens, scene.batch.block_tables)
    scene.batch = dataclasses.replace(
        scene.batch,
        query_start=starts[[0, 1, 1, 2]],
        seq_lens=lens[[0, 0, 1]],
        block_tables=tables[[0, 0, 1]],
    )
    torch.testing.assert_close(scene.attend(kind), scene.expected, rtol=0, atol=1e-5)


PLANS: dict[str, Planner] = {
    "one row": lambda lengths, window: decompose(lengths, 1),
    "three rows": lambda lengths, window: decompose(lengths, 3),
    "as many rows as sequences": lambda lengths, window: decompose(lengths, len(lengths)),
    "thirty rows": lambda lengths, window: decompose(lengths, 30),
    "single tokens": lambda lengths, window: cut(lengths, 1),
    "seven tokens": lambda lengths, window: cut(lengths, 7),
}


def attend(scene: Scene, plan: Planner) -> torch.Tensor:
    return scene.attend(partial(DecomposedAttention, plan=plan))


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_decomposed_is_exact_with_any_rows(lengths: list[tuple[int, int]]) -> None:
    scene = make_scene(lengths)
    for name, plan in PLANS.items():
        error = (attend(scene, plan) - scene.expected).abs().max()
        assert error <= 1e-5, name


@pytest.mark.parametrize("window", range(1, 9))
def test_every_kind_verifies_any_number_of_positions(window: int) -> None:
    scene = make_scene([(n, window) for n in (8, 90, 31, 200, 17)])
    for kind in ATTENTION.values():
        torch.testing.assert_close(scene.attend(kind), scene.expected, rtol=0, atol=1e-5)
    for plan in PLANS.values():
        torch.testing.assert_close(attend(scene, plan), scene.expected, rtol=0, atol=1e-5)


def test_scores_too_large_for_an_exponential_are_merged() -> None:
    """Eq. 13 as printed sums exp(score) over all pieces, which overflows here."""
    scene = make_scene([(200, 4), (30, 4)])
    scene.cache.layers[1][0] *= 300
    expected = scene.attend(ReferenceAttention)
    for plan in PLANS.values():
        out = attend(scene, plan)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-4)


def test_negative_control_merging_without_rescaling_is_caught(monkeypatch) -> None:
    scene = make_scene(BATCHES["verify"])
    monkeypatch.setattr(
        decomposed, "relative_totals", lambda totals, targets, rows: torch.ones_like(totals)
    )
    whole = attend(scene, lambda lengths, window: cut(lengths, max(lengths)))
    torch.testing.assert_close(whole, scene.expected, rtol=0, atol=1e-5)
    for plan in (PLANS["as many rows as sequences"], PLANS["seven tokens"]):
        assert (attend(scene, plan) - scene.expected).abs().max() > 0.1


def test_negative_control_seeing_a_neighbour_in_the_row_is_caught() -> None:
    scene = make_scene(BATCHES["verify"])
    backend = DecomposedAttention(scene.cache, HEADS, PLANS["three rows"])
    (call,) = backend.prepare(scene.batch)
    call.mask.zero_()
    assert (backend.attend(scene.q, 1, [call]) - scene.expected).abs().max() > 0.1


def test_a_broken_sequence_spoils_no_neighbour_in_its_row() -> None:
    scene = make_scene(BATCHES["verify"])
    broken = slice(*scene.batch.query_start[4:6])
    by_slot = scene.cache.layers[1].view(2 * KV_HEADS, -1, HEAD_DIM)
    by_slot[:, _slots(scene.batch, 4, 3)] = float("nan")
    out = attend(scene, PLANS["three rows"])
    assert out[broken].isnan().all()
    out[broken] = scene.expected[broken]
    torch.testing.assert_close(out, scene.expected, rtol=0, atol=1e-5)


def test_packed_bounds_what_it_gathers() -> None:
    config = small_config()
    cache = PagedKVCache(config, 4096, BLOCK_SIZE, torch.float32, CPU)
    paging = Paging(4096, BLOCK_SIZE)
    spans = [(str(i), ids(1600), 1599, 1600) for i in range(20)]
    groups = PackedAttention(cache, HEADS).prepare(paging.batch(*spans)).folded
    per_token = kv_bytes_per_token(config, torch.float32) // config.num_layers
    assert sum(group.num_seqs for group in groups) == 20
    assert max(len(group.kv.slots) for group in groups) * per_token <= _MAX_GATHERED_BYTES
    assert max(group.num_seqs for group in groups) > 1


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("kept", [1, 2 * 64 * HEAD_DIM * 40 + 1])
def test_packed_attends_to_some_heads_after_others(monkeypatch, kept, lengths) -> None:
    monkeypatch.setattr("penstock.engine.attention.packed._MAX_GATHERED_BYTES", kept)
    scene = make_scene(lengths, num_kv_heads=6)
    backend = PackedAttention(scene.cache, HEADS)
    metadata = backend.prepare(scene.batch)
    at_once = {group.kv.keys.shape[0] for group in metadata.folded}
    assert at_once <= ({1} if kept == 1 else {1, 2, 3, 6})
    torch.testing.assert_close(scene.attend(PackedAttention), scene.expected, rtol=0, atol=1e-5)


def test_negative_control_other_heads_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.attention.packed._MAX_GATHERED_BYTES", 1)
    fill = KVGather.fill
    monkeypatch.setattr(KVGather, "fill", lambda gather, layer, kv, _: fill(gather, layer, kv))
    scene = make_scene(BATCHES["verify"])
    assert (scene.attend(PackedAttention) - scene.expected).abs().max() > 0.1


def seen_in_window(scene: Scene, lengths: list[tuple[int, int]], window: int) -> torch.Tensor:
    """Every row alone, as if the text began where its window does."""
    rows = []
    for i, (total, count) in enumerate(lengths):
        for position in range(total - count, total):
            first = max(0, position + 1 - window)
            slots = _slots(scene.batch, i, position + 1)[first:]
            keys, values = scene.cache.layers[1].view(2, KV_HEADS, -1, HEAD_DIM)[:, :, slots]
            q = scene.q[scene.batch.query_start[i] + position - (total - count)]
            grouped = q.view(KV_HEADS, -1, HEAD_DIM)
            rows.append(F.scaled_dot_product_attention(grouped, keys, values).flatten(0, 1))
    return torch.stack(rows)


@pytest.mark.parametrize(
    ("window", "batch"), covering([1, 2, 7, 33, 64, 1000], BATCHES, strength=1)
)
def test_no_row_sees_more_than_its_window(window: int, batch: str) -> None:
    scene = make_scene(BATCHES[batch])
    expected = seen_in_window(scene, BATCHES[batch], window)
    for kind in ATTENTION.values():
        found = scene.attend(kind, window=window)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


SINKS = torch.tensor([-3.0, -1.0, 0.0, 1.0, 2.0, 30.0])


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_each_head_has_its_sink(lengths: list[tuple[int, int]], window: int | None) -> None:
    scene = make_scene(lengths)
    expected = scene.attend(ReferenceAttention, window=window, sinks=SINKS)
    for kind in ATTENTION.values():
        found = scene.attend(kind, window=window, sinks=SINKS)
        assert found.is_contiguous()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        for other in (None, SINKS.flip(0)):
            wrong = scene.attend(kind, window=window, sinks=other)
            assert (wrong - expected).abs().max() > 0.1
    for plan in PLANS.values():
        kind = partial(DecomposedAttention, plan=plan)
        found = scene.attend(kind, window=window, sinks=SINKS)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
