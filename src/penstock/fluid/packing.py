"""Request decomposition of ragged batches (Spin, section V-A).

Requests are cut into pieces, which are laid into rows of equal length; every piece carries a copy
of its request's queries, and the partial results are merged. The planner only counts tokens and
rows."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

_LENGTHS_TRIED = 48
"""Row lengths that `best_decomposition` tries; a finer grid costs more than it saves."""
_ROWS_TRIED = (0.5, 1.0, 1.5, 2.0)
"""Rows per request that `best_decomposition` tries with `decompose`."""


@dataclass(frozen=True, slots=True)
class Decomposition:
    """Pieces of requests in rows of equal length: Spin's L x B tensor.

    num_rows:   B
    row_length: L, in tokens
    request, start, stop: [num_pieces]; piece k holds tokens start..stop-1 of that request
    row, offset: [num_pieces]; it lies at columns offset..offset+stop-start-1 of that row
    slot:       [num_pieces]; its number among the pieces of its row"""

    num_rows: int
    row_length: int
    request: IntArray
    start: IntArray
    stop: IntArray
    row: IntArray
    offset: IntArray
    slot: IntArray

    @property
    def num_pieces(self) -> int:
        return len(self.request)

    @property
    def num_slots(self) -> int:
        """Pieces of the fullest row, and so copies of the query window in each row."""
        return int(self.slot.max()) + 1

    @property
    def kv_tokens(self) -> int:
        return self.num_rows * self.row_length

    @property
    def padding(self) -> int:
        """Columns that hold no token."""
        return self.kv_tokens - int((self.stop - self.start).sum())


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Seconds of one layer's attention, or any other common unit.

    per_call:     each attention call
    per_kv_token: reading one token's keys and values
    per_score:    one query position against one token, masked ones included
    per_partial:  merging one query position of one piece"""

    per_call: float
    per_kv_token: float
    per_score: float
    per_partial: float = 0.0

    def seconds(self, calls: int, kv_tokens: int, scores: int, partials: int = 0) -> float:
        return (
            self.per_call * calls
            + self.per_kv_token * kv_tokens
            + self.per_score * scores
            + self.per_partial * partials
        )


def decompose(lengths: Sequence[int], num_rows: int) -> Decomposition:
    """Cut and pack into at most `num_rows` rows with the fewest padded tokens.

    The shortest L that holds everything is the mean of a row, rounded up, as a row may take pieces
    of several requests; fewer than B tokens are padded. Whole rows are cut from long requests
    first. The rest goes where it fits best, the longest first, and is cut again if it fits nowhere.

    lengths: tokens of each request, at least 1. Raises ValueError otherwise, or for no rows."""
    sizes = checked_lengths(lengths)
    if num_rows < 1:
        raise ValueError(f"num_rows is {num_rows}; must be at least 1")
    row_length = -(-sum(sizes) // num_rows)
    pieces: list[tuple[int, int, int, int, int]] = []
    rest: list[tuple[int, int, int]] = []
    for request, size in enumerate(sizes):
        whole = size - size % row_length
        for start in range(0, whole, row_length):
            pieces.append((len(pieces), 0, request, start, start + row_length))
        if whole < size:
            rest.append((size - whole, request, whole))
    room = [(row_length, row) for row in range(len(pieces), num_rows)]
    for size, request, start in sorted(rest, reverse=True):
        while size:
            free, row = room.pop(min(bisect_left(room, (size, 0)), len(room) - 1))
            taken = min(size, free)
            pieces.append((row, row_length - free, request, start, start + taken))
            size, start = size - taken, start + taken
            if taken < free:
                insort(room, (free - taken, row))
    return _decomposition(row_length, pieces)


def cut(lengths: Sequence[int], row_length: int) -> Decomposition:
    """Cut requests every `row_length` tokens into rows of one piece each.

    A split-KV kernel does so. No query meets another request's tokens; each request's last row is
    padded. Raises ValueError as `decompose`."""
    if row_length < 1:
        raise ValueError(f"row_length is {row_length}; must be at least 1")
    sizes = np.array(checked_lengths(lengths), dtype=np.int64)
    counts = -(-sizes // row_length)
    request = np.repeat(np.arange(len(sizes)), counts)
    row = np.arange(len(request))
    start = (row - np.repeat(np.cumsum(counts) - counts, counts)) * row_length
    stop = np.minimum(start + row_length, sizes[request])
    zero = np.zeros_like(row)
    return Decomposition(len(row), row_length, request, start, stop, row, zero, zero)


def best_decomposition(lengths: Sequence[int], window: int, cost: AttentionCost) -> Decomposition:
    """Return the cheapest rows, with the cost of copied queries and merging.

    Few long rows repeat few queries, but pad or multiply each query with the tokens of other
    requests in its row. Many short rows do neither and merge more. Tried are `decompose` with half
    to twice as many rows as requests, and `cut` at lengths from 16 tokens up.

    window: query positions of each request. Raises ValueError as `decompose`."""
    sizes = np.array(checked_lengths(lengths), dtype=np.int64)
    longest = int(sizes.max())
    tried = np.unique(np.geomspace(min(16, longest), longest, _LENGTHS_TRIED).astype(np.int64))
    rows = (-(-sizes[:, None] // tried)).sum(axis=0)
    kv_tokens = rows * tried
    seconds = (cost.per_kv_token + cost.per_score * window) * kv_tokens
    seconds += cost.per_partial * window * rows
    best = cut(lengths, int(tried[np.argmin(seconds)]))
    found = _seconds(best, window, cost)
    for share in _ROWS_TRIED:
        candidate = decompose(lengths, max(1, round(share * len(sizes))))
        if _seconds(candidate, window, cost) < found:
            best, found = candidate, _seconds(candidate, window, cost)
    return best


def _seconds(plan: Decomposition, window: int, cost: AttentionCost) -> float:
    scores = plan.kv_tokens * plan.num_slots * window
    return cost.seconds(1, plan.kv_tokens, scores, plan.num_pieces * window)


def checked_lengths(lengths: Sequence[int]) -> list[int]:
    """Return the lengths as a list. Raises ValueError without any, or for one below 1."""
    sizes = [int(length) for length in lengths]
    if not sizes or min(sizes) < 1:
        raise ValueError(f"lengths are {sizes}; needed is one of at least 1 token for each request")
    return sizes


def _decomposition(row_length: int, pieces: list[tuple[int, int, int, int, int]]) -> Decomposition:
    """Build from (row, offset, request, start, stop)."""
    row, offset, request, start, stop = np.array(sorted(pieces), dtype=np.int64).T
    rows, first, row = np.unique(row, return_index=True, return_inverse=True)
    slot = np.arange(len(row)) - first[row]
    return Decomposition(len(rows), row_length, request, start, stop, row, offset, slot)
