"""KV blocks of one model: reference counts, and a prefix cache over verified full blocks.

Free blocks, in the order in which they are taken:
|<- empty, last freed first ->|<- never used ->|<- cached, without readers, oldest first ->

A block with ref > 0 is in no list. Cached blocks keep their hash until they are reclaimed."""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


def hash_blocks(
    token_ids: Sequence[int],
    block_size: int,
    salt: str,
    parent: bytes = b"",
) -> tuple[bytes, ...]:
    """Return chained hashes of the full blocks of `token_ids`.

    They are equal exactly where the whole prefix and the tenant's salt are; 128 bits, so that a
    collision cannot be made to leak a prefix."""
    hashes = []
    parent = parent or hashlib.blake2b(salt.encode(), digest_size=16).digest()
    num_bytes = 4 * block_size
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    for end in range(num_bytes, len(packed) + 1, num_bytes):
        block = packed[end - num_bytes : end]
        parent = hashlib.blake2b(parent + block, digest_size=16).digest()
        hashes.append(parent)
    return tuple(hashes)


class BlockPool:
    """KV blocks of one model."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks, not {num_blocks} of {block_size} tokens")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.num_snapshots: int | None = None
        """Copies of recurrent states, which a shared prefix needs where the model has some."""
        self.peak_used_blocks = 0
        self._num_free = num_blocks
        self._empty: list[int] = []
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._refs: list[int] = []
        """Reference counts of every block that was ever used: ids are handed out from 0 on."""
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self.snapshots: OrderedDict[bytes, int] = OrderedDict()
        """Their places, by the hash of the last block before them; the latest used last."""

    @property
    def num_free_blocks(self) -> int:
        return self._num_free

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self._num_free

    @property
    def capacity_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, num_blocks: int) -> bool:
        return num_blocks <= self._num_free

    def count(self, num_blocks: int) -> None:
        """Take blocks (give back, if negative) by number: all there is where nothing reads ids.

        Ask `can_allocate` first."""
        self._num_free -= num_blocks
        used = self.num_blocks - self._num_free
        if used > self.peak_used_blocks:
            self.peak_used_blocks = used

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks, reclaiming the least recently used cached ones last. `can_allocate` first.

        Raises: RuntimeError if there are not enough."""
        if not self.can_allocate(num_blocks):
            raise RuntimeError(f"{num_blocks} blocks wanted, {self._num_free} free")
        taken = [self._next_free() for _ in range(num_blocks)]
        self.count(num_blocks)
        return taken

    def _next_free(self) -> int:
        if self._empty:
            block = self._empty.pop()
        elif len(self._refs) < self.num_blocks:
            block = len(self._refs)
            self._refs.append(0)
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget_hash(block)
        self._refs[block] = 1
        return block

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Cached blocks of the longest known prefix of `hashes`; nothing is taken yet."""
        found: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        if self.num_snapshots is not None:
            while found and hashes[len(found) - 1] not in self.snapshots:
                found.pop()
        return found

    def snapshot(self, block_hash: bytes) -> int:
        """Return the place of a state, or that of the least recently used for a new one."""
        known = self.snapshots.pop(block_hash, None)
        if known is None and len(self.snapshots) == self.num_snapshots:
            _, known = self.snapshots.popitem(last=False)
        place = self.snapshots[block_hash] = len(self.snapshots) if known is None else known
        return place

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reader to cached blocks that `match` has returned."""
        num_idle = 0
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached[block]
                num_idle += 1
            self._refs[block] += 1
        self.count(num_idle)

    def num_idle(self, blocks: Iterable[int]) -> int:
        """Return how many of `blocks` have no reader: sharing takes them off the free list."""
        return sum(self._refs[block] == 0 for block in blocks)

    def commit(self, block: int, block_hash: bytes) -> None:
        """Offer a full block of verified tokens for sharing. The first block with a hash wins."""
        if self.prefix_caching and block_hash not in self._block_of:
            self._forget_hash(block)
            self._hash_of[block] = block_hash
            self._block_of[block_hash] = block

    def drop_cache(self) -> None:
        """Forget what the blocks hold: their contents are lost."""
        self._hash_of.clear()
        self._block_of.clear()
        self.snapshots.clear()

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reader of each block. Later blocks of a sequence are reclaimed first."""
        for block in reversed(list(blocks)):
            self._refs[block] -= 1
            if self._refs[block] < 0:
                raise RuntimeError(f"block {block} was freed twice")
            if self._refs[block] == 0:
                self._num_free += 1
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._empty.append(block)

    def check(self) -> None:
        """Raise AssertionError unless every block is in exactly one place."""
        idle = sorted([*self._empty, *self._cached])
        assert idle == [b for b, refs in enumerate(self._refs) if refs == 0]
        assert len(self._refs) <= self.num_blocks
        assert all(self._block_of[h] == b for b, h in self._hash_of.items())
        assert len(self._hash_of) == len(self._block_of)

    def _forget_hash(self, block: int) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is not None:
            del self._block_of[block_hash]


@dataclass(slots=True)
class SequenceKV:
    """KV of one request in one model's pool.

    Positions from the known tokens on belong to drafts not yet verified. num_cached_tokens: those
    that came from the prefix cache."""

    num_computed_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    num_committed_blocks: int = 0
    num_cached_tokens: int = 0

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    def grow(self, pool: BlockPool, num_blocks: int) -> list[int]:
        """Take more blocks; returns their ids."""
        new_blocks = pool.allocate(num_blocks)
        self.blocks += new_blocks
        return new_blocks

    def give_back(self, pool: BlockPool) -> None:
        pool.free(self.blocks)

    def start_from(self, pool: BlockPool, cached: Sequence[int]) -> None:
        """Read blocks of the prefix cache, which `pool.match` has returned."""
        pool.share(cached)
        self.blocks = list(cached)
        self.num_committed_blocks = len(cached)
        self.num_computed_tokens = len(cached) * pool.block_size


@dataclass(slots=True)
class CountedKV(SequenceKV):
    """KV with only its number of blocks known."""

    num_blocks: int = 0

    def grow(self, pool: BlockPool, num_blocks: int) -> list[int]:
        pool.count(num_blocks)
        self.num_blocks += num_blocks
        return []

    def give_back(self, pool: BlockPool) -> None:
        pool.count(-self.num_blocks)

    def start_from(self, pool: BlockPool, cached: Sequence[int]) -> None:
        pool.share(cached)
        self.num_blocks = len(cached)
        self.num_computed_tokens = len(cached) * pool.block_size
