"""Made-up requests over a filled cache, to measure attention and whole verification steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock.engine.attention import Attention, AttentionFactory
from penstock.engine.attention.packed import PackedAttention
from penstock.engine.kv_cache import PagedKVCache
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.weight_specs import weight_specs
from penstock.engine.runner import RaggedBatch

CPU = torch.device("cpu")
BLOCK_SIZE = 16
_VOCAB = 512


def decoder_shape(
    *, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, head_dim: int
) -> DecoderConfig:
    """A Llama of that shape with a small vocabulary, in float32."""
    return DecoderConfig(
        vocab_size=_VOCAB,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
    )


def blocks_needed(lengths: Sequence[int]) -> int:
    return sum(-(-length // BLOCK_SIZE) for length in lengths)


def random_cache(config: DecoderConfig, num_blocks: int) -> PagedKVCache:
    """Blocks of BLOCK_SIZE tokens, every one filled: a step's time must not come from zeros."""
    cache = PagedKVCache(config, num_blocks, BLOCK_SIZE, torch.float32, CPU)
    generator = torch.Generator().manual_seed(0)
    for layer in cache.layers:
        layer.uniform_(-1, 1, generator=generator)
    return cache


def verification_batch(
    lengths: Sequence[int], window: int, num_blocks: int, seed: int
) -> RaggedBatch:
    """The last `window` positions of each request; blocks lie scattered as after hours of service.

    lengths: tokens of each request, at least `window`, `window` included. Raises ValueError where
    there are too few blocks.
    """
    rng = np.random.default_rng(seed)
    sizes = np.array(lengths, dtype=np.int32)
    counts = -(-sizes // BLOCK_SIZE)
    if counts.sum() > num_blocks:
        raise ValueError(f"{counts.sum()} blocks are needed; the cache has {num_blocks}")
    free = rng.permutation(num_blocks)[: counts.sum()].astype(np.int32)
    tables = np.zeros((len(sizes), counts.max()), dtype=np.int32)
    tables[np.arange(counts.max()) < counts[:, None]] = free
    rows = len(sizes) * window
    positions = (sizes[:, None] - window + np.arange(window)).reshape(-1)
    return RaggedBatch(
        token_ids=rng.integers(0, _VOCAB, rows, dtype=np.int32),
        positions=positions.astype(np.int32),
        query_start=np.arange(0, rows + 1, window, dtype=np.int32),
        seq_lens=sizes,
        block_tables=tables,
        logits_rows=np.arange(rows, dtype=np.int32),
    )


def random_queries(config: DecoderConfig, num_tokens: int) -> torch.Tensor:
    """[num_tokens, num_heads, head_dim]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_tokens, config.num_heads, config.head_dim, generator=generator)


@dataclass(frozen=True, slots=True)
class RehearsalTimes:
    """Processor seconds of a verification step, and of its attention in all layers alone."""

    step: float
    attention: float


class Rehearsal:
    """One random decoder over one cache, verifying with each of several kinds of attention."""

    def __init__(
        self, config: DecoderConfig, num_blocks: int, kinds: Mapping[str, AttentionFactory]
    ) -> None:
        generator = torch.Generator().manual_seed(2)
        weights = {
            spec.name: torch.randn(spec.shape, generator=generator) * 0.02
            for spec in weight_specs(config)
        }
        self._config = config
        self.cache = random_cache(config, num_blocks)
        self._decoder = Decoder(config, weights, config.max_position_embeddings, CPU)
        self._packed = PackedAttention(self.cache, config.num_heads)
        self._kinds = {name: make(self.cache, config.num_heads) for name, make in kinds.items()}

    @torch.inference_mode()
    def times(
        self, lengths: Sequence[int], window: int, turns: int
    ) -> dict[str, list[RehearsalTimes]]:
        """So many turns of each, after one to warm up, on as many threads as torch is set to. Each
        turn begins with another kind, so that none always follows the same."""
        batch = verification_batch(lengths, window, self.cache.num_blocks, seed=0)
        q = random_queries(self._config, batch.num_tokens)
        found: dict[str, list[RehearsalTimes]] = {name: [] for name in self._kinds}
        names = deque(self._kinds)
        for turn in range(turns + 1):
            for name in names:
                times = self._once(self._kinds[name], batch, q)
                if turn:
                    found[name].append(times)
            names.rotate(1)
        return found

    @torch.inference_mode()
    def error(self, lengths: Sequence[int], window: int, attention: Attention) -> float:
        """Largest difference from packed attention, over all layers."""
        batch = verification_batch(lengths, window, self.cache.num_blocks, seed=0)
        q = random_queries(self._config, batch.num_tokens)
        layers = range(self._config.num_layers)
        exact, other = (
            torch.stack([b.attend(q, layer, metadata) for layer in layers])
            for b in (self._packed, attention)
            for metadata in [b.prepare(batch)]
        )
        return float((exact - other).abs().max())

    def _once(self, attention: Attention, batch: RaggedBatch, q: torch.Tensor) -> RehearsalTimes:
        started = time.process_time()
        self._decoder.forward(batch, self.cache, attention)
        forward = time.process_time()
        metadata = attention.prepare(batch)
        for layer in range(self._config.num_layers):
            attention.attend(q, layer, metadata)
        return RehearsalTimes(forward - started, time.process_time() - forward)
