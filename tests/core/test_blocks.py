import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.kv import BlockPool, hash_blocks


def test_hashes_chain_over_the_whole_prefix() -> None:
    whole = hash_blocks(range(12), 4, "tenant")
    assert len(whole) == 3
    assert hash_blocks(range(11), 4, "tenant") == whole[:2], "only full blocks have a hash"
    changed = hash_blocks([9, *range(1, 12)], 4, "tenant")
    assert all(a != b for a, b in zip(whole, changed, strict=True))


def test_hashes_go_on_from_a_parent() -> None:
    whole = hash_blocks(range(12), 4, "tenant")
    assert hash_blocks(range(4, 12), 4, "", parent=whole[0]) == whole[1:]


def test_tenants_share_nothing() -> None:
    ours, theirs = hash_blocks(range(8), 4, "us"), hash_blocks(range(8), 4, "them")
    assert not set(ours) & set(theirs)


def test_a_block_is_found_until_it_is_reclaimed() -> None:
    pool = BlockPool(3, 4)
    hashes = hash_blocks(range(8), 4, "")
    blocks = pool.allocate(2)
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.commit(block, block_hash)
    pool.free(blocks)
    assert pool.match(hashes) == blocks
    assert pool.num_idle(blocks) == 2

    pool.share(blocks)
    assert pool.num_free_blocks == 1
    assert pool.num_idle(blocks) == 0
    pool.free(blocks)

    pool.allocate(3)
    assert pool.match(hashes) == []
    pool.check()


def test_what_is_not_cached_is_reclaimed_first_then_the_least_recently_used() -> None:
    pool = BlockPool(5, 1)
    old = pool.allocate(2)
    recent = pool.allocate(2)
    for i, block in enumerate((*old, *recent)):
        pool.commit(block, bytes([i]))
    plain = pool.allocate(1)
    pool.free(old)
    pool.free(recent)
    pool.free(plain)
    later_first = [*plain, *reversed(old), *reversed(recent)]
    assert [pool.allocate(1)[0] for _ in range(5)] == later_first


def test_the_first_block_with_a_hash_wins() -> None:
    pool = BlockPool(2, 4)
    first, second = pool.allocate(2)
    pool.commit(first, b"same")
    pool.commit(second, b"same")
    assert pool.match([b"same"]) == [first]
    pool.free([first])
    pool.free([second])
    assert pool.allocate(1) == [second], "the copy is worth nothing"
    pool.check()


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(2, 4, prefix_caching=False)
    pool.commit(pool.allocate(1)[0], b"hash")
    assert pool.match([b"hash"]) == []


def test_a_dropped_cache_finds_nothing() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.allocate(1)
    pool.commit(blocks[0], b"hash")
    pool.drop_cache()
    assert pool.match([b"hash"]) == []
    pool.free(blocks)
    pool.check()


def test_freeing_twice_is_refused() -> None:
    pool = BlockPool(2, 4)
    blocks = pool.allocate(1)
    pool.free(blocks)
    with pytest.raises(RuntimeError, match="freed twice"):
        pool.free(blocks)


def test_more_than_there_is_is_refused() -> None:
    pool = BlockPool(2, 4)
    assert not pool.can_allocate(3)
    with pytest.raises(RuntimeError, match="3 blocks wanted, 2 free"):
        pool.allocate(3)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 4), (4, 0)])
def test_an_empty_pool_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="a pool needs blocks"):
        BlockPool(num_blocks, block_size)


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), num_blocks=st.integers(1, 12))
def test_blocks_are_conserved(seed: int, num_blocks: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(num_blocks, 2)
    readers: list[list[int]] = []
    for _ in range(60):
        if readers and rng.random() < 0.4:
            pool.free(readers.pop(rng.randrange(len(readers))))
        elif rng.random() < 0.5:
            found = pool.match([bytes([rng.randrange(8)])])
            pool.share(found)
            readers.append(found)
        else:
            wanted = rng.randrange(4)
            if pool.can_allocate(wanted):
                blocks = pool.allocate(wanted)
                readers.append(blocks)
                for block in blocks:
                    if rng.random() < 0.5:
                        pool.commit(block, bytes([rng.randrange(8)]))
        pool.check()
        assert pool.num_used_blocks == len({b for blocks in readers for b in blocks})
    for blocks in readers:
        pool.free(blocks)
    pool.check()
    assert pool.num_free_blocks == num_blocks


def test_a_pool_costs_what_was_used_at_once_not_what_there_is() -> None:
    pool = BlockPool(10**15, 16)
    blocks = pool.allocate(3)
    assert blocks == [0, 1, 2]
    pool.free(blocks)
    assert pool.allocate(1) == [0]
    assert pool.num_free_blocks == 10**15 - 1
    pool.check()


def test_a_prefix_of_a_recurrent_model_ends_where_a_state_was_copied() -> None:
    pool = BlockPool(9, 4)
    hashes = hash_blocks(range(32), 4, "")
    blocks = pool.allocate(8)
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.commit(block, block_hash)
    assert pool.match(hashes) == blocks
    pool.num_snapshots = 2
    assert pool.match(hashes) == []
    assert [pool.snapshot(hashes[i]) for i in (1, 4)] == [0, 1]
    assert pool.match(hashes) == blocks[:5]
    assert pool.match(hashes[:4]) == blocks[:2]
    assert pool.snapshot(hashes[1]) == 0, "it is used"
    assert pool.snapshot(hashes[6]) == 1, "the least recently used one is replaced"
    assert pool.match(hashes) == blocks[:7]
    assert pool.match(hashes[:6]) == blocks[:2]
    pool.drop_cache()
    assert pool.match(hashes) == []
    assert pool.snapshot(hashes[3]) == 0
