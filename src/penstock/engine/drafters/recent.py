"""KV of texts that no scheduler keeps blocks for: a cache, of those that were used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field

from penstock.core.kv.blocks import BlockPool
from penstock.engine.drafters.model import ModelDrafter


@dataclass(slots=True)
class CachedText:
    """What of a text is in the KV cache: its first `num_computed` tokens, in these blocks, of which
    the drafter's table lists the first. is_branch: it leaves another text, and goes first where
    memory is short."""

    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    num_listed: int = 0
    is_branch: bool = False


class RecentKv:
    """The KV cache of one model. It belongs to the texts that were used last; others lose theirs
    when it is full, and are read again when their turn comes."""

    def __init__(self, drafter: ModelDrafter) -> None:
        runner = drafter.runner
        self.pool = BlockPool(runner.num_blocks, runner.block_size, prefix_caching=False)
        self._drafter = drafter
        self._texts: OrderedDict[str, CachedText] = OrderedDict()

    def of(self, key: str) -> CachedText:
        """Of a text that is used now."""
        cached = self._texts.setdefault(key, CachedText())
        self._texts.move_to_end(key)
        return cached

    def cut(self, key: str, length: int) -> None:
        """What is beyond so many tokens of a text is void."""
        cached = self._texts.get(key)
        if cached is not None:
            cached.num_computed = min(cached.num_computed, length)

    def grow(
        self, key: str, num_tokens: int, spared: Container[str] | None
    ) -> tuple[int, ...] | None:
        """Have room for so many tokens of a text: the blocks that its table lacks, or None where
        there is no memory. spared: all other texts may lose theirs; None: none may."""
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
        """A new text has its first `num_tokens` tokens in common with another one. Full blocks are
        shared; the rest it reads again, the last token in any case."""
        own = self._texts.get(key)
        if own is None:
            return
        num_common = min(own.num_computed, num_tokens - 1) // self.pool.block_size
        blocks = own.blocks[:num_common]
        self.pool.share(blocks)
        num_computed = num_common * self.pool.block_size
        self._texts[branch] = CachedText(num_computed, blocks, is_branch=True)

    def evict(self, key: str) -> None:
        """Drop what there is of a text."""
        cached = self._texts.pop(key, None)
        if cached is not None:
            self.pool.free(cached.blocks)
            self._drafter.drop_table(key)

    def _make_room(self, num_blocks: int, spared: Container[str]) -> None:
        """Evict texts, branches before others and the least recently used first, until so many
        blocks are free."""
        keys = [k for k in self._texts if k not in spared]
        for key in sorted(keys, key=lambda k: not self._texts[k].is_branch):
            if self.pool.can_allocate(num_blocks):
                break
            self.evict(key)
