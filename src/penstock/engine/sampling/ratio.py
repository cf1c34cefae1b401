"""`ratio` verification: rejection sampling, with the highest possible acceptance rate (1 - TV).

A draft token x, sampled from draft(x), is accepted with probability min(1, target(x) / draft(x)).
The first rejection is replaced by the recovered token, from normalised max(0, target - draft); full
acceptance adds a bonus token. A point mass (a greedy or looked-up token) has draft(x) = 1. It is
exact only if x was sampled from the reported ``draft_probs``: dropping a token because of its own
value or probability changes its distribution.

Noise is a function of (seed, position, purpose), and for draft samples also of the draft's start. A
position that is drafted, left undecided behind a rejection, and drafted again therefore meets new
noise. `evidence_all` tells how good the tokens behind the rejection were, and allocation uses it:
with the old noise the next draft would be long where it is good, which is not exact (a test shows
it). The noise of acceptance, recovery and the bonus token may stay the same, since undecided tokens
enter nothing. One condition remains: drafting a position and verifying its draft may depend on
earlier tokens and rounds, but not on this draft's tokens there or behind it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from penstock.engine.sampling.coupled import gumbel_argmax
from penstock.engine.sampling.filters import filter_logits, filtered_probs
from penstock.engine.sampling.noise import Salt, draft_seeds, row_keys, uniform
from penstock.engine.sampling.params import (
    BoolArray,
    Decisions,
    IntArray,
    SamplingRows,
    VerifyBatch,
    as_index,
)

_LEAST_PROBABILITY = np.finfo(np.float32).tiny
"""Lower bound of a draft probability in a quotient."""


def sample_draft(
    logits: torch.Tensor, rows: SamplingRows, positions: IntArray, starts: IntArray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a drafter's samples and the distributions they were sampled from.

    logits: [rows, V] float32; positions: [rows] int64, absolute; starts: [rows] int64, position of
    the first token of each row's draft. Returns tokens [rows] int64 and draft_probs [rows, V]
    float32, a point mass at temperature 0."""
    scores = filter_logits(logits, rows)
    draft_probs = scores.softmax(dim=-1)
    return draw_draft(scores, rows, positions, starts), draft_probs


def draw_draft(
    scores: torch.Tensor, rows: SamplingRows, positions: IntArray, starts: IntArray
) -> torch.Tensor:
    """Return samples [rows] int64 of a draft from softmax(scores), which are overwritten."""
    fresh = replace(rows, seed=draft_seeds(rows.seed, starts))
    return gumbel_argmax(scores, fresh, positions, Salt.DRAFT)


def _compare(
    batch: VerifyBatch, target_probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return target(x) and draft(x) of every draft token x, and Σ min(target, draft) there.

    target_probs: [num_rows, V]. Returns three arrays [num_drafts] float32."""
    row = as_index(np.arange(batch.draft_tokens.shape[0]) + batch.request_of_draft, target_probs)
    token = as_index(batch.draft_tokens, target_probs)
    target_of_token = target_probs[row, token]
    draft_of_token = torch.ones_like(target_of_token)
    overlap = target_of_token.clone()
    sampled = np.flatnonzero(batch.draft_prob_row >= 0)
    if batch.draft_probs is not None and sampled.size:
        where = as_index(sampled, target_probs)
        source = as_index(batch.draft_prob_row[sampled], target_probs)
        draft_of_token[where] = batch.draft_probs[source, token[where]]
        shared = torch.minimum(target_probs[row[where]], batch.draft_probs[source])
        overlap[where] = shared.sum(dim=-1)
    # A row that is not finite accepts nothing, and its request gets NO_TOKEN there.
    return target_of_token.nan_to_num_(0.0), draft_of_token, overlap.nan_to_num_(0.0)


def _sample_last(
    batch: VerifyBatch, target_probs: torch.Tensor, num_accepted: IntArray
) -> torch.Tensor:
    """Return the recovered token of requests with a rejection, the bonus token of others: [n]."""
    weights = target_probs[as_index(batch.row_start[:-1] + num_accepted, target_probs)]
    rejected = num_accepted < batch.num_draft
    request = np.flatnonzero(rejected)
    draft = (batch.draft_start[:-1] + num_accepted)[request]
    source = batch.draft_prob_row[draft]
    point = source < 0
    where = as_index(request[point], weights)
    weights[where, as_index(batch.draft_tokens[draft[point]], weights)] = 0.0
    if batch.draft_probs is not None:
        where = as_index(request[~point], weights)
        draft_probs = batch.draft_probs[as_index(source[~point], weights)]
        residual = (weights[where] - draft_probs).clamp_(min=0.0)
        # Equal but for rounding: the residual has vanished, and the target itself is its limit.
        vanished = residual.amax(dim=-1, keepdim=True) == 0.0
        weights[where] = torch.where(vanished, weights[where], residual)
    salt = np.where(rejected, int(Salt.RESIDUAL), int(Salt.TARGET))
    return gumbel_argmax(weights.log_(), batch.params, batch.positions + num_accepted, salt)


def count_accepted(batch: VerifyBatch, accepted: BoolArray) -> IntArray:
    """Return the draft tokens before each request's first rejection, [n].

    accepted: [num_drafts]."""
    begin, end = batch.draft_start[:-1], batch.draft_start[1:]
    # A sentinel past the end stands for "never rejected".
    rejected = np.append(np.flatnonzero(~accepted), accepted.shape[0])
    first: IntArray = rejected[np.searchsorted(rejected, begin)]
    return first.clip(max=end) - begin


def verify_ratio(batch: VerifyBatch) -> Decisions:
    """Accept draft tokens by the ratio of target to draft; recover, or add the bonus token.

    Every temperature must be above 0: `verify_coupled` handles greedy requests."""
    of_row, of_draft = batch.request_of_row, batch.request_of_draft
    target_probs = filtered_probs(batch.logits, batch.params.select(of_row))
    target_of_token, draft_of_token, overlap = (
        part.cpu().numpy() for part in _compare(batch, target_probs)
    )
    positions = np.delete(batch.row_positions, batch.row_start[1:] - 1)
    chance = uniform(row_keys(batch.params.seed[of_draft], positions, Salt.ACCEPT))
    # A token of draft probability 0 was not sampled from the reported distribution.
    accepted = (chance * draft_of_token < target_of_token) & (draft_of_token > 0.0)
    num_accepted = count_accepted(batch, accepted)
    decided = np.arange(of_draft.shape[0]) <= (batch.draft_start[:-1] + num_accepted)[of_draft]
    possible = np.maximum(draft_of_token, _LEAST_PROBABILITY)
    return Decisions(
        num_accepted=num_accepted,
        last_token=_sample_last(batch, target_probs, num_accepted).cpu().numpy(),
        evidence=np.where(decided, overlap, 0.0).astype(np.float64),
        evidence_all=np.minimum(1.0, target_of_token / possible).astype(np.float64),
    )
