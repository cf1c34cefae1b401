"""What a request's text so far changes in its logits, before temperature and filters.

The target's logits are changed at verification, each row by the text that it stands behind: the
known tokens, and the draft's tokens before it. So a row's distribution is the same with a draft and
without. A drafter that changes its own logits likewise is accepted more often, and need not.

In vLLM's order: logit_bias, min_tokens, then penalties; a grammar's masks go before all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from penstock.core.types import SamplingParams


class TextSoFar(NamedTuple):
    """The text that some rows of logits stand behind.

    token_ids:      [n] int32, prompt and output, and the draft of the last rows
    prompt_len:     of them the prompt's
    stop_token_ids: that end the request, ascending
    allowed:        [rows, words] int32, a bit for each token that may come, of those rows; None
                    allows all
    """

    token_ids: npt.NDArray[np.int32]
    prompt_len: int
    stop_token_ids: Sequence[int]
    allowed: npt.NDArray[np.int32] | None = None


class Changed(NamedTuple):
    """One request's rows of a batch of logits: how many, and what changes them, if anything."""

    num_rows: int
    sampling: SamplingParams
    text: TextSoFar | None


def change_logits(logits: torch.Tensor, parts: Sequence[Changed]) -> None:
    """Change the logits of several requests, in place.

    logits: [rows, V] float32, those of each request behind those of the one before. The last row of
    one is behind its whole text, each one before it behind a token less; at most one row more than
    there are draft tokens. Token ids beyond V are left out.
    """
    _mask(logits, parts)
    end = 0
    for num_rows, sampling, text in parts:
        begin, end = end, end + num_rows
        if text is not None and sampling.reads_tokens:
            _change(logits[begin:end], sampling, text)


def _mask(logits: torch.Tensor, parts: Sequence[Changed]) -> None:
    """A drafter that lacks all tokens that may come keeps its own logits."""
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
    """Which tokens masks [rows, words] forbid, [rows, vocab_size]; where none may come, all may.

    words: a bit for each token that may come, of the vocabulary or a larger one; written over
    """
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
    """Where nothing else may come the text does end."""
    stops = _known(stop_token_ids, logits)
    others = logits.clone()
    others[:, stops] = -torch.inf
    can_go_on = others.amax(dim=-1, keepdim=True) > -torch.inf
    logits.copy_(torch.where(can_go_on, others, logits))


def _penalise(logits: torch.Tensor, sampling: SamplingParams, text: TextSoFar) -> None:
    num_rows = logits.shape[0]
    ids, place = np.unique(text.token_ids, return_inverse=True)
    prompted = np.bincount(place[: text.prompt_len], minlength=len(ids)) > 0
    # Of each row the output that it stands behind: what all of them have, then a token more each.
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
    """As an index: those, in ascending order, that the logits have."""
    ids = np.asarray(token_ids, dtype=np.int64)
    return torch.from_numpy(ids[ids < logits.shape[-1]]).to(logits.device)
