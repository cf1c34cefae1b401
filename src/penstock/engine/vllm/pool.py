"""vLLM's KV memory, as the scheduler's policies see it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.core.kv import BlockPool


class MirroredPool(BlockPool):
    """vLLM's KV blocks by their number: which are whose is its own affair. What a plan takes is
    only counted, until the next `refresh`.

    manager: its KV cache manager.
    """

    def __init__(self, manager: Any, block_size: int) -> None:
        # One of them is its null block.
        super().__init__(manager.block_pool.num_gpu_blocks - 1, block_size, prefix_caching=False)
        self._coordinator = manager.coordinator
        self._vllm = manager.block_pool

    def refresh(self) -> None:
        """As many are free as vLLM says."""
        self.count(self.num_free_blocks - self._vllm.get_num_free_blocks())

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        most = len(hashes) * self.block_size
        found = self._coordinator.find_longest_cache_hit(list(hashes), most)[0]
        return [block.block_id for block in found[0]]

    def num_idle(self, blocks: Iterable[int]) -> int:
        return sum(self._vllm.blocks[b].ref_cnt == 0 for b in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        self.count(self.num_idle(blocks))

    def allocate(self, num_blocks: int) -> list[int]:
        self.count(num_blocks)
        return [0] * num_blocks

    def free(self, blocks: Iterable[int]) -> None:
        self.count(-len(list(blocks)))
