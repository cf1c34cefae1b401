"""Ragged batches: request decomposition (Spin, section V-A), and what every layout would cost.

Requests of a batch have contexts of different lengths. `padded` keeps them in a tensor as wide as
the longest. `packed` reads each one's own tokens and no more. `decomposed` cuts requests into
pieces and lays those into rows of equal length; every piece brings a copy of its request's queries,
and the partial results are merged. The planner decides about tokens and rows; it moves nothing.
"""

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
_ROWS_TRIED = (0.5, 1.0, 1.5, 2.0)


@dataclass(frozen=True, slots=True)
class Decomposition:
    """Pieces of requests in rows of equal length: Spin's L x B tensor.

    num_rows:   B
    row_length: L, in tokens
    request, start, stop: [num_pieces]; piece k holds tokens start..stop-1 of that request
    row, offset: [num_pieces]; it lies at columns offset..offset+stop-start-1 of that row
    slot:       [num_pieces]; its number among the pieces of its row
    """

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
        """Pieces of the fullest row: as many copies of the window of queries does each row get."""
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
    """Seconds of one layer's attention, or any unit that is the same for all four.

    per_call:     each attention call
    per_kv_token: a token's keys and values, read from the cache
    per_score:    one query position against one token, hidden ones included
    per_partial:  one query position of one piece, to be merged
    """

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
    """What one token occupies. `dtype_bytes` is the size of one number; packed tokens lie in blocks
    of `block_size`."""

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
    padding:    of those, how many belong to no request
    kv_bytes:   over all layers
    kv_read:    tokens that a layer's attention reads
    query_rows: query positions computed, copies and padding included
    scores:     query positions times the tokens that each is multiplied with
    partials:   results of pieces to be merged
    seconds:    predicted, all layers; None without a cost
    """

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

    With B fixed the padding is B L less what there is to hold, so the best L is the shortest one
    that holds everything; since a row may take pieces of several requests, that is the mean of a
    row, rounded up. Less than B tokens are padded. Whole rows are cut from long requests first;
    what is left goes, the longest first, where it fits best, and is cut again if it fits nowhere.

    lengths: tokens of each request, at least 1. Raises ValueError otherwise, or for no rows.
    """
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
    """Rows of one piece each: requests cut every `row_length` tokens, and no row shared.

    No query meets another request's tokens, and each request's last row is padded: what a split-KV
    kernel does. Raises ValueError as `decompose`.
    """
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
    """The cheapest number of rows and row length, where queries and merging count too.

    Few long rows repeat few queries, but either pad, or multiply each query with the tokens of
    whoever shares its row; many short rows do neither and merge more. Tried are `decompose` with
    half to twice as many rows as requests, and `cut` at lengths from 16 tokens up.

    window: query positions of each request. Raises ValueError as `decompose`.
    """
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
    """What each layout would cost for one batch.

    lengths: tokens of context of each request, this step's included; queries: query positions of
    each; costs: measured, by layout; decomposition: without one, Spin's with as many rows as
    requests. Raises ValueError for lengths or queries below 1 or of different number.
    """
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


def largest_batch(lengths: Sequence[int], kv_tokens: int, layout: Layout, shape: KVShape) -> int:
    """How many of these requests, in order, fit together into memory for `kv_tokens` tokens.

    Raises ValueError as `decompose`.
    """
    sizes = np.array(_checked(lengths), dtype=np.int64)
    count = np.arange(1, len(sizes) + 1)
    match layout:
        case "padded":
            held = count * np.maximum.accumulate(sizes)
        case "packed":
            held = np.cumsum(-(-sizes // shape.block_size)) * shape.block_size
        case "decomposed":
            held = -(-np.cumsum(sizes) // count) * count
    return int(np.argmax(np.append(held, kv_tokens + 1) > kv_tokens))


def _seconds(plan: Decomposition, window: int, cost: AttentionCost) -> float:
    scores = plan.kv_tokens * plan.num_slots * window
    return cost.seconds(1, plan.kv_tokens, scores, plan.num_pieces * window)


def _checked(lengths: Sequence[int]) -> list[int]:
    sizes = [int(length) for length in lengths]
    if not sizes or min(sizes) < 1:
        raise ValueError(f"lengths are {sizes}; needed is one of at least 1 token for each request")
    return sizes


def _decomposition(row_length: int, pieces: list[tuple[int, int, int, int, int]]) -> Decomposition:
    """From (row, offset, request, start, stop)."""
    row, offset, request, start, stop = np.array(sorted(pieces), dtype=np.int64).T
    rows, first, row = np.unique(row, return_index=True, return_inverse=True)
    slot = np.arange(len(row)) - first[row]
    return Decomposition(len(rows), row_length, request, start, stop, row, offset, slot)
