"""Steps of few rows for a GPU, computed here on the CPU: the recording itself needs a GPU."""

import numpy as np
import pytest
import torch
from tests.engine.small_models import CASES, Checkpoints, Paging, in_pieces, tokens
from tests.products import first_fast

from penstock.engine.cuda_graphs import GraphRunner, compute_layer
from penstock.engine.eager import EagerRunner

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK_SIZE = 64, 8
IDS = {"a": tokens(70), "b": tokens(23, seed=1), "c": tokens(41, seed=2)}


def load(checkpoint: Checkpoints, name: str, *, compiled: bool = False) -> GraphRunner:
    path = checkpoint(name).path
    runner = GraphRunner.load(path, torch.float32, CPU, NUM_BLOCKS, BLOCK_SIZE)
    if not compiled:
        runner.compute_layer = compute_layer
    return runner


def is_recorded(name: str) -> bool:
    """Others are computed kernel by kernel, as without graphs."""
    return not name.startswith(
        ("qwen3-moe", "qwen3-5", "qwen3-next", "glm4", "gpt-oss", "lfm2", "gemma4-moe")
    )


@pytest.mark.parametrize(
    "name",
    first_fast(sorted(CASES, key=is_recorded, reverse=True), sum(map(is_recorded, CASES)) + 1),
)
def test_logits_are_those_of_transformers(checkpoint: Checkpoints, name: str) -> None:
    runner, saved = load(checkpoint, name), checkpoint(name)
    found = in_pieces(runner, IDS, seed=0)
    for sequence, ids in IDS.items():
        atol = max(2e-4, saved.tolerance["atol"])
        torch.testing.assert_close(found[sequence], saved.logits(ids), rtol=0, atol=atol)
    assert bool(runner._steps) == is_recorded(name)


@pytest.mark.slow
def test_compiled_layers_give_the_same(checkpoint: Checkpoints) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    found = in_pieces(load(checkpoint, "llama", compiled=True), IDS, seed=1)
    assert counters["stats"]["unique_graphs"] == 1, "one version, of any number of rows and keys"
    for sequence, ids in IDS.items():
        expected = checkpoint("llama").logits(ids)
        torch.testing.assert_close(found[sequence], expected, rtol=0, atol=2e-4)


def test_another_request_that_is_not_finite_changes_nothing(checkpoint: Checkpoints) -> None:
    """A row that pads a graph, or lies behind a text's end, reads no block but its own."""
    runner, place = load(checkpoint, "llama"), Paging(NUM_BLOCKS, BLOCK_SIZE)
    ids = tokens(20)
    runner.forward(place.batch(("ill", ids, 0, 20), ("well", ids, 0, 19)))
    ill = place.batch(("ill", ids, 0, 20)).block_tables[0]
    for layer in runner.cache.layers:
        layer[:, :, ill] = torch.nan
    found = runner.forward(place.batch(("ill", ids, 19, 20), ("well", ids, 19, 20)))
    assert not found[0].isfinite().any()
    expected = checkpoint("llama").logits(ids)[-1]
    torch.testing.assert_close(found[1], expected, rtol=0, atol=2e-4)


def test_rows_that_pad_write_no_block_of_a_request(checkpoint: Checkpoints) -> None:
    runner, place = load(checkpoint, "llama"), Paging(NUM_BLOCKS, BLOCK_SIZE)
    spans = [(name, tokens(9), 0, 9) for name in "abc"]
    runner.forward(place.batch(*spans, logits="last"))
    before = [layer[:, :, :NUM_BLOCKS].clone() for layer in runner.cache.layers]
    batch = place.batch(("a", tokens(9), 8, 9))  # one row, in a graph of two
    runner.forward(batch)
    written = batch.block_tables[0, 1]
    for layer, known in zip(runner.cache.layers, before, strict=True):
        others = np.delete(np.arange(NUM_BLOCKS), written)
        torch.testing.assert_close(layer[:, :, others], known[:, :, others], rtol=0, atol=0)
        assert layer[:, :, NUM_BLOCKS].any()  # the spare one


def test_large_steps_are_computed_kernel_by_kernel(checkpoint: Checkpoints) -> None:
    runner, place = load(checkpoint, "llama"), Paging(NUM_BLOCKS, BLOCK_SIZE)
    ids = tokens(200)
    runner.forward(place.batch(("prompt", ids, 0, 200), logits="last"))
    assert not runner._steps
    runner.forward(place.batch(("prompt", ids, 199, 200)))
    assert list(runner._steps) == [(2, 256 // BLOCK_SIZE)]


def test_only_its_own_runner_has_a_spare_block(checkpoint: Checkpoints) -> None:
    eager = EagerRunner.load(checkpoint("llama").path, torch.float32, CPU, 4, BLOCK_SIZE)
    assert eager.cache.num_blocks == 4
    assert load(checkpoint, "llama").cache.num_blocks == NUM_BLOCKS + 1
