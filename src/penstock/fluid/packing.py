"""Ragged batches: request decomposition (Spin, section V-A), and the cost of each layout.

Contexts in a batch differ in length. `padded` keeps them in a tensor as wide as the longest.
`packed` reads each request's own tokens only. `decomposed` cuts requests into pieces and lays them
into rows of equal length; every piece carries a copy of its request's queries, and the partial
results are merged. The planner only counts tokens and rows."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Layout = Literal["packed", "padded", "decomposed"]
LAYOUTS: tuple[Layout, ...] = ("packed", "padded", "decomposed")

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


@dataclass(frozen=True, slots=True)
class KVShape:
    """Size of one token's KV. Packed tokens lie in blocks of `block_size`."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    block_size: int = 16

    @property
    def token_bytes(self) -> int:
        """Keys and values of all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype_bytes


@dataclass(frozen=True, slots=True)
class LayoutCost:
    """One layout of one batch.

    kv_tokens:  tokens of keys and values held, padding included
    padding:    tokens of them that belong to no request
    kv_bytes:   over all layers
    kv_read:    tokens read by one layer's attention
    query_rows: query positions computed, copies and padding included
    scores:     query positions times the tokens each is multiplied with
    partials:   results of pieces to be merged
    seconds:    predicted, all layers; None without a cost"""

    kv_tokens: int
    padding: int
    kv_bytes: int
    kv_read: int
    query_rows: int
    scores: int
    partials: int
    seconds: float | None


def decompose(lengths: Sequence[int], num_rows: int) -> Decomposition:
    """Cut and pack into at most `num_rows` rows with the fewest padded tokens.

    The shortest L that holds everything is the mean of a row, rounded up, as a row may take pieces
    of several requests; fewer than B tokens are padded. Whole rows are cut from long requests
    first. The rest goes where it fits best, the longest first, and is cut again if it fits nowhere.

    lengths: tokens of each request, at least 1. Raises ValueError otherwise, or for no rows."""
    sizes = _checked(lengths)
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
    sizes = np.array(_checked(lengths), dtype=np.int64)
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
    sizes = np.array(_checked(lengths), dtype=np.int64)
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


def compare(
    lengths: Sequence[int],
    queries: Sequence[int],
    shape: KVShape,
    costs: Mapping[Layout, AttentionCost] | None = None,
    decomposition: Decomposition | None = None,
) -> dict[Layout, LayoutCost]:
    """Return the cost of each layout for one batch.

    lengths: context tokens of each request, this step's included; queries: query positions of each;
    costs: measured, by layout; decomposition: by default `decompose` with as many rows as requests.
    Raises ValueError for lengths or queries below 1 or of different number."""
    sizes = _checked(lengths)
    if len(queries) != len(sizes) or min(queries) < 1:
        raise ValueError(
            f"queries are {list(queries)}; needed is a number of at least 1 for each of "
            f"{len(sizes)} requests"
        )
    real, window = sum(sizes), max(queries)
    plan = decomposition or decompose(sizes, len(sizes))
    blocks = sum(-(-size // shape.block_size) for size in sizes)
    padded = len(sizes) * max(sizes)
    scores = sum(n * m for n, m in zip(sizes, queries, strict=True))
    partials = int(np.array(queries)[plan.request].sum())
    rows = plan.num_rows * plan.num_slots * window
    counted: dict[Layout, tuple[int, int, int, int, int, int]] = {
        "packed": (blocks * shape.block_size, real, sum(queries), scores, 0, len(sizes)),
        "padded": (padded, padded, len(sizes) * window, padded * window, 0, 1),
        "decomposed": (
            plan.kv_tokens,
            plan.kv_tokens,
            rows,
            rows * plan.row_length,
            partials,
            1,
        ),
    }
    found: dict[Layout, LayoutCost] = {}
    for layout, (held, read, query_rows, products, merged, calls) in counted.items():
        seconds = None
        if costs is not None:
            layer = costs[layout].seconds(calls, read, products, merged)
            seconds = shape.num_layers * layer
        held_bytes = held * shape.token_bytes
        found[layout] = LayoutCost(
            held, held - real, held_bytes, read, query_rows, products, merged, seconds
        )
    return found


def _seconds(plan: Decomposition, window: int, cost: AttentionCost) -> float:
    scores = plan.kv_tokens * plan.num_slots * window
    return cost.seconds(1, plan.kv_tokens, scores, plan.num_pieces * window)


def _checked(lengths: Sequence[int]) -> list[int]:
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
