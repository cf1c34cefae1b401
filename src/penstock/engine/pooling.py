"""Embeddings: hidden states behind the last norm, of one token of a prompt or of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from penstock.core.types import VerifyItem
from penstock.engine.runner import IntArray, RaggedBatch
from penstock.engine.sequences import TokenBuffer

Floats = npt.NDArray[np.float64]


class PromptPools:
    """Pools the prompts of requests that ask for embeddings, as their chunks are computed.

    Sums are float64 and added in the order of the tokens, whatever the chunks."""

    def __init__(self) -> None:
        self._pooled: dict[str, Floats] = {}

    def rows(
        self, items: Sequence[VerifyItem], texts: Mapping[str, TokenBuffer], batch: RaggedBatch
    ) -> IntArray:
        """Return the rows of a batch whose states are needed, ascending. items: its sequences."""
        starts, found = batch.query_start.tolist(), list[range]()
        for item, begin, end in zip(items, starts, starts[1:], strict=False):
            found.append(_rows(item, texts[item.request_id], begin, end))
        return np.array([row for rows in found for row in rows], dtype=np.int32)

    def add(
        self,
        items: Sequence[VerifyItem],
        texts: Mapping[str, TokenBuffer],
        batch: RaggedBatch,
    ) -> dict[str, bytes]:
        """Take in the states of `rows`, which a pass has kept; return finished embeddings.

        They are float32, by request. One that is not finite is empty."""
        carry, starts = batch.carry, batch.query_start.tolist()
        finished: dict[str, bytes] = {}
        if carry is None:
            return finished
        for item, begin, end in zip(items, starts, starts[1:], strict=False):
            text = texts[item.request_id]
            if text.request.pooling is None:
                continue
            if rows := _rows(item, text, begin, end):
                first = int(np.searchsorted(carry.rows, rows[0]))
                states = carry.after[first : first + len(rows)].cpu().numpy().astype(np.float64)
                before = self._pooled.get(item.request_id)
                if item.start and before is not None:
                    states = np.concatenate((before[None], states))
                self._pooled[item.request_id] = np.add.reduce(states, axis=0)
            if item.start + item.num_scheduled_tokens == text.length:
                finished[item.request_id] = self._finish(item.request_id, text)
        return finished

    def release_request(self, request_id: str) -> None:
        """Drop the state of a request."""
        self._pooled.pop(request_id, None)

    def _finish(self, request_id: str, text: TokenBuffer) -> bytes:
        total = self._pooled.pop(request_id)
        if not np.isfinite(total).all():
            return b""
        num = text.length if text.request.pooling == "mean" else 1
        return (total / num).astype(np.float32).tobytes()


def _rows(item: VerifyItem, text: TokenBuffer, begin: int, end: int) -> range:
    """Return those of an item's rows, `begin..end - 1` of a batch, that are pooled."""
    match text.request.pooling:
        case "mean":
            return range(begin, end)
        case "cls" if item.start == 0:
            return range(begin, begin + 1)
        case "last" if item.start + item.num_scheduled_tokens == text.length:
            return range(end - 1, end)
    return range(0)
