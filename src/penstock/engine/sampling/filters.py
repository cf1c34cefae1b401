"""Temperature, min-p, top-k and top-p: what turns logits into the distribution that is sampled.

In the usual order: divide by the temperature, drop what is less likely than min-p times the
likeliest, keep the k highest, then of their renormalised masses keep the smallest set of the
highest that reaches p. Where tokens tie at the edge of a set,
the lowest ids are kept, so that the distribution is the same on every machine.
"""

from __future__ import annotations

import numpy as np
import torch

from penstock.engine.sampling.params import SamplingRows, as_index

NO_TOKEN = -1
"""The sample of a row whose logits are not finite: one is NaN or +inf, or all are -inf."""


def lowest_argmax(scores: torch.Tensor) -> torch.Tensor:
    """The highest entry of each row, the lowest index on ties: [rows, V] -> [rows] int64."""
    if scores.device.type == "cpu":  # numpy's is ten times faster than torch's here
        return torch.from_numpy(scores.numpy().argmax(axis=-1))
    return scores.argmax(dim=-1)


def finite_argmax(scores: torch.Tensor) -> torch.Tensor:
    """The same; NO_TOKEN where the highest is not finite. NaN counts as higher than all."""
    best = lowest_argmax(scores)
    value = scores.gather(-1, best.unsqueeze(-1)).squeeze(-1)
    return torch.where(value.isfinite(), best, NO_TOKEN)


def _sorted_descending(scores: torch.Tensor) -> torch.Tensor:
    if scores.device.type == "cpu":  # likewise
        return torch.from_numpy(np.sort(scores.numpy(), axis=-1)).flip(-1)
    return scores.sort(dim=-1, descending=True).values


def _keep_top(scores: torch.Tensor, top_p: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Scores [rows, V] with everything outside top-k and top-p at -inf.

    Only values are sorted; the edge value then tells who is kept, ties by ascending id.
    top_p: [rows, 1] float32, infinity for off; top_k: [rows, 1] int64, V for off.
    """
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
    """Unnormalised log-probabilities of the distribution that ``rows`` define.

    logits: [rows, V] float32; the result has the same shape, its rows have their maximum at 0 and
    -inf where a token is filtered away. Rows without filters are not sorted. A row at temperature
    0 is a point mass at its highest logit, the lowest id on ties.
    """
    vocab_size = logits.shape[-1]
    greedy = rows.greedy
    divisor = _column(np.where(greedy, 1.0, rows.temperature), logits, torch.float32)
    # Before the division, so that a temperature near 0 cannot overflow the winners.
    scores = (logits - logits.amax(dim=-1, keepdim=True)).div_(divisor)
    if rows.min_p is not None:
        # The likeliest is at 0 by now.
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
    """The distribution that ``rows`` define: [rows, V] float32, every row summing to 1."""
    return filter_logits(logits, rows).softmax(dim=-1)
