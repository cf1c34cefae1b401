"""Exact sampling and verification, in two modes."""

from penstock.engine.sampling.changes import Changed, TextSoFar, change_logits, forbidden_by
from penstock.engine.sampling.coupled import TokenSampler, sample_coupled
from penstock.engine.sampling.logprobs import token_logprobs
from penstock.engine.sampling.params import SamplingRows, VerifyBatch, VerifyResult
from penstock.engine.sampling.ratio import draw_draft, sample_draft
from penstock.engine.sampling.verify import verify

__all__ = [
    "Changed",
    "SamplingRows",
    "TextSoFar",
    "TokenSampler",
    "VerifyBatch",
    "VerifyResult",
    "change_logits",
    "draw_draft",
    "forbidden_by",
    "sample_coupled",
    "sample_draft",
    "token_logprobs",
    "verify",
]
