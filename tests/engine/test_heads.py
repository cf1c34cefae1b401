"""Channels of heads are evened out before keys and queries are rounded to 8 bits."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.small_models import CASES, SHAPE, Paging, write_checkpoint

from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.quantized import Weight
from penstock.engine.models.weights import stored_weights
from penstock.engine.native import runner
from penstock.engine.native.heads import channel_scales
from penstock.engine.native.runner import NativeRunner

IDS = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], 100).astype(np.int32)
HEADS, KV_HEADS, DIM = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"], 16


@pytest.fixture(params=["qwen2", "qwen3"])
def uneven(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[DecoderConfig, dict]:
    """A model of which each key head has one pair of channels that is 60 times the others."""
    case = CASES[request.param]
    case = dataclasses.replace(case, changes=case.changes | {"head_dim": DIM})
    saved = write_checkpoint(tmp_path / "model", case)
    config = DecoderConfig.from_pretrained(saved.path)
    with stored_weights(saved.path, config, torch.float32, ()) as stored:
        weights = {name: w.clone() for name, w in stored.items() if isinstance(w, torch.Tensor)}
    for name, values in weights.items():
        if name.endswith("qkv_bias"):
            values.view(-1, DIM)[HEADS : HEADS + KV_HEADS, [3, 3 + DIM // 2]] = 60.0
        if name.endswith("k_norm"):
            values[[3, 3 + DIM // 2]] = 60.0
    return config, weights


def logits(config: DecoderConfig, weights: dict[str, Weight], kv: torch.dtype) -> torch.Tensor:
    made = NativeRunner(config, weights, torch.float32, 16, 16, 1, kv)
    return made.forward(Paging(16, 16).batch(("a", IDS, 0, len(IDS))))


def test_a_large_channel_does_not_drown_the_others(uneven, monkeypatch) -> None:
    right = logits(*uneven, torch.float32)
    even = (logits(*uneven, torch.int8) - right).square().mean()
    monkeypatch.setattr(runner, "channel_scales", lambda *_: ())
    assert (logits(*uneven, torch.int8) - right).square().mean() > 4 * even


def test_scores_stay_as_they_are(uneven) -> None:
    """A rotary pair has one factor, which cancels between query and key."""
    scales = dict(channel_scales(*uneven))
    assert scales
    for values in scales.values():
        heads = values.view(-1, 2, DIM // 2)
        assert torch.equal(heads[:, 0], heads[:, 1])
        queries, keys = heads[:HEADS], heads[HEADS:]
        both = queries * keys.repeat_interleave(HEADS // KV_HEADS, 0)
        torch.testing.assert_close(both, torch.ones_like(both))
        assert keys[0, 0, 3] < keys[0, 0, 4]


def test_layers_that_read_anothers_keys_have_its_factors(tmp_path: Path) -> None:
    """Without rounding the factors change nothing."""
    path = write_checkpoint(tmp_path, CASES["gemma4-shared"]).path
    config = DecoderConfig.from_pretrained(path)
    with stored_weights(path, config, torch.float32, ()) as stored:
        scales = dict(channel_scales(config, stored))
        assert len(scales) == config.num_layers > len(config.kv_layers)
        plain = logits(config, stored, torch.float32)
        scaled = logits(config, {**stored, **scales}, torch.float32)
    torch.testing.assert_close(scaled, plain, rtol=0, atol=1e-4)
