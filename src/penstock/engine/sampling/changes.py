"""Changes of logits by a request's text so far, before temperature and filters.

The target's logits are changed at verification, each row by the text before it: the known tokens
and the preceding draft tokens. A row's distribution is thus the same with and without a draft. A
drafter may change its own logits likewise, for more acceptance.

The order is vLLM's: masks of a grammar, logit_bias, min_tokens, then penalties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.types import SamplingParams


class TextSoFar(NamedTuple):
    """Text before some rows of logits.

    token_ids:      [n] int32, prompt, output, and the draft of the last rows
    prompt_len:     prompt tokens of these
    stop_token_ids: tokens that end the request, ascending
    allowed:        [rows, words] int32, one bit per allowed token; None allows all"""

    token_ids: npt.NDArray[np.int32]
    prompt_len: int
    stop_token_ids: Sequence[int]
    allowed: npt.NDArray[np.int32] | None = None


class Changed(NamedTuple):
    """Rows of one request in a batch of logits, and their changes."""

    num_rows: int
    sampling: SamplingParams
    text: TextSoFar | None


def change_logits(logits: torch.Tensor, parts: Sequence[Changed]) -> None:
    """Change the logits of several requests in place.

    logits: [rows, V] float32, the requests' rows one after the other. A request's last row stands
    behind its whole text, each earlier one behind one token less; it has at most one row more than
    draft tokens. Token ids beyond V are ignored."""
    _mask(logits, parts)
    end = 0
    for num_rows, sampling, text in parts:
        begin, end = end, end + num_rows
        if text is not None and sampling.reads_tokens:
            _change(logits[begin:end], sampling, text)


def _mask(logits: torch.Tensor, parts: Sequence[Changed]) -> None:
    """Mask by the grammar. A drafter that lacks all allowed tokens keeps its own logits."""
    masks: list[npt.NDArray[np.int32]] = []
    rows: list[int] = []
    end = 0
    for num_rows, _, text in parts:
        begin, end = end, end + num_rows
        if text is not None and text.allowed is not None:
            masks.append(text.allowed)
            rows += range(begin, end)
    if not masks:
        return
    forbidden = torch.from_numpy(forbidden_by(np.concatenate(masks), logits.shape[1]))
    forbidden = forbidden.to(logits.device)
    if len(rows) == logits.shape[0]:
        logits.masked_fill_(forbidden, -torch.inf)
    else:
        index = torch.tensor(rows, device=logits.device)
        logits[index] = logits[index].masked_fill_(forbidden, -torch.inf)


def forbidden_by(words: npt.NDArray[np.int32], vocab_size: int) -> npt.NDArray[np.bool_]:
    """Return the tokens that masks [rows, words] forbid, [rows, vocab_size].

    An empty mask forbids none.

    words: one bit per allowed token, of this vocabulary or a larger one; overwritten."""
    words = words[:, : -(-vocab_size // 32)]
    if vocab_size % 32:
        words[:, -1] &= (1 << vocab_size % 32) - 1
    words[~words.any(axis=1)] = -1
    bits = np.unpackbits((~words).view(np.uint8), axis=1, bitorder="little")[:, :vocab_size]
    return bits.view(np.bool_)


def _change(logits: torch.Tensor, sampling: SamplingParams, text: TextSoFar) -> None:
    if sampling.logit_bias:
        ids, values = zip(*sampling.logit_bias, strict=True)
        known = _known(ids, logits)
        bias = torch.tensor(values, device=logits.device)[: len(known)]
        logits[:, known] += bias
    if sampling.min_tokens:
        num_made = len(text.token_ids) - text.prompt_len - logits.shape[0] + 1
        _forbid_stops(logits[: max(0, sampling.min_tokens - num_made)], text.stop_token_ids)
    if sampling.has_penalties:
        _penalise(logits, sampling, text)


def _forbid_stops(logits: torch.Tensor, stop_token_ids: Sequence[int]) -> None:
    """Forbid the stop tokens, except where no other token is possible."""
    stops = _known(stop_token_ids, logits)
    others = logits.clone()
    others[:, stops] = -torch.inf
    can_go_on = others.amax(dim=-1, keepdim=True) > -torch.inf
    logits.copy_(torch.where(can_go_on, others, logits))


def _penalise(logits: torch.Tensor, sampling: SamplingParams, text: TextSoFar) -> None:
    num_rows = logits.shape[0]
    ids, place = np.unique(text.token_ids, return_inverse=True)
    prompted = np.bincount(place[: text.prompt_len], minlength=len(ids)) > 0
    # Output counts before each row: those common to all rows, then one token more per row.
    first = len(text.token_ids) - num_rows + 1
    made = np.zeros((num_rows, len(ids)), dtype=np.float32)
    made[0] = np.bincount(place[text.prompt_len : first], minlength=len(ids))
    made[np.arange(1, num_rows), place[first:]] = 1.0
    made.cumsum(axis=0, out=made)
    columns = _known(ids.tolist(), logits)
    counts = torch.from_numpy(made[:, : len(columns)]).to(logits.device)
    has = torch.from_numpy(prompted[: len(columns)]).to(logits.device) | (counts > 0)
    values = logits[:, columns]
    repeated = torch.where(
        values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty
    )
    values = torch.where(has, repeated, values)
    values -= sampling.frequency_penalty * counts
    values -= sampling.presence_penalty * (counts > 0)
    logits[:, columns] = values


def _known(token_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """Return the token ids that the logits have, as an index. `token_ids` are ascending."""
    ids = np.asarray(token_ids, dtype=np.int64)
    return torch.from_numpy(ids[ids < logits.shape[-1]]).to(logits.device)
