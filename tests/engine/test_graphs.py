"""Steps over static buffers equal the ordinary path; here without a GPU, so never recorded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.engine.small_models import SHAPE, Checkpoint, Paging
from tests.engine.test_attention import WHY_NOT

from penstock.engine import graphs
from penstock.engine.eager import EagerRunner
from penstock.engine.graphs import Draws, GraphRunner, Late, size_of
from penstock.engine.sampling import SamplingRows, sample_coupled
from penstock.engine.sampling.noise import Salt, row_keys

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK_SIZE = 64, 8
VOCAB: int = SHAPE["vocab_size"]
CLOSE = {"rtol": 0.0, "atol": 2e-4}
Checkpoints = Callable[[str], Checkpoint]

every_way = pytest.mark.parametrize(
    "way",
    [
        "torch",
        pytest.param(
            "triton",
            marks=pytest.mark.skipif(
                WHY_NOT["triton_paged"] is not None, reason=str(WHY_NOT["triton_paged"])
            ),
        ),
    ],
)


@pytest.fixture
def runners(
    checkpoint: Checkpoints, case: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[EagerRunner, GraphRunner]:
    """The ordinary one, and one over static buffers, each with its own cache."""
    if way == "torch":
        monkeypatch.setattr(graphs, "why_not_triton", lambda device: "not asked for")
    plain, other = (
        EagerRunner.load(checkpoint(case).path, torch.float32, CPU, NUM_BLOCKS + 1, BLOCK_SIZE)
        for _ in range(2)
    )
    return plain, GraphRunner(other)


def texts(count: int) -> list[np.ndarray]:
    return list(np.random.default_rng(5).integers(VOCAB, size=(count, 100)))


def prefilled(
    runners: tuple[EagerRunner, GraphRunner], lengths: list[int]
) -> tuple[Paging, list[np.ndarray]]:
    paging, ids = Paging(NUM_BLOCKS, BLOCK_SIZE), texts(len(lengths))
    spans = [(str(i), ids[i], 0, n) for i, n in enumerate(lengths)]
    for runner in runners:
        runner.forward(paging.batch(*spans))
    return paging, ids


cases = pytest.mark.parametrize(
    "case", ["llama", "llama-bias", "llama-tied", "qwen2", "qwen3-bias"]
)


@cases
@every_way
def test_steps_equal_the_ordinary_path(
    runners: tuple[EagerRunner, GraphRunner], way: str, case: str
) -> None:
    plain, graphed = runners
    paging, ids = prefilled(runners, [33, 7, 62])
    for ends in ([34, 12, 63], [35, 13, 64], [36, 14, 65], [40, 20, 66]):
        starts = plain_ends if (plain_ends := getattr(paging, "ends", None)) else [33, 7, 62]
        spans = [(str(i), ids[i], starts[i], ends[i]) for i in range(3)]
        for logits in ("all", "last"):
            batch = paging.batch(*spans, logits=logits)
            assert graphed.records(batch)
            torch.testing.assert_close(graphed.forward(batch), plain.forward(batch), **CLOSE)
        paging.ends = ends  # type: ignore[attr-defined]


@pytest.mark.parametrize("case", ["llama"])
@every_way
def test_some_rows_of_logits(runners: tuple[EagerRunner, GraphRunner], way: str, case: str) -> None:
    """A chunk of a prompt whose logits nobody wants, beside requests that verify."""
    plain, graphed = runners
    paging, ids = prefilled(runners, [20, 30])
    batch = paging.batch(("0", ids[0], 20, 24), ("1", ids[1], 30, 42))
    for wanted in ([0, 1, 2, 3], [], [3], [1, 15]):
        object.__setattr__(batch, "logits_rows", np.array(wanted, dtype=np.int32))
        torch.testing.assert_close(graphed.forward(batch), plain.forward(batch), **CLOSE)


@pytest.mark.parametrize("case", ["llama"])
@every_way
def test_padding_writes_only_to_scratch(
    runners: tuple[EagerRunner, GraphRunner], way: str, case: str
) -> None:
    _, graphed = runners
    paging, ids = prefilled(runners, [9, 10, 11])
    batch = paging.batch(*((str(i), ids[i], n, n + 1) for i, n in enumerate([9, 10, 11])))
    assert size_of(3, graphs.ROWS) > 3, "some rows must pad"
    before = [layer.clone() for layer in graphed.cache.layers]
    graphed.forward(batch)
    written = batch.slot_mapping(BLOCK_SIZE)
    for old, new in zip(before, graphed.cache.layers, strict=True):
        changed = (old != new).any(-1).any(0).any(0).view(-1).nonzero().squeeze(1).tolist()
        assert set(changed) - {graphed.scratch_slot} == set(written.tolist())


@pytest.mark.parametrize("case", ["llama", "qwen3"])
@every_way
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_drafting_loop_is_as_step_by_step(
    runners: tuple[EagerRunner, GraphRunner], way: str, case: str, temperature: float
) -> None:
    plain, graphed = runners
    paging, ids = prefilled(runners, [33, 7, 62, 15])
    ends, limits = np.array([35, 8, 63, 17]), np.array([4, 1, 3, 4], dtype=np.int32)
    paging.batch(*((str(i), ids[i], 0, int(ends[i]) + 4) for i in range(4)))  # room for drafts
    starts = [33, 7, 62, 15]
    first = paging.batch(
        *((str(i), ids[i], starts[i], int(ends[i])) for i in range(4)), logits="last"
    )
    params = SamplingRows(
        np.full(4, temperature), np.ones(4), np.zeros(4, np.int64), np.arange(4, dtype=np.uint64)
    )
    keys = np.concatenate([row_keys(params.seed, ends + s, Salt.TARGET) for s in range(4)])
    drafted = graphed.draft(first, limits, Draws(np.full(16, temperature), keys[:, None]), VOCAB)

    logits = plain.forward(first)
    for step in range(4):
        if step:
            spans = [
                (str(i), np.append(ids[i][: ends[i]], drafted[i, :step]), end, end + 1)
                for i in range(4)
                for end in [int(ends[i]) + step - 1]
            ]
            logits = plain.forward(paging.batch(*spans))
        expected = sample_coupled(logits, params, ends + step)
        alive = torch.from_numpy(limits > step)
        assert drafted[alive, step].tolist() == expected[alive].tolist()


@pytest.mark.parametrize("case", ["llama"])
@every_way
def test_tokens_that_the_host_does_not_know(
    runners: tuple[EagerRunner, GraphRunner], way: str, case: str
) -> None:
    plain, graphed = runners
    paging, ids = prefilled(runners, [20, 30])
    true = paging.batch(("0", ids[0], 20, 24), ("1", ids[1], 30, 33))
    expected = plain.forward(true)
    late = np.array([1, 2, 5])
    tokens = torch.from_numpy(true.token_ids[late[::-1]])
    true.token_ids[late] = 0
    wrong = graphed.forward(true)
    assert (wrong - expected).abs().max() > 0.1
    places = np.full(true.num_tokens, -1)
    places[late] = [2, 1, 0]
    logits, samples, _ = graphed.step(true, late=Late(places, tokens))
    torch.testing.assert_close(logits, expected, **CLOSE)
    assert samples.tolist() == expected.argmax(-1).tolist()


@pytest.mark.parametrize("case", ["llama"])
@every_way
def test_longer_chunks_go_the_ordinary_way(
    runners: tuple[EagerRunner, GraphRunner], way: str, case: str
) -> None:
    plain, graphed = runners
    batch = Paging(NUM_BLOCKS, BLOCK_SIZE).batch(("a", texts(1)[0], 0, 17))
    assert not graphed.records(batch)
    torch.testing.assert_close(graphed.forward(batch), plain.forward(batch), **CLOSE)


@pytest.mark.parametrize("case", ["llama"])
@pytest.mark.parametrize("way", ["torch"])
def test_negative_control_a_step_that_forgets_its_lengths_is_caught(
    runners: tuple[EagerRunner, GraphRunner],
    way: str,
    case: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, graphed = runners
    paging, ids = prefilled(runners, [33, 7])
    spans = [("0", ids[0], 33, 34), ("1", ids[1], 7, 8)]
    graphed.forward(paging.batch(*spans))
    plain.forward(paging.batch(*spans))
    fill = graphs.StaticBatch.fill

    def stale(self: graphs.StaticBatch, *args: object, **kwargs: object) -> None:
        lens = self.seq_lens.clone()
        fill(self, *args, **kwargs)  # type: ignore[arg-type]
        self.seq_lens.copy_(lens)

    monkeypatch.setattr(graphs.StaticBatch, "fill", stale)
    batch = paging.batch(("0", ids[0], 34, 35), ("1", ids[1], 8, 9))
    assert (graphed.forward(batch) - plain.forward(batch)).abs().max() > 1e-2
