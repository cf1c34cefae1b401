"""Entry point of verification: a ragged batch of both modes in, tokens out."""

from __future__ import annotations

import numpy as np

from penstock.engine.sampling.coupled import TokenSampler, sample_coupled, verify_coupled
from penstock.engine.sampling.params import Decisions, VerifyBatch, VerifyResult
from penstock.engine.sampling.ratio import verify_ratio


def _decide(batch: VerifyBatch, sample: TokenSampler) -> Decisions:
    # Greedy requests are decided by equality in both modes. Without a draft both modes take the
    # target's own sample with the same noise.
    by_ratio = batch.ratio & ~batch.params.greedy & (batch.num_draft > 0)
    if not by_ratio.any():
        return verify_coupled(batch, sample)
    if by_ratio.all():
        return verify_ratio(batch)
    merged = Decisions(
        num_accepted=np.empty(batch.num_requests, dtype=np.int64),
        last_token=np.empty(batch.num_requests, dtype=np.int64),
        evidence=np.empty(batch.draft_tokens.shape[0], dtype=np.float64),
        evidence_all=np.empty(batch.draft_tokens.shape[0], dtype=np.float64),
    )
    for chosen in (np.flatnonzero(by_ratio), np.flatnonzero(~by_ratio)):
        part = _decide(batch.select(chosen), sample)
        merged.num_accepted[chosen] = part.num_accepted
        merged.last_token[chosen] = part.last_token
        drafts = np.isin(batch.request_of_draft, chosen)
        merged.evidence[drafts] = part.evidence
        merged.evidence_all[drafts] = part.evidence_all
    return merged


def verify(batch: VerifyBatch, sample: TokenSampler = sample_coupled) -> VerifyResult:
    """Decide every draft of the batch; the output has exactly the target's distribution.

    `sample` draws the target's seeded samples. A request's result depends on its own rows alone."""
    decisions = _decide(batch, sample)
    # Lists are faster than arrays for the few requests of most batches.
    drafts, begins = batch.draft_tokens.tolist(), batch.draft_start.tolist()
    token_ids: list[int] = []
    token_start = [0]
    for begin, num_accepted, last in zip(
        begins, decisions.num_accepted.tolist(), decisions.last_token.tolist(), strict=False
    ):
        token_ids += drafts[begin : begin + num_accepted]
        token_ids.append(last)
        token_start.append(len(token_ids))
    return VerifyResult(
        num_accepted=decisions.num_accepted,
        num_decided=np.minimum(decisions.num_accepted + 1, batch.num_draft),
        evidence=decisions.evidence,
        evidence_all=decisions.evidence_all,
        draft_start=batch.draft_start,
        token_ids=np.array(token_ids, dtype=np.int64),
        token_start=np.array(token_start, dtype=np.int64),
    )
