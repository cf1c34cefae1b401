"""What the parts of `ragged_attention` share: contexts, models, and the contest of the backends."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from penstock.engine.attention.decomposed import DecomposedAttention, as_many_rows
from penstock.engine.kv_cache import PagedKVCache
from penstock.engine.models.config import DecoderConfig
from penstock.engine.rehearsal import (
    BLOCK_SIZE,
    decoder_shape,
    random_queries,
    verification_batch,
)
from penstock.fluid.packing import KVShape
from penstock.lab.claims import bar
from penstock.lab.padded_attention import BY_LAYOUT

SEEDS = range(5)
WINDOW = 4
MEAN, SIGMA = 400, 0.8
SPEED_BAR, MEMORY_BAR = 0.9, 1.05
KV_TOKENS = 111_580
"""Of Llama-2-7B on an A100-80GB."""
SHAPES = {
    "SmolLM2-135M": (30, 8, dict(hidden=576, intermediate=1536, heads=9, kv_heads=3, head_dim=64)),
    "Llama-2-7B": (
        32,
        1,
        dict(hidden=4096, intermediate=11008, heads=32, kv_heads=32, head_dim=128),
    ),
}
"""Layers of the model, layers measured, and sizes."""
Figures = dict[str, Any]


def contexts(batch: int, seed: int) -> list[int]:
    """The first requests of a larger batch are those of a smaller one."""
    rng = np.random.default_rng(seed)
    drawn = rng.lognormal(np.log(MEAN) - SIGMA**2 / 2, SIGMA, batch)
    return np.maximum(WINDOW, drawn.round()).astype(int).tolist()


def measured(name: str) -> DecoderConfig:
    """The shape with as many layers as are measured."""
    _, layers, sizes = SHAPES[name]
    return decoder_shape(layers=layers, **sizes)


def kv_shape(name: str) -> KVShape:
    layers, _, sizes = SHAPES[name]
    return KVShape(layers, sizes["kv_heads"], sizes["head_dim"], 4, BLOCK_SIZE)


def line(reached: bool, what: str) -> str:
    """A verdict in words."""
    return bar("", what, reached).line()


class Contest:
    """Contenders on one batch; `calls` run all measured layers, `prepare` is timed apart."""

    def __init__(self, cache: PagedKVCache, config: DecoderConfig, batch: int, seed: int) -> None:
        self.lengths = contexts(batch, seed)
        rows = verification_batch(self.lengths, WINDOW, cache.num_blocks, seed)
        q = random_queries(config, rows.num_tokens)
        heads = config.num_heads
        backends = {name: make(cache, heads) for name, make in BY_LAYOUT.items()}
        backends["decomposed, B = n"] = DecomposedAttention(cache, heads, as_many_rows)
        self.prepare_ms: dict[str, float] = {}
        self.calls: dict[str, Callable[[], object]] = {}
        for name, backend in backends.items():
            backend.prepare(rows)
            started = time.process_time()
            metadata = backend.prepare(rows)
            self.prepare_ms[name] = 1e3 * (time.process_time() - started)

            def call(backend: Any = backend, metadata: Any = metadata) -> None:
                for layer in range(config.num_layers):
                    backend.attend(q, layer, metadata)

            self.calls[name] = call
        self.calls |= kept_in_layout(config, self.lengths, q)
        reference = backends["packed"].attend(q, 0, backends["packed"].prepare(rows))
        for name, backend in backends.items():
            out = backend.attend(q, 0, backend.prepare(rows))
            assert (out - reference).abs().max() < 1e-5, name


def kept_in_layout(
    config: DecoderConfig, lengths: list[int], q: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """Attention alone: keys and values already lie as the layout wants them, nothing is copied."""
    num, longest, dim = len(lengths), max(lengths), config.head_dim
    kv_heads, group = config.num_kv_heads, config.num_heads // config.num_kv_heads
    grouped = q.view(num, WINDOW, kv_heads, group, dim).permute(2, 0, 1, 3, 4).flatten(2, 3)
    sizes = torch.tensor(lengths)[:, None, None]
    seen = torch.arange(longest) <= sizes - WINDOW + torch.arange(WINDOW)[:, None]
    mask = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)
    mask = mask.repeat_interleave(group, dim=1)[None]
    layers = range(config.num_layers)
    wide = [torch.rand(2, kv_heads, num, longest, dim) for _ in layers]
    narrow = [[torch.rand(2, kv_heads, 1, n, dim) for n in lengths] for _ in layers]
    masks = [mask[:, i : i + 1, :, :n].contiguous() for i, n in enumerate(lengths)]
    queries = [grouped[:, i : i + 1].contiguous() for i in range(num)]

    def padded() -> None:
        for keys, values in wide:
            F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)

    def packed() -> None:
        for layer in narrow:
            for query, (keys, values), added in zip(queries, layer, masks, strict=True):
                F.scaled_dot_product_attention(query, keys, values, attn_mask=added)

    return {"packed, kept": packed, "padded, kept": padded}


def take_turns(calls: dict[str, Callable[[], object]], turns: int) -> dict[str, list[float]]:
    """Seconds of each call, in every turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(turns):
        for name, call in calls.items():
            started = time.process_time()
            call()
            times[name].append(time.process_time() - started)
    return times
