"""Toy language models, a speculative loop over many requests at once, and the judge of its output.

A toy model is a table of logits [V, V, V]: the last two tokens choose the next one's logits. Every
request is a row of one batch with a seed of its own, so that tens of thousands of generations cost
a few rounds of the functions under test.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats

from penstock.engine.sampling import (
    SamplingRows,
    VerifyBatch,
    VerifyResult,
    sample_coupled,
    sample_draft,
    verify,
)
from penstock.engine.sampling.filters import filtered_probs
from penstock.engine.sampling.params import FloatArray, IntArray

PROMPT = (0, 1)
MAX_DRAFT = 4


def toy_table(vocab_size: int, seed: int, spread: float = 1.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn((vocab_size,) * 3, generator=generator)


def sampling_rows(
    num_rows: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, first_seed: int = 0
) -> SamplingRows:
    return SamplingRows(
        temperature=np.full(num_rows, temperature),
        top_p=np.full(num_rows, top_p),
        top_k=np.full(num_rows, top_k, dtype=np.int64),
        seed=np.arange(first_seed, first_seed + num_rows, dtype=np.uint64),
    )


@dataclass(frozen=True)
class Drafts:
    """What was drafted for n requests: tokens [n, MAX_DRAFT], probs [n, MAX_DRAFT, V] or None."""

    tokens: IntArray
    probs: torch.Tensor | None


DraftStep = Callable[
    [torch.Tensor, SamplingRows, IntArray, IntArray], tuple[torch.Tensor, torch.Tensor | None]
]
"""Logits, rows, positions, and where each row's draft begins."""


def draft_by_sampling(
    logits: torch.Tensor, rows: SamplingRows, positions: IntArray, starts: IntArray
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return sample_draft(logits, rows, positions, starts)


def draft_greedily(
    logits: torch.Tensor, rows: SamplingRows, positions: IntArray, starts: IntArray
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return logits.argmax(dim=-1), None


def draft_coupled(
    logits: torch.Tensor, rows: SamplingRows, positions: IntArray, starts: IntArray
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return sample_coupled(logits, rows, positions), None


@dataclass(frozen=True)
class Loop:
    """One way to speculate; the fields that controls replace have the right thing by default.

    shorten: cuts draft lengths [n] after sampling, as an exact system must not do by token value
    allocate: draft lengths [n] of the requests `active`, which have `emitted` so many tokens and of
              whose last draft `share` was good, in the mean over all its positions
    """

    target: torch.Tensor
    drafter: torch.Tensor
    params: SamplingRows
    draft_params: SamplingRows
    ratio: bool
    draft_step: DraftStep
    shorten: Callable[[Drafts, IntArray], IntArray] = lambda drafts, lengths: lengths
    verify: Callable[[VerifyBatch], VerifyResult] = verify
    allocate: Callable[[IntArray, IntArray, FloatArray], IntArray] = lambda active, emitted, _: (
        1 + (active + 2 * emitted) % MAX_DRAFT
    )

    def draft(self, text: IntArray, positions: IntArray, rows: SamplingRows) -> Drafts:
        tokens, probs = [], []
        previous, last = text[:, 0], text[:, 1]
        for offset in range(MAX_DRAFT):
            logits = self.drafter[previous, last]
            token, prob = self.draft_step(logits, rows, positions + offset, positions)
            tokens.append(token.numpy())
            if prob is not None:
                probs.append(prob)
            previous, last = last, tokens[-1]
        return Drafts(np.stack(tokens, axis=1), torch.stack(probs, dim=1) if probs else None)

    def round(
        self, active: IntArray, text: IntArray, emitted: IntArray, granted: IntArray
    ) -> VerifyResult:
        """One round of the requests ``active``, whose last two tokens are ``text`` [n, 2]."""
        positions = emitted + len(PROMPT)
        drafts = self.draft(text, positions, self.draft_params.select(active))
        lengths = self.shorten(drafts, granted)
        steps = np.arange(MAX_DRAFT + 1)
        rows = steps <= lengths[:, None]
        drafted = steps[:-1] < lengths[:, None]
        history = np.concatenate([text, drafts.tokens], axis=1)
        num_drafts = int(drafted.sum())
        batch = VerifyBatch(
            logits=self.target[history[:, :-1][rows], history[:, 1:][rows]],
            row_start=np.concatenate(([0], np.cumsum(lengths + 1))),
            positions=positions,
            params=self.params.select(active),
            ratio=np.full(active.shape, self.ratio),
            draft_tokens=drafts.tokens[drafted],
            draft_probs=None if drafts.probs is None else drafts.probs[torch.from_numpy(drafted)],
            draft_prob_row=np.arange(num_drafts)
            if drafts.probs is not None
            else np.full(num_drafts, -1),
        )
        return self.verify(batch)

    def generate(self, num_tokens: int) -> IntArray:
        """The first ``num_tokens`` tokens of every request, [n, num_tokens]."""
        num_requests = len(self.params)
        text = np.zeros((num_requests, len(PROMPT) + num_tokens + MAX_DRAFT + 1), dtype=np.int64)
        text[:, : len(PROMPT)] = PROMPT
        emitted = np.zeros(num_requests, dtype=np.int64)
        share = np.ones(num_requests)
        while (active := np.flatnonzero(emitted < num_tokens)).size:
            recent = text[active[:, None], emitted[active, None] + np.arange(2)]
            granted = self.allocate(active, emitted[active], share[active])
            result = self.round(active, recent, emitted[active], granted)
            successes = np.concatenate(([0.0], np.cumsum(result.evidence_all)))
            successes = np.diff(successes[result.draft_start])
            share[active] = np.where(granted, successes / np.maximum(granted, 1), 1.0)
            counts = np.diff(result.token_start)
            owner = np.repeat(active, counts)
            offset = np.arange(owner.size) - np.repeat(result.token_start[:-1], counts)
            text[owner, len(PROMPT) + emitted[owner] + offset] = result.token_ids
            emitted[active] += counts
        return text[:, len(PROMPT) : len(PROMPT) + num_tokens]


def generate_alone(target: torch.Tensor, params: SamplingRows, num_tokens: int) -> IntArray:
    """The target without speculation: its own seeded samples, [n, num_tokens]."""
    text = [np.full(len(params), token) for token in PROMPT]
    for offset in range(num_tokens):
        positions = np.full(len(params), len(PROMPT) + offset)
        text.append(sample_coupled(target[text[-2], text[-1]], params, positions).numpy())
    return np.stack(text[len(PROMPT) :], axis=1)


def joint_p_value(samples: IntArray, target: torch.Tensor, params: SamplingRows) -> float:
    """Chi-square p-value of the first three tokens [n, 3] against the target's exact joint.

    0 where a token of probability 0 occurs; cells that expect fewer than 5 are pooled.
    """
    vocab_size = target.shape[0]
    every_context = target.reshape(-1, vocab_size)
    one = params.select(np.zeros(every_context.shape[0], dtype=np.int64))
    probs = filtered_probs(every_context, one).double().numpy().reshape(target.shape)
    first = probs[PROMPT]
    joint = first[:, None, None] * probs[PROMPT[1]][:, :, None] * probs
    expected = joint.ravel() * samples.shape[0]
    cell = np.ravel_multi_index(tuple(samples.T), target.shape)
    observed = np.bincount(cell, minlength=expected.size)
    if observed[expected == 0.0].any():
        return 0.0
    small = expected < 5.0
    observed, expected = (
        np.append(counts[~small], counts[small].sum()) for counts in (observed, expected)
    )
    possible = expected > 0.0
    return float(stats.chisquare(observed[possible], expected[possible], sum_check=False).pvalue)
