"""Log-probabilities for the API's `logprobs`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.core.types import TokenLogprob

_LEAST = -9999.0
"""Log-probability of an impossible token, as in other servers: JSON has no infinity."""


def token_logprobs(
    logits: torch.Tensor, tokens: Sequence[int], top_n: int
) -> tuple[TokenLogprob, ...]:
    """Return the log-probabilities of ``tokens`` [rows], each with the ``top_n`` best, descending.

    logits: [rows, V], the model's own, before temperature and filters."""
    logprobs = logits.log_softmax(dim=-1).clamp_(min=_LEAST)
    top = logprobs.topk(top_n, dim=-1)
    index = torch.tensor(tokens, device=logits.device).unsqueeze(-1)
    chosen = logprobs.gather(-1, index).squeeze(-1).tolist()
    tops = zip(top.indices.tolist(), top.values.tolist(), strict=True)
    return tuple(
        TokenLogprob(value, tuple(zip(*best, strict=True)))
        for value, best in zip(chosen, tops, strict=True)
    )
