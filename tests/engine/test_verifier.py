"""Verification inside the compiled pass: what the logits would have said."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.small_models import SHAPE, Checkpoints, Paging

from penstock.core.types import Request, SamplingParams
from penstock.engine.native.runner import NativeRunner
from penstock.engine.native.sampler import sample_natively
from penstock.engine.runner import RaggedBatch
from penstock.engine.sampling import SamplingRows, sample_coupled
from penstock.engine.sequences import TokenBuffer
from penstock.engine.verifier import Drafted, Samples, Verifier

COUPLED = [SamplingParams(temperature=t, seed=i) for i, t in enumerate((0.0, 1.0, 0.6, 1.4))]


def load(path: Path, threads: int = 1) -> NativeRunner:
    return NativeRunner.load(path, torch.float32, 64, 8, threads)


def text_of(params: SamplingParams, length: int = 20) -> TokenBuffer:
    tokens = np.random.default_rng(params.seed).integers(SHAPE["vocab_size"], size=length)
    ids = tuple(tokens.tolist())
    return TokenBuffer(
        Request(id="r", prompt_len=length, prompt_token_ids=ids, max_tokens=4, sampling=params)
    )


class ByTheLogits:
    """A runner that samples nothing in its pass: the logits come back."""

    def __init__(self, runner: NativeRunner) -> None:
        self.forward, self.sample = runner.forward, runner.sample

    def verify(self, *_: object) -> None:
        return None


def decided(verifier: Verifier, drafts: list[list[int]], params: list[SamplingParams]):
    """Whole texts of 20 tokens with a draft behind each; the last one is a chunk of prefill."""
    texts = [text_of(p) for p in params]
    drafted = [Drafted(t, 20, d, [-1] * len(d)) for t, d in zip(texts, drafts, strict=True)]
    place = Paging(64, 8)
    spans = [
        (str(i), np.array([*d.text.span(0, 20).tolist(), *d.token_ids]), 0, 20 + len(d.token_ids))
        for i, d in enumerate(drafted)
    ]
    batch = place.batch(*spans, ("chunk", np.arange(9), 0, 9))
    ends = batch.query_start[1:-1]
    wanted = [np.arange(e - len(d) - 1, e) for e, d in zip(ends, drafts, strict=True)]
    rows = np.concatenate(wanted).astype(np.int32)
    batch = RaggedBatch(
        batch.token_ids,
        batch.positions,
        batch.query_start,
        batch.seq_lens,
        batch.block_tables,
        rows,
    )
    scores = verifier.forward(batch, drafted)
    return scores, verifier.decide(scores, drafted, None)


@pytest.mark.parametrize("threads", [1, 3])
def test_samples_of_the_pass_decide_as_logits_do(checkpoint: Checkpoints, threads: int) -> None:
    path = checkpoint("llama").path
    verifier = Verifier(load(path, threads))
    first = Verifier(ByTheLogits(load(path)))
    nothing = [[], [], [], []]
    _, alone = decided(first, nothing, COUPLED)
    right = [d.token_ids for d in alone]
    _, further = decided(first, right, COUPLED)
    wrong = (further[2].token_ids[1] + 1) % SHAPE["vocab_size"]
    drafts = [further[0].token_ids, [*right[1], 0, 0], [*right[2], wrong], []]
    scores, found = decided(verifier, drafts, COUPLED)
    logits, expected = decided(first, drafts, COUPLED)
    assert isinstance(scores, Samples)
    assert isinstance(logits, torch.Tensor)
    assert found == expected
    assert [d.num_accepted for d in found][::2] == [2, 1]
    assert [d.num_decided for d in found][2:] == [2, 0]


def test_a_request_without_a_draft_has_the_targets_own_sample(checkpoint: Checkpoints) -> None:
    """However its drafts would be verified."""
    runner = load(checkpoint("llama").path)
    by_ratio = [dataclasses.replace(p, verification="ratio") for p in COUPLED[1:]]
    drafts = [[1], [2, 3], [], [4], [], [], []]
    scores, found = decided(Verifier(runner), drafts, [*COUPLED, *by_ratio])
    assert isinstance(scores, Samples)
    assert not scores.by_logits
    logits, expected = decided(Verifier(ByTheLogits(runner)), drafts, [*COUPLED, *by_ratio])
    assert isinstance(logits, torch.Tensor)
    assert found == expected
    # The same noise, whatever a draft would have been verified by.
    _, alone = decided(Verifier(runner), [[]] * 4, COUPLED)
    assert found[4:] == alone[1:]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_sample_that_may_come_is_that_of_those_that_may(checkpoint, threads) -> None:
    runner = load(checkpoint("llama").path, threads)
    vocab_size = SHAPE["vocab_size"]
    rows = np.arange(40, dtype=np.int32)
    batch = Paging(64, 8).batch(("a", np.arange(40), 0, 40))
    batch = dataclasses.replace(batch, logits_rows=rows)
    one_each = np.arange(41, dtype=np.int32)
    temperatures = np.array([0.0, 1.0, 0.6, 1.4] * 10)
    seeds = np.arange(40, dtype=np.uint64)
    logits = runner.forward(batch)
    kept = np.array([0, 7, 39], dtype=np.int32)
    free, own = runner.forward_sampled(batch, one_each, temperatures, seeds, kept)
    assert torch.equal(own, logits[kept])
    rng = np.random.default_rng(0)
    bits = rng.random((40, vocab_size)) < rng.choice([0.1, 0.5, 1.0], size=(40, 1))
    bits[:, vocab_size - 1] = True
    masked = logits.masked_fill(torch.from_numpy(~bits), -torch.inf)
    params = SamplingRows(temperatures, np.ones(40), np.zeros(40, dtype=np.int64), seeds)
    may_come = bits[rows, free]
    assert 10 <= may_come.sum() <= 30, "of both there are many"
    for sample in (sample_coupled, sample_natively):
        found = sample(masked.clone(), params, np.arange(1, 41))
        assert bits[rows, found].all()
        assert (found == free).tolist() == may_come.tolist()


def test_other_seeds_would_be_seen(checkpoint: Checkpoints) -> None:
    verifier = Verifier(load(checkpoint("llama").path))
    others = [SamplingParams(temperature=p.temperature, seed=p.seed + 9) for p in COUPLED]
    _, found = decided(verifier, [[], [], [], []], COUPLED)
    _, changed = decided(verifier, [[], [], [], []], others)
    assert [d.token_ids for d in found] != [d.token_ids for d in changed]


OTHERS = [
    SamplingParams(temperature=1.0, seed=3, top_p=0.8),
    SamplingParams(temperature=1.0, seed=3, top_k=5),
    SamplingParams(temperature=1.0, seed=3, min_p=0.2),
    SamplingParams(temperature=1.0, seed=3, num_logprobs=2),
    SamplingParams(temperature=1.0, seed=3, frequency_penalty=1.5),
    SamplingParams(temperature=1.0, seed=3, verification="ratio"),
]
"""Who cannot be decided by the samples of unchanged logits, with a draft."""


@pytest.mark.parametrize("params", OTHERS)
def test_logits_are_there_where_they_are_needed(checkpoint, params) -> None:
    """And nobody else: the others of its batch are decided by the samples of the pass."""
    runner = load(checkpoint("llama").path)
    mixed = [params, *COUPLED[:3], params]
    drafts = [[1, 2], [3], [], [4, 5], [6]]
    scores, found = decided(Verifier(runner), drafts, mixed)
    assert isinstance(scores, Samples)
    assert list(scores.by_logits) == [0, 4]
    assert len(scores.logits) == 5
    logits, expected = decided(Verifier(ByTheLogits(runner)), drafts, mixed)
    assert isinstance(logits, torch.Tensor)
    assert torch.equal(scores.logits, logits[[0, 1, 2, 9, 10]])
    assert found == expected


def test_cut_distributions_are_not_decided_by_the_samples(checkpoint: Checkpoints) -> None:
    """The control: cut to its likeliest token a request gets another one than the pass samples."""
    runner = load(checkpoint("llama").path)
    cut = [dataclasses.replace(OTHERS[1], top_k=1, seed=i) for i in range(12)]
    plain = [dataclasses.replace(p, top_k=0) for p in cut]
    scores, found = decided(Verifier(runner), [[]] * 13, [*cut, COUPLED[0]])
    assert isinstance(scores, Samples)
    _, samples = decided(Verifier(runner), [[]] * 13, [*plain, COUPLED[0]])
    assert [d.token_ids for d in found[:12]] != [d.token_ids for d in samples[:12]]
    assert found[12] == samples[12]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"row_start": [0, 2]}, "row_start must run from 0 to 3"),
        ({"row_start": [1, 3]}, "row_start must run from 0 to 3"),
        ({"row_start": [0, 4, 3]}, r"row_start\[2\] is 3; must not decrease"),
        ({"row_start": [0.0, 3.0]}, "row_start is float64"),
        ({"temperatures": [-1.0]}, r"temperatures\[0\] is -1; must be finite"),
        ({"seeds": [1.0]}, "seeds is float64"),
        ({"kept": [1, 3]}, r"kept\[1\] is 3; allowed: 2..2"),
        ({"kept": [1, 1]}, r"kept\[1\] is 1; allowed: 2..2"),
        ({"kept": [-1]}, r"kept\[0\] is -1; allowed: 0..2"),
        ({"kept": [1.0]}, "kept is float64"),
    ],
)
def test_a_wrong_order_is_refused(checkpoint, changes, reason) -> None:
    runner = load(checkpoint("llama").path)
    batch = Paging(64, 8).batch(("a", np.arange(3), 0, 3))
    count = len(changes.get("row_start", [0, 3])) - 1
    order = {
        "row_start": np.array([0, 3], dtype=np.int32),
        "temperatures": np.ones(count),
        "seeds": np.ones(count, dtype=np.uint64),
    }
    for name, values in changes.items():
        whole = isinstance(values[0], int)
        order[name] = np.array(values, dtype=np.int32 if whole else np.float64)
    with pytest.raises(ValueError, match=reason):
        runner.forward_sampled(batch, **order)
