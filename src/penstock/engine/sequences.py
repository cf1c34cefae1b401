"""Per-request state of the engine: tokens, and one block table for each model."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from penstock.core.types import Request
from penstock.engine.ends import End, OutputEnd
from penstock.engine.grammar import GrammarState
from penstock.engine.runner import IntArray
from penstock.engine.sampling import SamplingRows, TextSoFar
from penstock.engine.sampling.params import BoolArray


class BlockTables:
    """Block tables of one model as rows of one matrix, so that a batch gathers them at once.

    The lowest free row is taken, so that requests at once are in so many rows."""

    def __init__(self, max_blocks: int) -> None:
        self._matrix = np.zeros((8, max_blocks), dtype=np.int32)
        self._free = list(range(8))
        self._rows: dict[str, tuple[int, int, int]] = {}

    def extend(self, request_id: str, epoch: int, blocks: Sequence[int]) -> None:
        """Append blocks to a request's table; a new epoch starts it anew."""
        row, old_epoch, length = self._rows.get(request_id) or (self._take_row(), epoch, 0)
        if old_epoch != epoch:
            length = 0
        end = length + len(blocks)
        if blocks:
            self._matrix[row, length:end] = blocks
        self._rows[request_id] = (row, epoch, end)

    def drop(self, request_id: str) -> None:
        entry = self._rows.pop(request_id, None)
        if entry is not None:
            heapq.heappush(self._free, entry[0])

    def gather(self, request_ids: Sequence[str], num_blocks: int) -> IntArray:
        """Return a copy, [len(request_ids), num_blocks] int32."""
        return np.ascontiguousarray(self._matrix[self.rows(request_ids), :num_blocks])

    def rows(self, request_ids: Sequence[str]) -> IntArray:
        """Return the requests' rows: [len(request_ids)] int32."""
        return np.array([self._rows[r][0] for r in request_ids], dtype=np.int32)

    def _take_row(self) -> int:
        if not self._free:
            size = self._matrix.shape[0]
            self._matrix = np.concatenate([self._matrix, np.zeros_like(self._matrix)])
            self._free = list(range(size, 2 * size))
        return heapq.heappop(self._free)


class TokenBuffer:
    """Known tokens of a request: the prompt, then the output.

    grammar: of the output, if any. end: finds the output's end (None: without stop strings)."""

    def __init__(
        self,
        request: Request,
        grammar: GrammarState | None = None,
        end: OutputEnd | None = None,
    ) -> None:
        if request.prompt_token_ids is None:
            raise ValueError("the engine needs the prompt's tokens, not only its length")
        self.request = request
        self.grammar = grammar
        self._end = end or OutputEnd(request)
        self._fault: str | None = None
        self._reads_text = request.sampling.reads_text
        self._tokens = np.empty(request.prompt_len + request.max_tokens + 64, dtype=np.int32)
        self._tokens[: request.prompt_len] = request.prompt_token_ids
        self.length = request.prompt_len

    def append(self, token_ids: Sequence[int]) -> None:
        end = self.length + len(token_ids)
        self._tokens[self.length : end] = token_ids
        self.length = end

    def append_output(self, token_ids: Sequence[int]) -> End | None:
        """Append the tokens of a round, up to the output's end, which is returned."""
        end = self._end.follow(token_ids)
        self.append(token_ids if end is None else token_ids[: end.num_tokens])
        return end

    def append_inside(self, token_ids: Sequence[int]) -> None:
        """Append tokens that do not end the output, or are its last."""
        self._end.skip(len(token_ids))
        self.append(token_ids)

    def foresee(self, token_ids: Sequence[int]) -> None:
        """Write guesses behind the known tokens, for a model to read; they last until `append`."""
        self._tokens[self.length : self.length + len(token_ids)] = token_ids

    def so_far(self, draft: Sequence[int], num_rows: int | None = None) -> TextSoFar | None:
        """Return the text with a draft for `change_logits`; None where logits are the model's own.

        num_rows: None is one more than the draft has tokens."""
        if not self._reads_text:
            return None
        request = self.request
        tokens = self.span(0, self.length)
        if draft:
            tokens = np.concatenate((tokens, np.array(draft, dtype=np.int32)))
        allowed = None
        if self.grammar is not None:
            allowed = self.grammar.masks(self, draft, num_rows or len(draft) + 1)
        return TextSoFar(tokens, request.prompt_len, sorted(request.stop_token_ids), allowed)

    def forced(self) -> tuple[int, ...]:
        """Return tokens that must come next by the grammar."""
        grammar = self.grammar
        return () if grammar is None or self.problem is not None else grammar.forced(self)

    @property
    def problem(self) -> str | None:
        """Reason why the output cannot go on, if so."""
        grammar = self.grammar
        return self._fault or self._end.problem or (None if grammar is None else grammar.problem)

    def fail(self, fault: str) -> None:
        """Let the output not go on."""
        self._fault = fault

    @property
    def is_ratio(self) -> bool:
        """True if its drafts are verified by rejection sampling."""
        return self.request.sampling.is_ratio

    def span(self, start: int, end: int) -> IntArray:
        """Return a view of the token ids of some positions."""
        return self._tokens[start:end]

    def tokens(self, start: int, end: int) -> list[int]:
        """Return the token ids of some positions."""
        return self._tokens[start:end].tolist()  # type: ignore[no-any-return]


class SamplingTable:
    """Sampling parameters of a batch as arrays, kept for the next batch, mostly the same."""

    def __init__(self) -> None:
        self._texts: list[TokenBuffer] = []
        self._entry = _sampling([])

    def rows_of(self, texts: list[TokenBuffer]) -> tuple[SamplingRows, BoolArray]:
        """Return the parameters, and which requests use rejection sampling: [n] bool."""
        if texts != self._texts:
            self._entry = _sampling(texts)
            self._texts = texts
        return self._entry


def _sampling(texts: Sequence[TokenBuffer]) -> tuple[SamplingRows, BoolArray]:
    rows = SamplingRows.from_params([t.request.sampling for t in texts])
    return rows, np.array([t.is_ratio for t in texts], dtype=np.bool_)
