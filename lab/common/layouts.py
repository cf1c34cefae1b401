"""The cost of a ragged batch's layouts: packed, padded and decomposed (Spin, figure 12).

`padded` keeps contexts in a tensor as wide as the longest. `packed` reads each request's own tokens
only. `decomposed` is Spin's (`penstock.fluid.packing`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from penstock.fluid.packing import AttentionCost, Decomposition, checked_lengths, decompose

Layout = Literal["packed", "padded", "decomposed"]
LAYOUTS: tuple[Layout, ...] = ("packed", "padded", "decomposed")


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
    sizes = checked_lengths(lengths)
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
