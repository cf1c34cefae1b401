"""vLLM's KV memory, for the scheduler's policies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from penstock.core.kv import BlockPool


class MirroredPool(BlockPool):
    """Counts vLLM's KV blocks; a plan's blocks count as used until the next `refresh`."""

    def __init__(self, manager: Any, block_size: int) -> None:
        # One is vLLM's null block.
        super().__init__(manager.block_pool.num_gpu_blocks - 1, block_size, prefix_caching=False)
        self._coordinator = manager.coordinator
        self._vllm = manager.block_pool

    def refresh(self) -> None:
        """Set the number of free blocks to vLLM's."""
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
