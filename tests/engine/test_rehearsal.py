"""Made-up batches: every token has a block of its own, and all attention computes the same."""

import numpy as np
import torch
from tests.engine.reference_attention import ReferenceAttention

from lab.common.rehearsal import (
    Rehearsal,
    blocks_needed,
    decoder_shape,
    random_cache,
    random_queries,
    verification_batch,
)
from penstock.engine.backends import ATTENTION

LENGTHS = [5, 70, 33, 16, 200]
CONFIG = decoder_shape(hidden=24, intermediate=32, layers=2, heads=3, kv_heads=1, head_dim=8)


def test_every_layout_attends_alike_over_a_cache_without_zeros() -> None:
    num_blocks = blocks_needed(LENGTHS)
    cache = random_cache(CONFIG, num_blocks)
    assert all(bool((layer != 0).all()) for layer in cache.layers)
    batch = verification_batch(LENGTHS, 4, num_blocks, seed=3)
    q = random_queries(CONFIG, batch.num_tokens)
    found = []
    for make in (*ATTENTION.values(), ReferenceAttention):
        backend = make(cache, CONFIG.num_heads)
        found.append(backend.attend(q, 1, backend.prepare(batch)))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(found[0], found[2], rtol=0, atol=1e-5)


def test_every_kind_is_timed_in_every_turn() -> None:
    times = Rehearsal(CONFIG, blocks_needed(LENGTHS), ATTENTION).times(LENGTHS, 4, turns=3)
    assert set(times) == set(ATTENTION)
    for turns in times.values():
        assert len(turns) == 3
        assert all(0 < found.attention < np.inf for found in turns)
