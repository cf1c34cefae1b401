"""`decomposed` as Spin sets it (section V-A): as many rows B as there are requests, of the length L
with the fewest padded tokens."""

from __future__ import annotations

from penstock.core.packing import Decomposition, decompose
from penstock.engine.attention import decomposed
from penstock.engine.kv_cache import PagedKVCache


class Backend(decomposed.Backend):
    """See AttentionBackend."""

    def __init__(self, cache: PagedKVCache, num_heads: int) -> None:
        super().__init__(cache, num_heads, as_many_rows)


def as_many_rows(lengths: list[int], window: int) -> Decomposition:
    """B is the batch, whatever the copies of the window cost."""
    return decompose(lengths, len(lengths))
