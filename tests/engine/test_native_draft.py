"""Drafting and sampling in compiled code: step by step, and the reference, bit for bit."""

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
import torch
from tests.engine.small_models import SHAPE, Checkpoint, Checkpoints, Paging, tokens

from penstock.core.learn.confidence import EDGES, Stop
from penstock.core.types import DraftOrder, Request, SamplingParams, Verdict
from penstock.engine.drafters.model import ModelDrafter
from penstock.engine.native.runner import NativeRunner
from penstock.engine.native.sampler import sample_unfiltered
from penstock.engine.runner import RaggedBatch
from penstock.engine.sampling import SamplingRows
from penstock.engine.sampling import sample_coupled as sample_reference
from penstock.engine.sampling.noise import Salt
from penstock.engine.sequences import TokenBuffer

BLOCK_SIZE = 8
STEPS = np.array([4, 0, 1, 6, 4], dtype=np.int32)
TEMPERATURES = np.array([0.0, 0.0, 0.7, 1.0, 1.5])
SEEDS = np.array([3, 0, 2**64 - 1, 5, 11], dtype=np.uint64)
SALTS = np.array([0, 0, Salt.TARGET, Salt.DRAFT, Salt.TARGET], dtype=np.int32)
SPANS = [(0, 9), (3, 8), (0, 1), (7, 8), (0, 50)]


def load(
    checkpoint: Checkpoint, dtype: torch.dtype = torch.float32, threads: int = 1
) -> NativeRunner:
    of_model = torch.float32 if dtype == torch.int8 else dtype
    return NativeRunner.load(checkpoint.path, of_model, 64, BLOCK_SIZE, threads, kv_dtype=dtype)


def prepared(runner: NativeRunner) -> tuple[RaggedBatch, list[npt.NDArray[np.int64]]]:
    """Five sequences with some context in the cache, and room in their tables for the draft."""
    place = Paging(runner.num_blocks, BLOCK_SIZE)
    texts = [tokens(60, seed=i) for i in range(len(SPANS))]
    before = [(str(i), texts[i], 0, start) for i, (start, _) in enumerate(SPANS) if start]
    runner.forward(place.batch(*before))
    catch_up = place.batch(*((str(i), texts[i], *span) for i, span in enumerate(SPANS)))
    room = place.batch(*((str(i), texts[i], 0, end + 6) for i, (_, end) in enumerate(SPANS)))
    return dataclasses.replace(catch_up, block_tables=room.block_tables), texts


def one_row_each(
    batch: RaggedBatch, alive: list[int], token_ids: list[int], ahead: int
) -> RaggedBatch:
    ends = batch.seq_lens[alive] + ahead
    rows = np.arange(len(alive) + 1, dtype=np.int32)
    return RaggedBatch(
        token_ids=np.array(token_ids, dtype=np.int32),
        positions=ends - 1,
        query_start=rows,
        seq_lens=ends,
        block_tables=batch.block_tables[alive],
        logits_rows=rows[:-1],
    )


def draft_step_by_step(
    runner: NativeRunner,
) -> tuple[npt.NDArray[np.int32], dict[tuple[int, int], torch.Tensor]]:
    batch, _ = prepared(runner)
    token_ids = np.full((len(STEPS), int(STEPS.max())), -1, dtype=np.int32)
    logits_of = {}
    last_rows = dataclasses.replace(batch, logits_rows=batch.query_start[1:] - 1)
    logits = runner.forward(last_rows)[np.flatnonzero(STEPS > 0)]
    for step in range(int(STEPS.max())):
        alive = np.flatnonzero(step < STEPS)
        if step:
            last = token_ids[alive, step - 1].tolist()
            logits = runner.forward(one_row_each(batch, alive.tolist(), last, step))
        positions = batch.seq_lens[alive].astype(np.int64) + step
        order = (TEMPERATURES[alive], SEEDS[alive], positions, SALTS[alive])
        sampled = sample_unfiltered(logits, *order)
        token_ids[alive, step] = sampled
        logits_of |= {(int(i), step): row for i, row in zip(alive, logits, strict=True)}
    return token_ids, logits_of


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *(("llama-tied", torch.float32), ("qwen3", torch.bfloat16)),
        *(("qwen3", torch.int8), ("gemma3", torch.float32)),
    ],
)
def test_a_draft_is_its_steps(checkpoint, case, dtype, threads) -> None:
    expected, logits_of = draft_step_by_step(load(checkpoint(case), dtype))
    runner = load(checkpoint(case), dtype, threads)
    batch, _ = prepared(runner)
    draft = runner.draft(batch, STEPS, TEMPERATURES, SEEDS, SALTS, return_logits=True)
    np.testing.assert_array_equal(draft.token_ids, expected)
    assert draft.logits.shape == (5, 6, SHAPE["vocab_size"])
    for (seq, step), row in logits_of.items():
        assert torch.equal(draft.logits[seq, step], row)
    again, _ = prepared(runner)
    unseen = runner.draft(again, STEPS, TEMPERATURES, SEEDS, SALTS)
    assert unseen.logits is None
    np.testing.assert_array_equal(unseen.token_ids, expected)


def request_of(request_id: str, prompt: tuple[int, ...], sampling: SamplingParams) -> Request:
    return Request(request_id, len(prompt), 20, prompt_token_ids=prompt, sampling=sampling)


def confidences_of(
    logits: torch.Tensor, token_ids: npt.NDArray[np.int32]
) -> npt.NDArray[np.float32]:
    """[5, 6]: of each token, of the likeliest one where it was drawn."""
    divisor = torch.from_numpy(np.where(TEMPERATURES > 0, TEMPERATURES, 1.0)).float()
    probs = (logits / divisor[:, None, None]).softmax(dim=-1)
    chosen = torch.from_numpy(token_ids.clip(0).astype(np.int64)).unsqueeze(-1)
    own = probs.gather(-1, chosen).squeeze(-1).numpy()
    return np.where((SALTS == Salt.DRAFT)[:, None], probs.amax(dim=-1).numpy(), own)


@pytest.mark.parametrize("least", [0.0, 0.3, 0.6, 1.0])
def test_drafts_end_where_survival_falls(checkpoint: Checkpoints, least: float) -> None:
    runner = load(checkpoint("llama"))
    batch, _ = prepared(runner)
    whole = runner.draft(batch, STEPS, TEMPERATURES, SEEDS, SALTS, return_logits=True)
    assert whole.logits is not None
    confidences = confidences_of(whole.logits, whole.token_ids)
    acceptance = np.random.default_rng(0).uniform(0.5, 1, (5, len(EDGES) + 1)).astype(np.float32)
    bins = np.searchsorted(EDGES, confidences, side="right")
    survival = np.take_along_axis(acceptance, bins, axis=1).cumprod(axis=1)
    kept = (survival >= least).cumprod(axis=1).astype(bool)
    expected = np.where(kept, whole.token_ids, -1)

    again, _ = prepared(runner)
    stop = Stop(np.full(5, least, dtype=np.float32), acceptance)
    draft = runner.draft(again, STEPS, TEMPERATURES, SEEDS, SALTS, stop=stop)
    np.testing.assert_array_equal(draft.token_ids, expected)
    has_token = expected >= 0
    np.testing.assert_allclose(draft.confidences[has_token], confidences[has_token], rtol=1e-4)
    assert has_token.sum() == (STEPS.sum() if least == 0 else has_token.sum())
    assert least == 0 or has_token.sum() < STEPS.sum(), "some draft must have ended"


def test_stepwise_drafts_end_at_the_same_token(checkpoint, monkeypatch) -> None:
    """Where a runner cannot draft in one call."""
    drafts = []
    for stepwise in (False, True):
        runner = load(checkpoint("llama"))
        if stepwise:
            monkeypatch.setattr(runner, "propose", lambda *_: None)
        drafter = ModelDrafter("d", runner, 128)
        texts, orders = [], []
        for i, (temperature, mode) in enumerate(
            [(0.0, "coupled"), (1.0, "coupled"), (1.0, "ratio"), (0.5, "ratio")]
        ):
            sampling = SamplingParams(temperature=temperature, seed=i, verification=mode)
            prompt = tuple(int(t) for t in tokens(12, seed=i))
            texts.append(TokenBuffer(request_of(f"{i}", prompt, sampling)))
            blocks = tuple(range(3 * i, 3 * i + 3))
            orders.append(DraftOrder(f"{i}", 0, 0, "d", 0, 12, 8, blocks, min_survival=0.15))
        drafts.append(drafter.draft(orders, texts))
    one_call, stepwise_drafts = drafts
    assert [d.token_ids for d in one_call.drafts] == [d.token_ids for d in stepwise_drafts.drafts]
    for a, b in zip(one_call.drafts, stepwise_drafts.drafts, strict=True):
        assert len(a.confidences) == len(a.token_ids) == len(a.prob_rows)
        np.testing.assert_allclose(a.confidences, b.confidences, rtol=1e-4)
    lengths = [len(d.token_ids) for d in one_call.drafts]
    assert any(n < 8 for n in lengths), lengths


def test_a_drafter_learns_how_far_its_confidence_goes(checkpoint: Checkpoints) -> None:
    drafter = ModelDrafter("d", load(checkpoint("llama")), 128)
    sampling = SamplingParams(temperature=0.0)
    prompt = tuple(int(t) for t in tokens(12))
    text = TokenBuffer(request_of("r", prompt, sampling))
    order = DraftOrder("r", 0, 0, "d", 0, 12, 8, (0, 1, 2), min_survival=0.4)
    long = drafter.draft([order], [text]).drafts[0]
    assert long.token_ids
    for _ in range(100):
        drafter.learn(sampling, long, Verdict("r", 0, 0, num_decided=1, num_accepted=0))
    drafter.release_request("r")
    short = drafter.draft([order], [text]).drafts[0]
    assert len(short.token_ids) < len(long.token_ids)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_steps": [4, 0, 1, 7, -1]}, r"num_steps\[4\] is -1; allowed: 0\.\.7"),
        ({"num_steps": [30, 0, 1, 1, 1]}, r"block_tables\[0, 2\] is 64; allowed"),
        ({"num_steps": [250, 0, 1, 1, 1]}, r"seq_lens\[0\] is 9, .* 249 positions ahead"),
        ({"temperatures": [0.0, 0.0, -0.5, 1.0, 1.0]}, r"temperatures\[2\] is -0.5; must be fin"),
        ({"temperatures": [0.0, 0.0, np.nan, 1.0, 1.0]}, r"temperatures\[2\] is -?nan; must"),
        ({"temperatures": [np.inf, 0.0, 0.0, 1.0, 1.0]}, r"temperatures\[0\] is inf; must"),
        ({"temperatures": [0.0, 1.0]}, r"temperatures is float64 \(2,\)"),
        ({"seeds": [1.0, 2.0, 3.0, 4.0, 5.0]}, "seeds is float64"),
    ],
)
def test_a_wrong_order_is_refused(checkpoint, changes, reason) -> None:
    runner = load(checkpoint("llama"))
    batch, _ = prepared(runner)
    order = {"num_steps": STEPS, "temperatures": TEMPERATURES, "seeds": SEEDS, "salts": SALTS}
    for name, values in changes.items():
        order[name] = np.array(values, dtype=np.int32 if name == "num_steps" else None)
    with pytest.raises(ValueError, match=reason):
        runner.draft(batch, **order)


def test_a_sequence_without_rows_cannot_draft(checkpoint: Checkpoints) -> None:
    runner = load(checkpoint("llama"))
    batch = Paging(64, BLOCK_SIZE).batch(("a", tokens(9), 4, 4))
    one = [np.array([1], dtype=d) for d in (np.int32, np.float64, np.uint64, np.int32)]
    with pytest.raises(ValueError, match="sequence 0 has no row to draft from"):
        runner.draft(batch, *one)


@pytest.mark.parametrize("vocab_size", [1, 7, 1000, 4096, 20011])
def test_samples_are_the_reference_samples(vocab_size: int) -> None:
    count = 200
    rng = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(rng.normal(0, 3, (count, vocab_size)).astype(np.float32))
    temperatures = rng.choice([0.0, 1e-12, 0.05, 0.7, 1.0, 3.0, 100.0], size=count)
    seeds = rng.integers(2**64, size=count, dtype=np.uint64)
    positions = rng.integers(100_000, size=count)
    salts = np.full(count, Salt.TARGET, dtype=np.int32)
    rows = SamplingRows(temperatures, np.ones(count), np.zeros(count, dtype=np.int64), seeds)
    expected = sample_reference(logits, rows, positions).numpy()
    sampled = sample_unfiltered(logits, temperatures, seeds, positions, salts)
    np.testing.assert_array_equal(sampled, expected)
    if vocab_size > 1:
        others = sample_unfiltered(logits, temperatures, seeds, positions + 1, salts)
        hot = temperatures >= 1
        assert (others[hot] != sampled[hot]).mean() > 0.2


def test_excluded_tokens_are_never_sampled() -> None:
    logits = torch.full((64, 100), -torch.inf)
    logits[:, 37] = -5.0
    logits[:, 60] = -5.0
    noisy = np.arange(64) >= 32
    sampled = sample_unfiltered(
        logits,
        noisy.astype(np.float64),
        np.arange(64, dtype=np.uint64),
        np.zeros(64, dtype=np.int64),
        np.zeros(64, dtype=np.int32),
    )
    assert (sampled[~noisy] == 37).all()  # the lowest id on ties
    assert set(sampled[noisy]) == {37, 60}


def test_logits_of_another_type_are_refused() -> None:
    order = [np.zeros(1, dtype=d) for d in (np.float64, np.uint64, np.int64, np.int32)]
    with pytest.raises(ValueError, match="contiguous float32"):
        sample_unfiltered(torch.zeros(1, 5, dtype=torch.bfloat16), *order)
    with pytest.raises(ValueError, match=r"positions is int64 \(1,\); expected .* \(2,\)"):
        sample_unfiltered(torch.zeros(2, 5), *order)
