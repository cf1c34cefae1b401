"""Penalties, logit_bias, min_tokens and min_p: what they are, and the same with drafts."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy import stats
from tests.engine.sampling_toys import toy_table
from tests.engine.small_family import VOCAB
from tests.engine.test_exactness import load, make_loop, make_requests, run

from penstock.core.types import Request, SamplingParams
from penstock.engine.build import Engine
from penstock.engine.sampling import (
    Changed,
    SamplingRows,
    TextSoFar,
    change_logits,
    sample_coupled,
    sample_draft,
)
from penstock.engine.sampling.filters import filtered_probs
from penstock.engine.sequences import TokenBuffer
from penstock.engine.verifier import Drafted, decide

CHANGED = SamplingParams(
    presence_penalty=0.7,
    frequency_penalty=0.4,
    repetition_penalty=1.3,
    logit_bias=((1, 2.0), (3, -1.0)),
    min_tokens=4,
)


def by_hand(logits: list[float], params: SamplingParams, prompt: list[int], output: list[int]):
    """As the API's fields are described, a token at a time."""
    made = list(logits)
    for token, bias in params.logit_bias:
        made[token] += bias
    if len(output) < params.min_tokens:
        made[5] = -np.inf
    times = Counter(output)
    for token in {*prompt, *output}:
        positive = made[token] > 0
        made[token] *= 1 / params.repetition_penalty if positive else params.repetition_penalty
    for token, num in times.items():
        made[token] -= num * params.frequency_penalty + params.presence_penalty
    if params.grammar:
        last = [*prompt, *output][-1]
        made = [x if may_follow(last, token) else -np.inf for token, x in enumerate(made)]
    return made


def may_follow(last: int, token: int) -> bool:
    return (last + token) % 3 != 0


class ByTheLastToken:
    """A grammar over six tokens."""

    problem = None

    def masks(self, text: TokenBuffer, draft: list[int], num_rows: int) -> np.ndarray:
        lasts = [*text.tokens(text.length - 1, text.length), *draft][-num_rows:]
        allowed = [sum(may_follow(last, t) << t for t in range(6)) for last in lasts]
        return np.array(allowed, dtype=np.int32)[:, None]


@pytest.mark.parametrize("num_rows", [4, 1])
def test_every_row_is_changed_by_the_text_before_it(num_rows: int) -> None:
    prompt, output, draft = [0, 2, 2], [4, 4], [1, 4, 0]
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    expected = [
        by_hand(row.tolist(), CHANGED, prompt, output + draft[:i]) for i, row in enumerate(logits)
    ]
    text = TextSoFar(np.array(prompt + output + draft, dtype=np.int32), 3, [5])
    rows = logits[4 - num_rows :]
    change_logits(rows, [Changed(num_rows, CHANGED, text)])
    np.testing.assert_allclose(rows.numpy(), np.array(expected)[4 - num_rows :], rtol=1e-6)


def test_a_smaller_vocabulary_is_changed_as_far_as_it_goes() -> None:
    logits = torch.randn(1, 6)
    small = logits[:, :3].clone()
    text = TextSoFar(np.array([0, 5, 2, 4], dtype=np.int32), 2, [5])
    change_logits(logits, [Changed(1, CHANGED, text)])
    change_logits(small, [Changed(1, CHANGED, text)])
    assert torch.equal(small, logits[:, :3])


@pytest.mark.parametrize("vocab_size", [64, 40, 33])
def test_masks_of_some_rows_of_a_batch(vocab_size: int) -> None:
    """Between them a request without one, and one of which a drafter has no token."""
    logits = torch.randn(5, vocab_size)
    before = logits.clone()
    words = np.array([[0b101, 0], [-1, 2**31 - 1], [0, 1 << 20]], dtype=np.int32)
    params = SamplingParams(grammar="some")
    tokens = np.array([1, 2], dtype=np.int32)
    parts = [
        Changed(2, params, TextSoFar(tokens, 1, [], words[:2])),
        Changed(2, SamplingParams(), None),
        Changed(1, params, TextSoFar(tokens, 1, [], words[2:])),
    ]
    change_logits(logits, parts)
    allowed = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size]
    if vocab_size < 53:
        allowed[2] = 1
    kept = torch.from_numpy(allowed[[0, 1]] == 1)
    assert torch.equal(logits[:2], before[:2].masked_fill(~kept, -torch.inf))
    assert torch.equal(logits[2:4], before[2:4])
    last = torch.from_numpy(allowed[2] == 1)
    assert torch.equal(logits[4], before[4].masked_fill(~last, -torch.inf))


def test_min_p_drops_what_is_less_likely_than_its_share_of_the_likeliest() -> None:
    logits = torch.tensor([[0.0, -1.0, -2.0, -3.0]]).repeat(3, 1)
    rows = SamplingRows.from_params(
        [
            SamplingParams(min_p=0.2),
            SamplingParams(temperature=2.0, min_p=0.2),
            SamplingParams(temperature=0.0, min_p=0.2),
        ]
    )
    kept = (filtered_probs(logits, rows) > 0).tolist()
    assert kept == [[True, True, False, False], [True] * 4, [True, False, False, False]]


@pytest.fixture(scope="module")
def engine(family: dict[str, Path]) -> Engine:
    return load(family, "native")


def with_stops(requests: list[Request]) -> list[Request]:
    """So many stop tokens that few texts get far without min_tokens."""
    stops = frozenset(range(0, VOCAB, 4))
    return [dataclasses.replace(r, stop_token_ids=stops) for r in requests]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["same", "near", "ngram"])
def test_min_tokens_with_drafts(engine: Engine, drafter: str, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, min_tokens=15)
    alone, _ = run(make_loop(engine), with_stops(make_requests(params, 8, "none")))
    drafted, accepted = run(make_loop(engine), with_stops(make_requests(params, 8, drafter)))
    assert drafted == alone
    assert min(map(len, alone)) >= 15
    assert min(map(len, alone)) < 20, "they do stop"
    assert accepted > 0 or drafter == "ngram"
    free = dataclasses.replace(params, min_tokens=0)
    early, _ = run(make_loop(engine), with_stops(make_requests(free, 8, drafter)))
    assert min(map(len, early)) < 15


def deaf(self: TokenBuffer, draft: list[int]) -> TextSoFar | None:
    """As if the draft's tokens were not there."""
    params = self.request.sampling
    tokens = np.append(self.span(0, self.length), np.zeros(len(draft), dtype=np.int32))
    return TextSoFar(tokens, self.length, ()) if params.reads_text else None


def test_penalties_that_do_not_see_the_draft_would_be_seen(engine, monkeypatch) -> None:
    params = SamplingParams(temperature=0.0, frequency_penalty=1.5)
    alone, _ = run(make_loop(engine), make_requests(params, 8, "none"))
    drafted, _ = run(make_loop(engine), make_requests(params, 8, "same"))
    assert drafted == alone
    monkeypatch.setattr(TokenBuffer, "so_far", deaf)
    wrong, _ = run(make_loop(engine), make_requests(params, 8, "same"))
    assert wrong != alone


class Toy(NamedTuple):
    """A target that knows the last two tokens, and a drafter that knows nothing of penalties."""

    target: torch.Tensor
    drafter: torch.Tensor
    params: SamplingParams
    prompt: tuple[int, ...] = (0, 1)

    def text(self, seed: int) -> TokenBuffer:
        sampling = dataclasses.replace(self.params, seed=seed, verification="ratio")
        request = Request("r", 2, 8, prompt_token_ids=self.prompt, sampling=sampling)
        return TokenBuffer(request, ByTheLastToken() if self.params.grammar else None)

    def round(self, texts: list[TokenBuffer]) -> None:
        """Draft two tokens for each, and append what verification makes of them."""
        rows = SamplingRows.from_params([t.request.sampling for t in texts])
        starts = np.array([t.length for t in texts])
        tails = np.array([t.tokens(t.length - 2, t.length) for t in texts])
        probs = []
        for step in range(2):
            logits = self.drafter[tails[:, -2], tails[:, -1]]
            tokens, own = sample_draft(logits, rows, starts + step, starts)
            tails = np.concatenate([tails, tokens.numpy()[:, None]], axis=1)
            probs.append(own)
        drafted = [
            Drafted(t, t.length, tail[2:].tolist(), [2 * i, 2 * i + 1])
            for i, (t, tail) in enumerate(zip(texts, tails, strict=True))
        ]
        logits = torch.stack([self.target[tails[:, i], tails[:, i + 1]] for i in range(3)], dim=1)
        ratio = np.ones(len(texts), dtype=np.bool_)
        joined = torch.stack(probs, dim=1).flatten(0, 1)
        decided = decide(logits.flatten(0, 1), drafted, rows, ratio, joined, sample_coupled)
        for text, answer in zip(texts, decided, strict=True):
            text.append(answer.token_ids)

    def p_value(self, num: int) -> float:
        """Of the first three tokens' joint distribution."""
        texts = [self.text(seed) for seed in range(num)]
        while short := [t for t in texts if t.length < 5]:
            self.round(short)
        seen = Counter(tuple(t.tokens(2, 5)) for t in texts)
        size = self.target.shape[0]
        cells = [(a, b, c) for a in range(size) for b in range(size) for c in range(size)]
        expected = np.array([num * self.probability(cell) for cell in cells])
        observed = np.array([seen[cell] for cell in cells])
        if observed[expected == 0].any():
            return 0.0
        small = expected < 5
        observed, expected = (np.append(x[~small], x[small].sum()) for x in (observed, expected))
        possible = expected > 0
        return float(stats.chisquare(observed[possible], expected[possible], sum_check=False)[1])

    def probability(self, cell: tuple[int, ...]) -> float:
        found, text = 1.0, list(self.prompt)
        for token in cell:
            logits = self.target[text[-2], text[-1]].tolist()
            made = by_hand(logits, self.params, list(self.prompt), text[2:])
            one = SamplingRows.from_params([self.params])
            found *= float(filtered_probs(torch.tensor([made]), one)[0, token])
            text.append(token)
        return found


TOY = Toy(
    toy_table(6, seed=0),
    toy_table(6, seed=0) + 0.3 * toy_table(6, seed=1),
    SamplingParams(
        presence_penalty=1.0,
        frequency_penalty=0.8,
        repetition_penalty=1.5,
        logit_bias=((2, 1.0),),
        min_p=0.05,
    ),
)


@pytest.mark.slow
def test_ratio_keeps_the_changed_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    assert TOY.p_value(6000) > 1e-3
    monkeypatch.setattr(TokenBuffer, "so_far", deaf)
    assert TOY.p_value(6000) < 1e-9


@pytest.mark.slow
def test_ratio_keeps_the_distribution_under_a_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(temperature=0.8, presence_penalty=0.5, grammar="by the last token")
    toy = TOY._replace(params=params)
    assert toy.p_value(6000) > 1e-3
    seeing = ByTheLastToken.masks

    def deaf_masks(
        self: ByTheLastToken, text: TokenBuffer, draft: list[int], num_rows: int
    ) -> np.ndarray:
        return seeing(self, text, [], 1).repeat(num_rows, axis=0)

    monkeypatch.setattr(ByTheLastToken, "masks", deaf_masks)
    assert toy.p_value(6000) < 1e-9
