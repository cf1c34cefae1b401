"""Embeddings: hidden states behind the last norm, of one token of a prompt or of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from penstock.core.types import VerifyItem
from penstock.engine.runner import IntArray, RaggedBatch
from penstock.engine.sequences import TokenBuffer


class PromptPools:
    """Pools the prompts of requests that ask for embeddings, as their chunks are computed.

    Sums are float64 and added in the order of the tokens, whatever the chunks."""

    def __init__(self) -> None:
        self._sums: dict[str, npt.NDArray[np.float64]] = {}

    def rows(
        self, items: Sequence[VerifyItem], texts: Mapping[str, TokenBuffer], batch: RaggedBatch
    ) -> IntArray:
        """Return the rows of a batch whose states are needed, ascending. items: its sequences."""
        ends = batch.query_start[1:].tolist()
        found = [_rows(i, texts[i.request_id], end) for i, end in zip(items, ends, strict=True)]
        return np.array([row for rows in found for row in rows], dtype=np.int32)

    def add(
        self, items: Sequence[VerifyItem], texts: Mapping[str, TokenBuffer], batch: RaggedBatch
    ) -> dict[str, bytes]:
        """Take in the states of `rows`, which a pass has kept; return finished embeddings.

        They are float32, by request. One that is not finite is empty."""
        carry, finished = batch.carry, dict[str, bytes]()
        for item, end in zip(items, batch.query_start[1:].tolist(), strict=True):
            text, request_id = texts[item.request_id], item.request_id
            if text.request.pooling is None:
                continue
            if carry is not None and (rows := _rows(item, text, end)):
                first = int(np.searchsorted(carry.rows, rows[0]))
                states = carry.after[first : first + len(rows)].cpu().numpy().astype(np.float64)
                if item.start and request_id in self._sums:
                    states = np.concatenate((self._sums[request_id][None], states))
                self._sums[request_id] = np.add.reduce(states, axis=0)
            if item.start + item.num_scheduled_tokens == text.length:
                mean = self._sums.pop(request_id)
                mean /= text.length if text.request.pooling == "mean" else 1
                is_finite = np.isfinite(mean).all()
                finished[request_id] = mean.astype(np.float32).tobytes() if is_finite else b""
        return finished

    def release_request(self, request_id: str) -> None:
        """Drop the state of a request."""
        self._sums.pop(request_id, None)


def _rows(item: VerifyItem, text: TokenBuffer, end: int) -> range:
    """Return those of an item's rows, of which `end` is behind the last, that are pooled."""
    begin = end - item.num_scheduled_tokens
    match text.request.pooling:
        case "mean":
            return range(begin, end)
        case "cls" if item.start == 0:
            return range(begin, begin + 1)
        case "last" if item.start + item.num_scheduled_tokens == text.length:
            return range(end - 1, end)
    return range(0)
