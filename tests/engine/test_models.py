"""Logits equal transformers', whatever the architecture, the batch's shape and the backend."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.engine.small_models import (
    CASES,
    SHAPE,
    Checkpoint,
    Checkpoints,
    Paging,
    check_ragged_mix,
    tokens,
    write_checkpoint,
)
from tests.products import covering

from penstock.engine.backends import ATTENTION, why_not_native
from penstock.engine.eager import EagerRunner
from penstock.engine.native.runner import NativeRunner
from penstock.engine.runner import RaggedBatch

CPU = torch.device("cpu")
TOLERANCE = {"rtol": 0.0, "atol": 1e-4}
NUM_BLOCKS, BLOCK_SIZE = 64, 8


every_backend = pytest.mark.parametrize("attention", ATTENTION)


def load(
    checkpoint: Checkpoint, attention: str = "packed", dtype: torch.dtype = torch.float32
) -> EagerRunner:
    return EagerRunner.load(
        checkpoint.path, dtype, CPU, NUM_BLOCKS, BLOCK_SIZE, ATTENTION[attention]
    )


@pytest.mark.parametrize(("case", "attention"), covering(CASES, ATTENTION, strength=1))
def test_ragged_mix(checkpoint: Checkpoints, case: str, attention: str) -> None:
    saved = checkpoint(case)
    check_ragged_mix(load(saved, attention), saved)


def test_only_the_rows_that_are_asked_for(checkpoint: Checkpoints) -> None:
    saved, ids = checkpoint("qwen3"), tokens(30)
    runner, paging = load(saved), Paging(NUM_BLOCKS, BLOCK_SIZE)
    batch = paging.batch(("a", ids, 0, 20), ("b", ids, 0, 9), logits="last")
    expected = saved.logits(ids)[[19, 8]]
    torch.testing.assert_close(runner.forward(batch), expected, **TOLERANCE)

    silent = dataclasses.replace(
        paging.batch(("a", ids, 20, 25)), logits_rows=np.empty(0, dtype=np.int32)
    )
    assert runner.forward(silent).shape == (0, SHAPE["vocab_size"])
    after = runner.forward(paging.batch(("a", ids, 25, 30)))
    torch.testing.assert_close(after, saved.logits(ids)[25:], **TOLERANCE)


@pytest.mark.parametrize(
    ("case", "attention"),
    covering(["llama-tied", "qwen3", "phi3-partial", "gemma3-scaled"], ATTENTION, strength=1),
)
def test_bfloat16_stays_near_float32(checkpoint: Checkpoints, case: str, attention: str) -> None:
    saved, ids = checkpoint(case), tokens(60)
    runner = load(saved, attention, torch.bfloat16)
    paging = Paging(NUM_BLOCKS, BLOCK_SIZE)
    logits = torch.cat(
        [runner.forward(paging.batch(("a", ids, a, b))) for a, b in [(0, 40), (40, 59), (59, 60)]]
    )
    expected = saved.logits(ids)
    assert (logits - expected).abs().mean() < 0.02 * expected.std()


class _Turned(RaggedBatch):
    """The rows turned by one position too many, but stored where they belong."""

    def slot_mapping(self, block_size: int) -> npt.NDArray[np.int64]:
        fields = _fields(self) | {"positions": self.positions - 1}
        return RaggedBatch(**fields).slot_mapping(block_size)


def _fields(batch: RaggedBatch) -> dict[str, npt.NDArray[np.int32]]:
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}


@every_backend
def test_errors_would_be_seen(checkpoint: Checkpoints, attention: str) -> None:
    """Negative control: what these tests must not let pass moves logits by far more."""
    saved, ids = checkpoint("llama"), tokens(40)
    expected = saved.logits(ids)[30:]

    def deviation(spoil: Callable[[RaggedBatch], RaggedBatch]) -> float:
        runner, paging = load(saved, attention), Paging(NUM_BLOCKS, BLOCK_SIZE)
        runner.forward(paging.batch(("a", ids, 0, 30)))
        logits = runner.forward(spoil(paging.batch(("a", ids, 30, 40))))
        return float((logits - expected).abs().max())

    def swap_blocks(batch: RaggedBatch) -> RaggedBatch:
        return dataclasses.replace(batch, block_tables=batch.block_tables[:, [4, 1, 2, 3, 0]])

    def turn(batch: RaggedBatch) -> RaggedBatch:
        return _Turned(**_fields(batch) | {"positions": batch.positions + 1})

    assert deviation(lambda batch: batch) < 1e-4
    assert deviation(turn) > 1e-2
    # With the last, half-filled one: two full blocks may change places, keys know their positions.
    assert deviation(swap_blocks) > 1e-2


_DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_EXPERTS = {"moe_intermediate_size": 96, "num_experts": 16}
_GEMMA: dict[str, Any] = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "global_head_dim": 128,
    "vocab_size_per_layer_input": 2048,
}
LARGER: dict[str, dict[str, Any]] = {
    "qwen3-5": _DELTA,
    "qwen3-5-moe": _DELTA | _EXPERTS | {"num_experts_per_tok": 4},
    "qwen3-next": _DELTA | _EXPERTS | {"num_experts_per_tok": 4},
    "glm4-moe": {"moe_intermediate_size": 96, "n_routed_experts": 16, "num_experts_per_tok": 4},
    "gpt-oss": {"layer_types": ["sliding_attention", "full_attention"] * 3},
    "gemma4": _GEMMA,
    "gemma4-shared": _GEMMA,
    "gemma4-moe": _GEMMA | _EXPERTS | {"top_k_experts": 4},
    "smollm3": {"no_rope_layers": [1, 1, 1, 0, 1, 1]},
    "ministral3": {},
    "granite": {"attention_multiplier": 1 / 64},
    "granite-hybrid": {"layer_types": ["attention"] * 6, "mamba_n_heads": 8},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 2},
}
"""Models of a few million parameters, by case: what differs from it and from the others."""


@pytest.mark.slow
@pytest.mark.skipif(why_not_native() is not None, reason="no native kernels")
@pytest.mark.parametrize("case", LARGER)
def test_greedy_text_is_that_of_transformers(case: str, tmp_path: Path) -> None:
    """A prompt of 300, then 100 tokens one by one."""
    known = CASES[case].changes
    shape = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 640, "head_dim": 64}
    shape |= {"num_hidden_layers": 6, "num_attention_heads": 4, "max_position_embeddings": 1024}
    changes = known | shape | {"eos_token_id": None} | LARGER[case]
    saved = write_checkpoint(tmp_path, dataclasses.replace(CASES[case], changes=changes))
    prompt = np.random.default_rng(0).integers(2048, size=300)
    theirs = saved.model.generate(
        torch.from_numpy(prompt)[None], max_new_tokens=100, do_sample=False
    )[0].numpy()
    expected = saved.logits(theirs)
    for runner in (
        NativeRunner.load(tmp_path, torch.float32, 200, 8, 2),
        EagerRunner.load(tmp_path, torch.float32, CPU, 200, 8),
    ):
        place, text = Paging(200, 8), list(prompt)
        logits = [runner.forward(place.batch(("a", prompt, 0, 300)))]
        for _ in range(100):
            text.append(int(logits[-1][-1].argmax()))
            size = len(text)
            logits.append(runner.forward(place.batch(("a", np.array(text), size - 1, size))))
        assert text == theirs.tolist()
        assert (torch.cat(logits) - expected).abs().max() < 1e-3 * expected.std()
