"""`coupled` verification: a draft token is accepted if it equals the target's seeded sample.

Every position has its own Gumbel noise, a function of (seed, position, token id). The target's
sample is the argmax of its filtered scores plus that noise, so the output is token for token the
target's own, whatever the draft. A drafter that adds the same noise to its own scores predicts the
sample with probability at least (1 - TV) / (1 + TV), TV the total variation between the two
distributions. Source: "drafter-invariant speculative decoding", arXiv 2408.07978."""

from __future__ import annotations

import itertools
from typing import Protocol

import numpy as np
import torch

from penstock.engine.sampling.filters import filter_logits, finite_argmax
from penstock.engine.sampling.noise import Salt, gumbel_noise, row_keys
from penstock.engine.sampling.params import (
    Decisions,
    IntArray,
    SamplingRows,
    VerifyBatch,
    as_index,
)


def gumbel_argmax(
    scores: torch.Tensor,
    rows: SamplingRows,
    positions: IntArray,
    salt: Salt | IntArray,
) -> torch.Tensor:
    """Return one sample per row from softmax(scores), by the noise of (seed, position, salt).

    scores: [rows, V] float32, -inf where a token is excluded; overwritten. Returns [rows] int64,
    NO_TOKEN for scores that are not finite."""
    keys = row_keys(rows.seed, positions, salt)
    return finite_argmax(scores.add_(gumbel_noise(keys, scores.shape[-1], scores.device)))


class TokenSampler(Protocol):
    """Signature of `sample_coupled`, for a backend's faster sampler."""

    def __call__(
        self, logits: torch.Tensor, rows: SamplingRows, positions: IntArray
    ) -> torch.Tensor: ...


def sample_coupled(logits: torch.Tensor, rows: SamplingRows, positions: IntArray) -> torch.Tensor:
    """Return the seeded samples of the distributions that ``logits`` and ``rows`` define.

    They are the target's output, and a drafter's predictions of it. logits: [rows, V] float32;
    positions: [rows] int64, absolute position of the token to be sampled. Returns [rows] int64 on
    the logits' device, NO_TOKEN for rows that are not finite."""
    greedy = rows.greedy
    if greedy.all():
        return finite_argmax(logits)
    if not greedy.any():
        return gumbel_argmax(filter_logits(logits, rows), rows, positions, Salt.TARGET)
    samples = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    for part in (np.flatnonzero(greedy), np.flatnonzero(~greedy)):
        index = as_index(part, logits)
        samples[index] = sample_coupled(logits[index], rows.select(part), positions[part])
    return samples


def verify_coupled(batch: VerifyBatch, sample: TokenSampler = sample_coupled) -> Decisions:
    """Accept draft tokens while they equal the target's samples, then take the sample itself."""
    if not batch.draft_tokens.size:
        return Decisions(
            num_accepted=np.zeros(batch.num_requests, dtype=np.int64),
            last_token=sample(batch.logits, batch.params, batch.positions).cpu().numpy(),
            evidence=np.empty(0),
            evidence_all=np.empty(0),
        )
    rows = batch.params.select(batch.request_of_row)
    samples = sample(batch.logits, rows, batch.row_positions).tolist()
    starts, drafts = batch.row_start.tolist(), batch.draft_tokens.tolist()
    num_accepted, last_token = [], []
    evidence: list[float] = []
    evidence_all: list[float] = []
    for i, (begin, end) in enumerate(itertools.pairwise(starts)):
        row = begin
        # Request i owns i draft tokens fewer than rows before its own.
        while row < end - 1 and samples[row] == drafts[row - i]:
            row += 1
        num_accepted.append(row - begin)
        evidence += (float(r < row) for r in range(begin, end - 1))
        evidence_all += (float(samples[r] == drafts[r - i]) for r in range(begin, end - 1))
        last_token.append(samples[row])
    return Decisions(
        num_accepted=np.array(num_accepted, dtype=np.int64),
        last_token=np.array(last_token, dtype=np.int64),
        evidence=np.array(evidence),
        evidence_all=np.array(evidence_all),
    )
