"""Temperature, min-p, top-k and top-p: from logits to the sampled distribution.

In the usual order: divide by the temperature, drop tokens less likely than min-p times the
likeliest, keep the k highest, then keep the smallest set of the highest renormalised masses that
reaches p. Ties at the edge of a set keep the lowest ids, so the distribution is the same on every
machine."""

from __future__ import annotations

import numpy as np
import torch

from penstock.engine.sampling.params import SamplingRows, as_index

NO_TOKEN = -1
"""Sample of a row with a NaN or +inf logit, or with all logits -inf."""


def lowest_argmax(scores: torch.Tensor) -> torch.Tensor:
    """Return the highest entry of each row, the lowest index on ties: [rows, V] -> [rows] int64."""
    if scores.device.type == "cpu":  # numpy's is ten times faster than torch's here
        return torch.from_numpy(scores.numpy().argmax(axis=-1))
    return scores.argmax(dim=-1)


def finite_argmax(scores: torch.Tensor) -> torch.Tensor:
    """Return `lowest_argmax`, or NO_TOKEN where it is not finite. NaN counts as highest."""
    best = lowest_argmax(scores)
    value = scores.gather(-1, best.unsqueeze(-1)).squeeze(-1)
    return torch.where(value.isfinite(), best, NO_TOKEN)


def _sorted_descending(scores: torch.Tensor) -> torch.Tensor:
    if scores.device.type == "cpu":  # likewise
        return torch.from_numpy(np.sort(scores.numpy(), axis=-1)).flip(-1)
    return scores.sort(dim=-1, descending=True).values


def _keep_top(scores: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Set everything outside top-k and top-p to -inf in scores [rows, V].

    Only values are sorted; ties at the edge value are kept by ascending id. top_p: [rows, 1]
    float32, infinity for off; top_k: [rows, 1] int64, V for off."""
    ranked = _sorted_descending(scores)
    inside_k = torch.arange(scores.shape[-1], device=scores.device) < top_k
    mass = torch.where(inside_k, ranked, -torch.inf).softmax(dim=-1)
    mass_above = mass.cumsum(dim=-1) - mass
    num_kept = ((mass_above < top_p) & inside_k).sum(dim=-1, keepdim=True).clamp_(min=1)
    edge = ranked.gather(-1, num_kept - 1)
    kept = scores >= edge
    surplus = kept.sum(dim=-1, keepdim=True) - num_kept
    if surplus.any():
        tied = scores == edge
        last_of_ties = tied.sum(dim=-1, keepdim=True) - surplus
        kept &= ~tied | (tied.cumsum(dim=-1) <= last_of_ties)
    return torch.where(kept, scores, -torch.inf)


def _point_mass(logits: torch.Tensor) -> torch.Tensor:
    scores = torch.full_like(logits, -torch.inf)
    return scores.scatter_(-1, lowest_argmax(logits).unsqueeze(-1), 0.0)


def _column(values: np.ndarray, like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(values).to(device=like.device, dtype=dtype).unsqueeze(-1)


def filter_logits(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Return unnormalised log-probabilities of the distribution that ``rows`` define.

    logits: [rows, V] float32. The result has the same shape, row maxima of 0, and -inf for filtered
    tokens. Rows without filters are not sorted. A row at temperature 0 is a point mass at its
    highest logit, the lowest id on ties."""
    vocab_size = logits.shape[-1]
    greedy = rows.greedy
    divisor = _column(np.where(greedy, 1.0, rows.temperature), logits, torch.float32)
    # Before the division, so that a temperature near 0 cannot overflow the maxima.
    scores = (logits - logits.amax(dim=-1, keepdim=True)).div_(divisor)
    if rows.min_p is not None:
        # The likeliest token is at 0 here.
        least = _column(rows.min_p, logits, torch.float32).log()
        scores.masked_fill_(scores < least, -torch.inf)
    has_top_k = (rows.top_k > 0) & (rows.top_k < vocab_size)
    filtered = np.flatnonzero(((rows.top_p < 1.0) | has_top_k) & ~greedy)
    if filtered.size:
        top_p = np.where(rows.top_p < 1.0, rows.top_p, np.inf)[filtered]
        top_k = np.where(has_top_k, rows.top_k, vocab_size)[filtered]
        index = as_index(filtered, logits)
        scores[index] = _keep_top(
            scores[index],
            _column(top_p, logits, torch.float32),
            _column(top_k, logits, torch.int64),
        )
    if greedy.any():
        index = as_index(np.flatnonzero(greedy), logits)
        scores[index] = _point_mass(logits[index])
    return scores


def filtered_probs(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Return the distribution that ``rows`` define: [rows, V] float32, rows sum to 1."""
    return filter_logits(logits, rows).softmax(dim=-1)
