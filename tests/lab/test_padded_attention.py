"""Padded attention equals plain attention, and is as wide as the longest sequence."""

from pathlib import Path

import pytest
import torch
from tests.engine.test_attention import BATCHES, HEADS, make_scene, seen_in_window
from tests.products import covering

from lab.common.cells import Cells
from lab.common.live import LiveScene
from lab.common.padded_attention import PaddedAttention, load_padded
from penstock.zoo.registry import WEIGHTS


@pytest.mark.parametrize(("num_kv_heads", "batch"), covering([1, 2, 6], BATCHES, strength=1))
def test_equals_plain_attention(num_kv_heads: int, batch: str) -> None:
    scene = make_scene(BATCHES[batch], num_kv_heads)
    out = scene.attend(PaddedAttention)
    torch.testing.assert_close(out, scene.expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("window", "batch"), covering([1, 33, 1000], BATCHES, strength=1))
def test_no_row_sees_more_than_its_window(window: int, batch: str) -> None:
    scene = make_scene(BATCHES[batch])
    expected = seen_in_window(scene, BATCHES[batch], window)
    found = scene.attend(PaddedAttention, window=window)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_it_is_as_wide_as_the_longest() -> None:
    scene = make_scene(BATCHES["verify"])
    padded = PaddedAttention(scene.cache, HEADS)
    (call,) = padded.prepare(scene.batch)
    assert len(call.kv.slots) == 5 * 100
    assert padded.gather.scratch_bytes == 500 * padded.gather.bytes_per_token


@pytest.mark.slow
def test_every_model_of_a_padded_engine_has_it() -> None:
    engine = load_padded(LiveScene(WEIGHTS, {}, 2, new_tokens=8, kept=Cells(Path("none"))), batch=1)
    runners = [engine.executor.target, *(d.runner for d in engine.executor.drafters.values())]
    found = [r.attention for r in runners if r is not None]
    assert len(found) > 1
    assert all(isinstance(attention, PaddedAttention) for attention in found)
    assert not engine.scheduler.learn.times.target.is_empty
