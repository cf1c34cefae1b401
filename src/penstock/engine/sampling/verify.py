"""The one entry to verification: a ragged batch in, tokens out; both modes in one batch."""

from __future__ import annotations

import numpy as np

from penstock.engine.sampling.coupled import Sampler, sample_coupled, verify_coupled
from penstock.engine.sampling.params import Decisions, VerifyBatch, VerifyResult
from penstock.engine.sampling.ratio import verify_ratio


def _decide(batch: VerifyBatch, sample: Sampler) -> Decisions:
    # Greedy is the special case of both modes: the equality test decides it.
    by_ratio = batch.ratio & ~batch.params.greedy
    if not by_ratio.any():
        return verify_coupled(batch, sample)
    if by_ratio.all():
        return verify_ratio(batch)
    merged = Decisions(
        num_accepted=np.empty(batch.num_requests, dtype=np.int64),
        last_token=np.empty(batch.num_requests, dtype=np.int64),
        evidence=np.empty(batch.num_requests, dtype=np.float64),
    )
    for chosen in (np.flatnonzero(by_ratio), np.flatnonzero(~by_ratio)):
        part = _decide(batch.take(chosen), sample)
        merged.num_accepted[chosen] = part.num_accepted
        merged.last_token[chosen] = part.last_token
        merged.evidence[chosen] = part.evidence
    return merged


def verify(batch: VerifyBatch, sample: Sampler = sample_coupled) -> VerifyResult:
    """Decide every draft of the batch; the output has exactly the target's distribution.

    `sample` draws the target's seeded samples. A request's result depends on its own rows alone,
    not on what else the batch holds.
    """
    decisions = _decide(batch, sample)
    num_emitted = decisions.num_accepted + 1
    token_start = np.concatenate(([0], np.cumsum(num_emitted)))
    token_ids = np.empty(token_start[-1], dtype=np.int64)
    last = token_start[1:] - 1
    kept = np.ones(token_ids.shape[0], dtype=np.bool_)
    kept[last] = False
    of_draft = batch.request_of_draft
    offset = np.arange(of_draft.shape[0]) - batch.draft_start[of_draft]
    token_ids[kept] = batch.draft_tokens[offset < decisions.num_accepted[of_draft]]
    token_ids[last] = decisions.last_token
    return VerifyResult(
        num_accepted=decisions.num_accepted,
        num_decided=np.minimum(num_emitted, batch.num_draft),
        evidence=decisions.evidence,
        token_ids=token_ids,
        token_start=token_start,
    )
