"""Numbers before times: what lab.bench.gpu compares with float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from lab.bench.gpu.tools import (
    BLOCK_SIZE,
    Ceilings,
    GpuSetting,
    Row,
    fill_randomly,
    log_normal_lengths,
    make_runner,
    poison,
    relative_error,
    release,
)
from penstock.engine.backends import make_attention
from penstock.engine.eager import EagerRunner
from penstock.engine.gpu.graphs import Draws, GraphRunner
from penstock.engine.kv_cache import PagedKVCache
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.decoder import Decoder
from penstock.engine.models.random import random_weights, shape
from penstock.engine.rehearsal import verification_batch
from penstock.engine.sampling import SamplingRows, sample_coupled
from penstock.engine.sampling.noise import Salt, row_keys


def numerics(setting: GpuSetting, _: Ceilings) -> Iterator[Row]:
    """Two layers of each shape, and attention alone, against float32 on fresh random inputs."""
    for name in (setting.target, *(name for name, _ in setting.drafters)):
        config = dataclasses.replace(shape(name), num_layers=2)
        yield from model_numerics(setting, name, config)
        release(setting.device)
    for kv_dtype, bound in ((setting.dtype, 1e-2), (torch.float8_e4m3fn, 1e-2)):
        yield attention_numerics(setting, shape(setting.target), kv_dtype, bound)
        yield attention_numerics(setting, shape(setting.drafters[0][0]), kv_dtype, bound)


def model_numerics(setting: GpuSetting, name: str, config: DecoderConfig) -> Iterator[Row]:
    device, kv_tokens = setting.device, 12_000
    runner = make_runner(config, device, setting.dtype, kv_tokens, setting.attention)
    exact = dataclasses.replace(config, dtype=torch.float32)
    weights = {k: w.float() for k, w in random_weights(config, setting.dtype, device).items()}
    cache = PagedKVCache(exact, runner.num_blocks + 1, BLOCK_SIZE, torch.float32, device)
    positions = min(config.max_position_embeddings, cache.num_blocks * BLOCK_SIZE)
    decoder = Decoder(exact, weights, positions, device)
    plain = EagerRunner(exact, decoder, cache, make_attention("reference", cache, config.num_heads))
    for batch_size, window in ((1, 1), (7, 1), (5, 5), (12, 5), (16, 5), (33, 5)):
        lengths = log_normal_lengths(batch_size, 200, 0.8, seed=batch_size)
        batch = verification_batch(
            lengths, window, runner.num_blocks, batch_size, config.vocab_size
        )
        fill_randomly(runner.cache)
        for mine, theirs in zip(runner.cache.layers, cache.layers, strict=True):
            theirs.copy_(mine)
        expected = plain.forward(batch)
        poison(device, expected.nbytes)
        logits, tokens, _ = runner.step(batch)
        error = relative_error(logits, expected)
        agree = float((tokens == logits.argmax(-1)).float().mean())
        yield Row(
            "numerics",
            f"{name}, 2 layers, {batch_size} × {window} rows",
            ratio=error,
            bar="< 0.02",
            passed=error < 0.02 and agree == 1.0,
            note=f"relative error; greedy samples are the highest logit: {agree:.0%}",
        )
    yield sampled_as_meant(runner, batch)


def sampled_as_meant(runner: GraphRunner, batch: Any) -> Row:
    """Seeded samples equal those of the plain sampler on the same logits."""
    rows = batch.num_tokens
    seeds = np.arange(rows, dtype=np.uint64)
    positions = batch.positions.astype(np.int64) + 1
    heat = np.full(rows, 0.8, dtype=np.float32)
    draws = Draws(heat, row_keys(seeds, positions, Salt.TARGET)[:, None])
    logits, tokens, _ = runner.step(batch, draws)
    params = SamplingRows(heat.astype(np.float64), np.ones(rows), np.zeros(rows, np.int64), seeds)
    agree = float((tokens == sample_coupled(logits.clone(), params, positions)).float().mean())
    return Row("numerics", "seeded samples agree", ratio=agree, bar="> 0.99", passed=agree > 0.99)


def attention_numerics(
    setting: GpuSetting, config: DecoderConfig, kv_dtype: torch.dtype, bound: float
) -> Row:
    config = dataclasses.replace(config, num_layers=1)
    device = setting.device
    cache = PagedKVCache(config, 1000, BLOCK_SIZE, kv_dtype, device)
    fill_randomly(cache)
    cache.scales[0] = torch.tensor([0.7, 1.3]) if kv_dtype == torch.float8_e4m3fn else 1.0
    exact = PagedKVCache(config, 1000, BLOCK_SIZE, torch.float32, device)
    exact.layers[0].copy_(cache.layers[0].float() * cache.scales[0][:, None, None, None, None])
    batch = verification_batch(log_normal_lengths(12, 900, 0.8, 1), 5, 1000, 1, 10)
    q = torch.randn(batch.num_tokens, config.num_heads, config.head_dim, device=device)
    q = q.to(setting.dtype)
    plain = make_attention("reference", exact, config.num_heads)
    expected = plain.attend(q.float(), 0, plain.prepare(batch))
    name = setting.attention if setting.attention != "packed" else "packed"
    if kv_dtype == torch.float8_e4m3fn and name == "packed":
        return Row("numerics", "attention, float8", note="packed does not read float8")
    backend = make_attention(name, cache, config.num_heads)
    poison(device, q.nbytes)
    error = relative_error(backend.attend(q, 0, backend.prepare(batch)), expected)
    case = f"attention, {config.num_heads}/{config.num_kv_heads} heads, {kv_dtype} keys and values"
    return Row("numerics", case, ratio=error, bar=f"< {bound:g}", passed=error < bound)
