"""KV cache of texts without scheduled blocks, with least-recently-used eviction."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field

from penstock.core.kv import BlockPool
from penstock.engine.drafters.model import ModelDrafter


@dataclass(slots=True)
class CachedText:
    """Blocks of a text.

    num_computed: its tokens in the cache. num_listed: blocks in the drafter's table. is_branch:
    forked from another text, and evicted first."""

    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    num_listed: int = 0
    is_branch: bool = False


class RecentKv:
    """KV cache of one model, which evicts the least recently used texts."""

    def __init__(self, drafter: ModelDrafter) -> None:
        runner = drafter.runner
        self.pool = BlockPool(runner.num_blocks, runner.block_size, prefix_caching=False)
        self._drafter = drafter
        self._texts: OrderedDict[str, CachedText] = OrderedDict()

    def text_of(self, key: str) -> CachedText:
        """Return a text's entry and mark it as used."""
        cached = self._texts.setdefault(key, CachedText())
        self._texts.move_to_end(key)
        return cached

    def cut(self, key: str, length: int) -> None:
        """Invalidate the tokens of a text from `length` on."""
        cached = self._texts.get(key)
        if cached is not None:
            cached.num_computed = min(cached.num_computed, length)

    def grow(
        self, key: str, num_tokens: int, spared: Container[str] | None
    ) -> tuple[int, ...] | None:
        """Allocate blocks for `num_tokens` tokens of a text, evicting all texts but `spared`.

        Returns the blocks that its table lacks; None if memory is short. spared: None: evict none.
        """
        cached = self._texts[key]
        missing = max(0, self.pool.blocks_for(num_tokens) - len(cached.blocks))
        if spared is not None:
            self._make_room(missing, spared)
        if not self.pool.can_allocate(missing):
            return None
        cached.blocks += self.pool.allocate(missing) if missing else []
        unlisted = tuple(cached.blocks[cached.num_listed :])
        cached.num_listed = len(cached.blocks)
        return unlisted

    def fork(self, key: str, branch: str, num_tokens: int) -> None:
        """Start a text that shares `num_tokens` tokens with another.

        Full blocks are shared; the rest, at least the last token, is computed again."""
        own = self._texts.get(key)
        if own is None:
            return
        num_common = min(own.num_computed, num_tokens - 1) // self.pool.block_size
        blocks = own.blocks[:num_common]
        self.pool.share(blocks)
        num_computed = num_common * self.pool.block_size
        self._texts[branch] = CachedText(num_computed, blocks, is_branch=True)

    def evict(self, key: str) -> None:
        """Free the blocks of a text."""
        cached = self._texts.pop(key, None)
        if cached is not None:
            self.pool.free(cached.blocks)
            self._drafter.drop_table(key)

    def _make_room(self, num_blocks: int, spared: Container[str]) -> None:
        """Evict texts until `num_blocks` are free: branches first, then the least recently used."""
        keys = [k for k in self._texts if k not in spared]
        for key in sorted(keys, key=lambda k: not self._texts[k].is_branch):
            if self.pool.can_allocate(num_blocks):
                break
            self.evict(key)
