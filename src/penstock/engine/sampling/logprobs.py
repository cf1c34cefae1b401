"""Log-probabilities for the API's `logprobs`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.engine.sampling.params import IntArray, as_index


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Under the model itself, before temperature and filters.

    chosen:        [rows] float32, of the tokens that were emitted
    top_token_ids: [rows, top_n] int64, most probable first
    top_logprobs:  [rows, top_n] float32
    """

    chosen: torch.Tensor
    top_token_ids: torch.Tensor
    top_logprobs: torch.Tensor


def token_logprobs(logits: torch.Tensor, tokens: IntArray, top_n: int) -> TokenLogprobs:
    """Log-probabilities of ``tokens`` [rows] and of the ``top_n`` best under logits [rows, V]."""
    logprobs = logits.log_softmax(dim=-1)
    top = logprobs.topk(top_n, dim=-1)
    index = as_index(tokens, logits).unsqueeze(-1)
    return TokenLogprobs(logprobs.gather(-1, index).squeeze(-1), top.indices, top.values)
