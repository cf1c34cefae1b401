"""The compiled kernels: transformers' logits, and the same bits however the work is cut."""

import dataclasses
import itertools
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.small_models import (
    CASES,
    Checkpoint,
    Checkpoints,
    Paging,
    check_ragged_mix,
    in_pieces,
    tokens,
    write_checkpoint,
)

from penstock.engine.eager import EagerRunner
from penstock.engine.models.checkpoint import CheckpointError
from penstock.engine.models.config import DecoderConfig
from penstock.engine.models.weights import load_weights
from penstock.engine.native.runner import NativeRunner

TOLERANCE = {"rtol": 0.0, "atol": 1e-4}
NUM_BLOCKS = 100
EXPERTS = ("router", "gate_up", "down")


every_case = pytest.mark.parametrize("case", CASES)


def load(
    path: Path,
    dtype: torch.dtype = torch.float32,
    block_size: int = 8,
    threads: int = 1,
    positions: int = 800,
) -> NativeRunner:
    """int8 is of the cache alone."""
    of_model = torch.float32 if dtype == torch.int8 else dtype
    room = (-(-positions // block_size), block_size)
    return NativeRunner.load(path, of_model, *room, threads, kv_dtype=dtype)


def paging(runner: NativeRunner) -> Paging:
    return Paging(runner.num_blocks, runner.block_size)


@every_case
def test_ragged_mix(checkpoint: Checkpoints, case: str) -> None:
    saved = checkpoint(case)
    check_ragged_mix(load(saved.path), saved)


@pytest.mark.parametrize("changes", [{"head_dim": 10}, {"hidden_size": 54}, {"head_dim": 80}])
def test_sizes_that_fill_no_vector(changes: dict[str, int], tmp_path: Path) -> None:
    case = dataclasses.replace(CASES["llama-bias"], changes={"attention_bias": True, **changes})
    saved, ids = write_checkpoint(tmp_path, case), tokens(30)
    runner = load(tmp_path, block_size=5)
    place = paging(runner)
    logits = [runner.forward(place.batch(("a", ids, *span))) for span in [(0, 13), (13, 30)]]
    torch.testing.assert_close(torch.cat(logits), saved.logits(ids), **saved.tolerance)


@pytest.mark.parametrize("case", ["llama-tied", "qwen2", "qwen3", "qwen3-moe"])
def test_bfloat16_checkpoint_in_float32_loses_nothing(case: str, tmp_path: Path) -> None:
    saved = write_checkpoint(tmp_path / "float32", CASES[case])
    path = tmp_path / "bfloat16"
    saved.model.to(torch.bfloat16).save_pretrained(path)
    widened = CASES[case].model.from_pretrained(path, dtype=torch.float32).eval()
    rounded = Checkpoint(path, widened)
    runner, ids = load(path), tokens(60)
    logits = runner.forward(paging(runner).batch(("a", ids, 0, 60)))
    torch.testing.assert_close(logits, rounded.logits(ids), **TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("case", ["llama-tied", "llama-bias", "qwen3", "gemma3", "granite"])
def test_fewer_bits_stay_near_float32(checkpoint, case, dtype) -> None:
    saved, ids = checkpoint(case), tokens(60)
    runner = load(saved.path, dtype)
    place = paging(runner)
    spans = [(0, 40), (40, 59), (59, 60)]
    logits = torch.cat([runner.forward(place.batch(("a", ids, a, b))) for a, b in spans])
    expected = saved.logits(ids)
    assert (logits - expected).abs().mean() < 0.02 * expected.std()


@pytest.mark.parametrize(
    ("case", "dtype", "block_size"),
    [
        ("llama", torch.float32, 16),
        ("llama-mha", torch.bfloat16, 8),
        ("qwen3", torch.float32, 5),
        ("qwen2", torch.bfloat16, 200),
        ("mistral-window", torch.float32, 8),
        ("qwen3-window", torch.bfloat16, 5),
        ("qwen3-5", torch.float32, 8),
        ("qwen3-5-even", torch.bfloat16, 16),
        ("qwen3-5", torch.int8, 5),
        ("llama", torch.int8, 16),
        ("qwen3", torch.int8, 5),
        ("mistral-window", torch.int8, 200),
        ("gemma3-scaled", torch.float32, 8),
        ("gemma3", torch.bfloat16, 16),
        ("qwen3-moe", torch.float32, 8),
        ("qwen3-moe-norm", torch.bfloat16, 16),
        ("qwen3-moe-dense", torch.float32, 8),
        ("qwen3-5-moe", torch.float32, 8),
        ("qwen3-next", torch.bfloat16, 5),
        ("glm4-moe", torch.float32, 16),
        ("glm4-moe-scaled", torch.int8, 8),
        ("gpt-oss", torch.float32, 8),
        ("gpt-oss", torch.bfloat16, 16),
        ("gpt-oss", torch.int8, 5),
        ("smollm3", torch.float32, 8),
        ("ministral3", torch.bfloat16, 5),
        ("granite-unrotated", torch.int8, 16),
        ("lfm2", torch.float32, 8),
        ("lfm2-even", torch.bfloat16, 16),
        ("gemma4", torch.float32, 8),
        ("gemma4", torch.int8, 16),
        ("gemma4-moe", torch.float32, 8),
        ("gemma4-moe", torch.bfloat16, 5),
        ("gemma4-shared", torch.bfloat16, 16),
        ("gemma4-shared", torch.int8, 5),
    ],
)
def test_logits_do_not_depend_on_the_batch(checkpoint, case, dtype, block_size) -> None:
    path = checkpoint(case).path
    ids = {
        name: tokens(length, seed=length)
        for name, length in zip("abcd", [190, 40, 7, 1], strict=True)
    }
    alone = {}
    for name, text in ids.items():
        runner = load(path, dtype, block_size)
        alone[name] = runner.forward(paging(runner).batch((name, text, 0, len(text))))
    for seed in range(5):
        pieces = in_pieces(load(path, dtype, block_size, threads=1 + seed % 3), ids, seed)
        for name in ids:
            assert torch.equal(pieces[name], alone[name]), (seed, name)


@pytest.mark.parametrize("window", [1, 2, 100, 128, 129, 200])
def test_windows_that_end_in_any_tile(window: int, tmp_path: Path) -> None:
    """As transformers masks them; without windows the logits are others."""
    case = dataclasses.replace(CASES["mistral-window"], changes={"sliding_window": window})
    saved, ids = write_checkpoint(tmp_path, case), tokens(250)
    expected = saved.logits(ids)
    for seed, block_size in enumerate((8, 5, 200)):
        found = in_pieces(load(tmp_path, block_size=block_size, threads=2), {"a": ids}, seed)
        torch.testing.assert_close(found["a"], expected, **TOLERANCE)
    config = DecoderConfig.from_pretrained(tmp_path)
    open_ = dataclasses.replace(config, variant=dataclasses.replace(config.variant, window=None))
    runner = NativeRunner(open_, load_weights(tmp_path, config), torch.float32, 64, 8, 1)
    unseen = runner.forward(Paging(64, 8).batch(("a", ids, 0, 250)))
    assert torch.allclose(unseen[:window], expected[:window], **TOLERANCE)
    assert not torch.allclose(unseen[window:], expected[window:], atol=0.01)


LOCAL = CASES["gemma3-scaled"].changes | {"layer_types": ["sliding_attention"] * 2}


@pytest.mark.parametrize("changes", [{}, {"head_dim": 10}, {"hidden_size": 54}, LOCAL])
def test_gemma_as_the_eager_decoder_has_it(changes: dict[str, Any], tmp_path: Path) -> None:
    """Also where no layer has the model's own rotary embedding, and rows fill no vector."""
    case = dataclasses.replace(CASES["gemma3"], changes=CASES["gemma3"].changes | changes)
    saved, ids = write_checkpoint(tmp_path, case), {"a": tokens(150)}
    eager = EagerRunner.load(tmp_path, torch.float32, torch.device("cpu"), NUM_BLOCKS, 8)
    expected = in_pieces(eager, ids, seed=0)["a"]
    found = [in_pieces(load(tmp_path, threads=n), ids, seed=n)["a"] for n in (1, 3)]
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], expected, **TOLERANCE)
    torch.testing.assert_close(found[0], saved.logits(ids["a"]), **TOLERANCE)


@pytest.mark.parametrize(
    ("case", "field"),
    [
        *(("gemma3", field) for field in ("o_norm", "down_norm", "q_norm", "k_norm")),
        *(("glm4-moe", field) for field in ("choice_bias", "shared_down")),
        ("qwen3-next", "router"),
    ],
)
def test_each_weight_counts(checkpoint: Checkpoints, case: str, field: str) -> None:
    """Negative control. Of routers it is the last row, which gates shared experts."""
    path, ids = checkpoint(case).path, tokens(40)
    config = DecoderConfig.from_pretrained(path)
    weights = load_weights(path, config)
    changed = weights[f"layers.1.{field}"]
    changed = changed[-1] if field == "router" else changed
    changed += torch.rand_like(changed)
    runner = NativeRunner(config, weights, torch.float32, NUM_BLOCKS, 8, 1)
    logits = [r.forward(paging(r).batch(("a", ids, 0, 40))) for r in (runner, load(path))]
    assert not torch.allclose(*logits, atol=1e-2)


def test_experts_that_are_as_probable(checkpoint: Checkpoints) -> None:
    """The first ones count where a router's rows are zeros. A row of NaN changes no other."""
    path, ids = checkpoint("qwen3-moe-norm").path, np.arange(9)
    config = DecoderConfig.from_pretrained(path)
    weights = load_weights(path, config)
    weights |= {name: 0 * matrix for name, matrix in weights.items() if name.endswith("router")}
    experts = dataclasses.replace(config.variant.experts, count=2)
    first = dataclasses.replace(
        config, variant=dataclasses.replace(config.variant, experts=experts)
    )
    of_first = {n: w[:2] if n.endswith(EXPERTS) else w for n, w in weights.items()}
    batch = Paging(NUM_BLOCKS, 8).batch(*((str(i), ids[i:], 0, 1) for i in ids))

    def logits(config: DecoderConfig, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return NativeRunner(config, weights, torch.float32, NUM_BLOCKS, 8, 2).forward(batch)

    expected = logits(first, of_first)
    assert torch.equal(logits(config, weights), expected)
    weights["embed_tokens"][4] = torch.nan
    poisoned = logits(config, weights)
    assert poisoned[4].isnan().all()
    assert torch.equal(poisoned[ids != 4], expected[ids != 4])


def test_another_order_of_the_same_sums_would_be_seen(checkpoint: Checkpoints) -> None:
    """Negative control."""
    path, ids = checkpoint("llama").path, tokens(50)
    config = DecoderConfig.from_pretrained(path)
    weights = load_weights(path, config)
    expected = load(path).forward(Paging(NUM_BLOCKS, 8).batch(("a", ids, 0, 50)))
    order = torch.randperm(config.intermediate_size)
    for name, matrix in weights.items():
        if name.endswith("gate_up"):
            weights[name] = torch.cat([half[order] for half in matrix.chunk(2)])
        elif name.endswith("down"):
            weights[name] = matrix[:, order].contiguous()
    runner = NativeRunner(config, weights, torch.float32, NUM_BLOCKS, 8, 1)
    logits = runner.forward(Paging(NUM_BLOCKS, 8).batch(("a", ids, 0, 50)))
    torch.testing.assert_close(logits, expected, **TOLERANCE)
    assert not torch.equal(logits, expected)


@pytest.mark.parametrize("case", ["qwen3", "qwen3-moe", "qwen3-5-moe"])
def test_threads_change_nothing(checkpoint: Checkpoints, case: str) -> None:
    path, ids = checkpoint(case).path, tokens(150)
    results = []
    for threads in (1, 2, 3, 7):
        runner = load(path, threads=threads)
        place = paging(runner)
        spans = [(0, 120), (120, 121), (121, 150)]
        results.append(torch.cat([runner.forward(place.batch(("a", ids, *s))) for s in spans]))
    for other in results[1:]:
        assert torch.equal(results[0], other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(
    ("name", "window"), [("mistral-window", None), ("mistral-window", 600), ("gpt-oss", 600)]
)
def test_threads_that_share_a_context(tmp_path, dtype, name, window) -> None:
    """Splits of a long text, which threads compute in any order, beside a short one."""
    changes = {"max_position_embeddings": 2048, "sliding_window": window}
    case = dataclasses.replace(CASES[name], changes=CASES[name].changes | changes)
    saved, ids, other = write_checkpoint(tmp_path, case), tokens(1300), tokens(1, seed=1)
    results = []
    for threads, ends in [(1, [1100]), (2, [512, 1100]), (3, [1, 700, 1100]), (7, [1100])]:
        runner = load(tmp_path, dtype, 16, threads, positions=1600)
        place, rows = paging(runner), []
        for start, stop in itertools.pairwise([0, *ends, 1101, 1107, 1300]):
            batch = place.batch(("a", ids, start, stop), (f"b{start}", other, 0, 1))
            rows.append(runner.forward(batch)[:-1])
        results.append(torch.cat(rows))
    for found in results[1:]:
        assert torch.equal(found, results[0])
    expected = saved.logits(ids)
    if dtype == torch.float32:
        torch.testing.assert_close(results[0], expected, **TOLERANCE)
    assert (results[0] - expected).abs().mean() < 0.02 * expected.std()


def test_two_runners_in_two_threads_share_the_pool(checkpoint: Checkpoints) -> None:
    cases, ids = ("llama", "qwen3"), {"a": tokens(150), "b": tokens(60, seed=1)}
    alone = [in_pieces(load(checkpoint(case).path), ids, seed=0) for case in cases]
    runners = [load(checkpoint(case).path, threads=3) for case in cases]
    with ThreadPoolExecutor(max_workers=2) as pool:
        together = list(pool.map(lambda runner: in_pieces(runner, ids, seed=0), runners))
    for expected, logits in zip(alone, together, strict=True):
        for name in ids:
            assert torch.equal(logits[name], expected[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("block_size", [5, 16])
def test_what_unused_slots_hold_is_never_read(checkpoint, dtype, block_size) -> None:
    path, ids = checkpoint("llama").path, tokens(140)
    clean, poisoned = (load(path, dtype, block_size) for _ in range(2))
    for keys, values in poisoned._cache:
        # Of integers, the scales are NaN then.
        keys.fill_(-1 if dtype == torch.int8 else torch.nan)
        values.fill_(-1 if dtype == torch.int8 else torch.nan)
    for start, stop in itertools.pairwise([0, 3, 4, 90, 97, 140]):
        logits = [r.forward(paging(r).batch(("a", ids, start, stop))) for r in (clean, poisoned)]
        assert logits[0].isfinite().all()
        assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("token_ids", [1, 2, 89], r"token_ids\[2\] is 89; allowed: 0\.\.88"),
        ("token_ids", [-1, 2, 3], r"token_ids\[0\] is -1"),
        ("positions", [4, 6, 6], r"positions\[1\] is 6; expected 5"),
        ("query_start", [0, 2], r"query_start must run from 0 to 3"),
        ("query_start", [1, 3], r"query_start must run from 0 to 3"),
        ("seq_lens", [2], r"seq_lens\[0\] is 2"),
        ("seq_lens", [257], r"seq_lens\[0\] is 257, .* at most 256"),
        ("block_tables", [[100]], r"block_tables\[0, 0\] is 100; allowed: 0\.\.99"),
        ("block_tables", [[-1]], r"block_tables\[0, 0\] is -1"),
        ("block_tables", [[]], r"block_tables has 0 columns; sequence 0 needs 1"),
        ("logits_rows", [1, 1], r"logits_rows\[1\] is 1; must ascend within 0\.\.2"),
        ("logits_rows", [3], r"logits_rows\[0\] is 3"),
        ("block_tables", [1, 2], r"block_tables is int32 \(2,\)"),
        ("positions", [4, 5], r"positions is int32 \(2,\); expected contiguous int32 \(3,\)"),
    ],
)
def test_a_wrong_batch_is_refused(checkpoint, field, value, reason) -> None:
    runner = load(checkpoint("llama").path)
    good = paging(runner).batch(("a", tokens(7), 4, 7))
    bad = dataclasses.replace(good, **{field: np.array(value, dtype=np.int32)})
    with pytest.raises(ValueError, match=reason):
        runner.forward(bad)
    with pytest.raises(ValueError, match="is int64"):
        runner.forward(dataclasses.replace(good, **{field: getattr(good, field).astype(np.int64)}))


def test_bad_sizes_and_folders_are_refused(checkpoint: Checkpoints, tmp_path: Path) -> None:
    path = checkpoint("llama").path
    with pytest.raises(ValueError, match=r"dtype is torch\.float16; allowed: torch\.float32"):
        NativeRunner.load(path, torch.float16, 4, 4, 1)
    with pytest.raises(ValueError, match="num_threads is 0; must be at least 1"):
        NativeRunner.load(path, torch.float32, 4, 4, 0)
    with pytest.raises(CheckpointError, match="no such folder"):
        NativeRunner.load(tmp_path / "missing", torch.float32, 4, 4, 1)
