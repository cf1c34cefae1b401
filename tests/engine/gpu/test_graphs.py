"""Steps over static buffers equal the ordinary path; here without a GPU, so never captured."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.engine.small_models import SHAPE, Checkpoint, Paging
from tests.engine.test_attention import WHY_NOT

from penstock.engine.eager import EagerRunner
from penstock.engine.gpu import graphs
from penstock.engine.gpu.graphs import Draws, GraphRunner, Late, Stepped, size_of
from penstock.engine.gpu.static_batch import BatchShape, StepInputs
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
            assert graphed.captures(batch)
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


@pytest.mark.parametrize("case", ["llama"])
@every_way
def test_padding_computes_with_zeros(
    runners: tuple[EagerRunner, GraphRunner], way: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with what the memory held before: its squares could overflow, which warns here."""
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: empty_like(*a, **k).fill_(1.2e19))
    plain, graphed = runners
    paging, ids = prefilled(runners, [9, 10, 11])
    batch = paging.batch(*((str(i), ids[i], n, n + 1) for i, n in enumerate([9, 10, 11])))
    torch.testing.assert_close(graphed.forward(batch), plain.forward(batch), **CLOSE)


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
    assert not graphed.captures(batch)
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


@pytest.mark.parametrize("case", ["llama"])
@every_way
@pytest.mark.parametrize("by_row", [True, False])
def test_what_the_host_did_not_know_is_put_in(
    runners: tuple[EagerRunner, GraphRunner], way: str, case: str, by_row: bool
) -> None:
    operations, rng = runners[1]._operations, np.random.default_rng(3)
    capacity, num_draws = BatchShape(24, 4, 8, 5, 9), 24 if by_row else 3 * 4
    given = StepInputs.allocate(capacity, num_draws, CPU)
    given.flat.copy_(torch.from_numpy(rng.integers(0, 9, given.flat.shape)))
    batch, seqs = given.batch, np.repeat([0, 1, 2, -1], [5, 8, 1, 10])
    batch.row_seq.copy_(torch.from_numpy(seqs))
    batch.positions.copy_(torch.from_numpy(rng.integers(9, 40, 24)))
    given.places[::2] = -1
    late = torch.from_numpy(rng.integers(100, 200, 9, dtype=np.int32))
    settled = batch.with_own_rows()
    keys = torch.zeros(num_draws, 2, dtype=torch.int32)
    operations.settle(given, late, settled, keys, 999, by_row=by_row)

    short = np.where(seqs < 0, 0, given.short.numpy()[seqs])
    positions = batch.positions.numpy() - short
    blocks = batch.tables.numpy()[seqs, positions // BLOCK_SIZE]
    slots = np.where(seqs < 0, 999, blocks * BLOCK_SIZE + positions % BLOCK_SIZE)
    places = given.places.numpy()
    tokens = np.where(places < 0, batch.token_ids.numpy(), late.numpy()[places])
    of_draw = short if by_row else np.tile(given.short.numpy(), 3)
    assert settled.positions[seqs >= 0].tolist() == positions[seqs >= 0].tolist()
    assert settled.slots.tolist() == slots.tolist()
    assert settled.token_ids.tolist() == tokens.tolist()
    assert settled.seq_lens.tolist() == (batch.seq_lens - given.short).tolist()
    assert (keys.numpy() == given.keys.numpy()[np.arange(num_draws), of_draw]).all()


@pytest.mark.parametrize("case", ["llama"])
@every_way
def test_what_a_verification_comes_to(
    runners: tuple[EagerRunner, GraphRunner], way: str, case: str
) -> None:
    rng = np.random.default_rng(4)
    counts = np.array([1, 16, 5, 2, 9, 6, 1] * 3)
    ends = np.cumsum(counts)
    token_ids = torch.from_numpy(rng.integers(0, 2, ends[-1] + 7, dtype=np.int32))
    samples = torch.from_numpy(rng.integers(0, 2, ends[-1], dtype=np.int32))
    samples[:-1][rng.random(len(samples) - 1) < 0.6] = token_ids[1 : len(samples)][0]
    chosen = rng.permutation(len(counts))[:17]
    rows = (ends - counts)[chosen].astype(np.int32)
    limits = (counts - 1 - rng.integers(0, 2, len(counts)).clip(max=counts - 1))[chosen]
    stepped = Stepped(torch.empty(0), samples, token_ids)
    short, known = runners[1].outcome(stepped, rows, limits.astype(np.int32))
    for i, (row, limit) in enumerate(zip(rows.tolist(), limits.tolist(), strict=True)):
        accepted = 0
        while accepted < limit and samples[row + accepted] == token_ids[row + accepted + 1]:
            accepted += 1
        last = row + accepted
        assert short[i] == limit - accepted
        assert known[2 * i : 2 * i + 2].tolist() == [int(token_ids[last]), int(samples[last])]
    assert len(set(short.tolist())) > 3
