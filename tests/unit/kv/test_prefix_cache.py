"""The prefix cache: what each operation promises, one at a time."""

from __future__ import annotations

import random
import sys

import pytest

from kvrelay.kv.block_index import BlockIndex
from kvrelay.kv.cache import BlockError, Cache, IntegrityError, NullCache, Removed, Stored
from kvrelay.kv.hashing import BlockHash, hash_blocks, root_hash
from kvrelay.kv.pool import BlockPool, BlockState
from kvrelay.kv.prefix_cache import PrefixCache

ROOT = root_hash(model="m")


def chain(text: str) -> list[BlockHash]:
    """The hashes of a prefix, a character a block."""
    return hash_blocks(ROOT, [ord(character) for character in text], 1)


def publish(pool: BlockPool, cache: Cache, text: str) -> list[int]:
    """A whole request: match, compute, publish, end. Returns its blocks."""
    hashes = chain(text)
    blocks = cache.match(hashes)
    pool.hold(blocks, BlockState.RUNNING)
    blocks += pool.allocate(len(hashes) - len(blocks), BlockState.RUNNING)
    assert cache.insert(hashes, blocks) == blocks
    pool.release(blocks, BlockState.RUNNING)
    pool.check_integrity()
    return blocks


def cached_texts(cache: Cache, texts: list[str]) -> list[str]:
    """The cached prefix of each text."""
    return [text[: cache.peek(chain(text))] for text in texts]


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(16, 1)


@pytest.fixture
def cache(pool: BlockPool) -> PrefixCache:
    return PrefixCache(pool, record_events=True)


def test_the_longest_cached_prefix_is_found(pool: BlockPool, cache: PrefixCache) -> None:
    blocks = publish(pool, cache, "abcd")
    assert cache.match(chain("abxy")) == blocks[:2]
    assert cache.match(chain("abcdef")) == blocks
    assert cache.match(chain("bcd")) == []
    assert cache.match([]) == []
    assert cache.peek(chain("abcx")) == 3


def test_branches_share_their_prefix(pool: BlockPool, cache: PrefixCache) -> None:
    first, second = publish(pool, cache, "abcd"), publish(pool, cache, "abxy")
    assert first[:2] == second[:2]
    assert pool.counts()[BlockState.CACHED] == 6


def test_the_least_recently_used_leaf_goes_first(pool: BlockPool, cache: PrefixCache) -> None:
    for text in ("abc", "abd", "xyz"):
        publish(pool, cache, text)
    cache.match(chain("abc"))
    cache.evict(1)
    assert cached_texts(cache, ["abc", "abd", "xyz"]) == ["abc", "ab", "xyz"]
    cache.evict(3)
    assert cached_texts(cache, ["abc", "xyz"]) == ["abc", ""]
    cache.evict(2)
    assert cached_texts(cache, ["abc"]) == ["a"]


def test_a_peek_is_no_use(pool: BlockPool, cache: PrefixCache) -> None:
    publish(pool, cache, "ab")
    publish(pool, cache, "xy")
    cache.peek(chain("ab"))
    cache.evict(1)
    assert cached_texts(cache, ["ab", "xy"]) == ["a", "xy"]


def test_the_end_of_a_request_is_a_use(pool: BlockPool, cache: PrefixCache) -> None:
    long_runner = publish(pool, cache, "ab")
    pool.hold(long_runner, BlockState.RUNNING)
    publish(pool, cache, "xy")
    pool.release(long_runner, BlockState.RUNNING)
    cache.evict(1)
    assert cached_texts(cache, ["ab", "xy"]) == ["ab", "x"]


def test_an_allocation_evicts_only_what_is_missing(pool: BlockPool, cache: PrefixCache) -> None:
    publish(pool, cache, "abcdefghij")
    assert (pool.num_free, pool.num_available) == (6, 16)
    pool.allocate(8, BlockState.RUNNING)
    assert cached_texts(cache, ["abcdefghij"]) == ["abcdefgh"]
    assert pool.num_free == 0


def test_what_is_held_and_all_above_it_stays(pool: BlockPool, cache: PrefixCache) -> None:
    blocks = publish(pool, cache, "abcd")
    publish(pool, cache, "abxy")
    pool.hold(blocks[2:3], BlockState.IN_FLIGHT)  # its ancestors are held by nobody
    assert pool.counts()[BlockState.CACHED] == 5
    assert cache.num_evictable == 3
    assert pool.num_available == 13
    assert len(cache.evict(16)) == 3
    assert cached_texts(cache, ["abcd", "abxy"]) == ["abc", "ab"]
    pool.release(blocks[2:3], BlockState.IN_FLIGHT)
    assert cache.num_evictable == 3


def test_the_first_of_two_equal_blocks_stays_the_cached_one(pool: BlockPool, cache: PrefixCache) -> None:
    first, second = pool.allocate(3, BlockState.COMPUTING), pool.allocate(3, BlockState.COMPUTING)
    cache.insert(chain("abc"), first)
    assert cache.insert(chain("abc"), second) == first
    cache.drain_events()
    pool.release(second, BlockState.COMPUTING)
    assert cache.drain_events() == []  # the duplicate's end withdraws nothing
    assert pool.num_free == 13
    assert cache.match(chain("abc")) == first
    pool.check_integrity()


def test_a_branch_may_stand_on_a_block_that_its_holder_has_as_duplicate(pool: BlockPool, cache: PrefixCache) -> None:
    first, second = pool.allocate(2, BlockState.COMPUTING), pool.allocate(3, BlockState.COMPUTING)
    cache.insert(chain("ab"), first)
    assert cache.insert(chain("abc"), second) == [*first, second[2]]
    pool.release(first, BlockState.COMPUTING)
    assert cache.num_evictable == 0  # "c" is held, and "a" and "b" are above it
    pool.check_integrity()
    pool.release(second, BlockState.COMPUTING)
    assert cache.num_evictable == 3
    assert cache.evict(1) == [second[2]]


def test_a_chain_can_be_published_a_block_at_a_time(pool: BlockPool, cache: PrefixCache) -> None:
    hashes = chain("abcd")
    blocks = pool.allocate(4, BlockState.RUNNING)
    for index in range(4):
        parent = hashes[index - 1] if index else None
        assert cache.extend(parent, hashes[index : index + 1], blocks[index : index + 1]) == [blocks[index]]
        pool.check_integrity()
    assert cache.match(hashes) == blocks
    assert cache.drain_events() == [Stored(hashes[i - 1] if i else None, (hashes[i],)) for i in range(4)]


def test_nothing_is_published_behind_an_evicted_parent(pool: BlockPool, cache: PrefixCache) -> None:
    hashes = chain("abc")
    publish(pool, cache, "ab")
    duplicate = pool.allocate(3, BlockState.RUNNING)
    cache.evict(1)
    assert cache.extend(hashes[1], hashes[2:], duplicate[2:]) == duplicate[2:]
    assert cached_texts(cache, ["abc"]) == ["a"]
    pool.check_integrity()


def test_only_held_blocks_are_published(pool: BlockPool, cache: PrefixCache) -> None:
    (block,) = pool.allocate(1, BlockState.RUNNING)
    free = block + 1
    with pytest.raises(BlockError, match="is not held"):
        cache.insert(chain("ab"), [block, free])
    assert (cache.num_cached, cache.drain_events()) == (0, [])


def test_a_block_has_one_hash(pool: BlockPool, cache: PrefixCache) -> None:
    blocks = pool.allocate(2, BlockState.RUNNING)
    cache.insert(chain("ab"), blocks)
    cache.drain_events()
    with pytest.raises(BlockError, match="under another hash"):
        cache.insert(chain("ax"), blocks)
    assert cached_texts(cache, ["ab", "ax"]) == ["ab", "a"]
    assert cache.drain_events() == []
    pool.check_integrity()


def test_what_is_no_chain_is_refused(pool: BlockPool, cache: PrefixCache) -> None:
    blocks = pool.allocate(3, BlockState.RUNNING)
    hashes = chain("abc")
    cache.insert(hashes, blocks)
    more = pool.allocate(2, BlockState.RUNNING)
    for parent, wrong in ((None, hashes[1:2]), (hashes[0], hashes[2:]), (None, [bytes(16)] * 2)):
        with pytest.raises(ValueError, match="hashes"):
            cache.extend(parent, wrong, more[: len(wrong)])
    with pytest.raises(ValueError, match="3 hashes for 2 blocks"):
        cache.insert(hashes, more)
    assert cache.num_cached == 3
    pool.check_integrity()


def test_removal_takes_everything_below_and_leaves_holds(pool: BlockPool, cache: PrefixCache) -> None:
    blocks = publish(pool, cache, "abcd")
    publish(pool, cache, "abxy")
    publish(pool, cache, "z")
    pool.hold(blocks, BlockState.RUNNING)
    cache.drain_events()
    removed = cache.remove(chain("ab")[1:])
    assert len(removed) == 5
    (event,) = cache.drain_events()
    assert isinstance(event, Removed)
    assert set(event.hashes) == {*chain("abcd")[1:], *chain("abxy")[2:]}
    assert cached_texts(cache, ["abcd", "abxy", "z"]) == ["a", "a", "z"]
    pool.check_integrity()
    assert pool.counts()[BlockState.RUNNING] == 4
    pool.release(blocks, BlockState.RUNNING)
    assert pool.counts()[BlockState.CACHED] == 2
    pool.check_integrity()


def test_clearing_frees_what_nobody_holds(pool: BlockPool, cache: PrefixCache) -> None:
    blocks = publish(pool, cache, "abcd")
    publish(pool, cache, "xyz")
    pool.hold(blocks, BlockState.RUNNING)
    cache.clear()
    assert (cache.num_cached, cache.num_evictable, pool.num_free) == (0, 0, 12)
    pool.check_integrity()
    publish(pool, cache, "ab")
    pool.release(blocks, BlockState.RUNNING)
    pool.check_integrity()


def test_without_recording_there_are_no_events(pool: BlockPool) -> None:
    cache = PrefixCache(pool)
    publish(pool, cache, "ab")
    cache.clear()
    assert cache.drain_events() == []


def test_a_pool_has_one_cache(pool: BlockPool, cache: PrefixCache) -> None:
    with pytest.raises(ValueError, match="already"):
        PrefixCache(pool)


def test_a_broken_order_is_found(pool: BlockPool, cache: PrefixCache) -> None:
    blocks = publish(pool, cache, "ab")
    cache._touch([blocks[1]])  # the leaf without its parent
    with pytest.raises(IntegrityError, match="after its parent"):
        pool.check_integrity()


def test_a_lost_pin_is_found(pool: BlockPool, cache: PrefixCache) -> None:
    blocks = publish(pool, cache, "ab")
    pool.hold(blocks, BlockState.RUNNING)
    cache._pins[blocks[0]] -= 1
    with pytest.raises(IntegrityError, match="1 pins kept, 2 counted"):
        pool.check_integrity()


def test_no_cache_keeps_nothing(pool: BlockPool) -> None:
    cache: Cache = NullCache()
    publish(pool, cache, "ab")
    hashes = chain("abc")
    assert cache.match(hashes) == []
    assert cache.extend(hashes[1], hashes[2:], [5]) == [5]
    assert (cache.peek(hashes), cache.num_cached, cache.num_evictable) == (0, 0, 0)
    assert cache.evict(3) == cache.remove(hashes) == cache.clear() == []
    assert cache.drain_events() == []
    assert pool.num_free == 16


@pytest.mark.parametrize("seed", range(20))
def test_the_cache_survives_a_busy_pool(seed: int) -> None:
    random_ = random.Random(seed)
    pool = BlockPool(24, 1)
    cache = PrefixCache(pool)
    running: list[tuple[list[BlockHash], list[int]]] = []
    for _ in range(300):
        text = "".join(random_.choices("ab", k=random_.randint(1, 9)))
        hashes = chain(text)
        blocks = cache.match(hashes[:-1])
        assert len(blocks) == cache.peek(hashes[:-1])
        pool.hold(blocks, BlockState.RUNNING)
        missing = len(hashes) - len(blocks)
        if missing <= pool.num_available:
            blocks += pool.allocate(missing, BlockState.RUNNING)
            running.append((hashes, blocks))
            cut = random_.randint(0, len(hashes))
            cache.extend(None, hashes[:cut], blocks[:cut])
        else:
            pool.release(blocks, BlockState.RUNNING)
        while len(running) > random_.randint(0, 4):
            hashes, blocks = running.pop(random_.randrange(len(running)))
            cache.insert(hashes, blocks)
            pool.release(blocks, BlockState.RUNNING)
        if random_.random() < 0.05:
            cache.remove([random_.choice(hashes)])
        pool.check_integrity()
    for _, blocks in running:
        pool.release(blocks, BlockState.RUNNING)
    cache.clear()
    assert pool.num_free == 24


def test_an_index_that_loses_what_it_gains_does_not_grow() -> None:
    hashes = hash_blocks(ROOT, list(range(60_000)), 1)
    index, plain = BlockIndex(), dict.fromkeys(hashes[:20_000], 0)
    index.add(hashes[:20_000], range(20_000))
    for number in range(20_000, 60_000):
        index.add([hashes[number]], [number])
        index.drop([hashes[number - 20_000]])
        plain[hashes[number]] = plain.pop(hashes[number - 20_000])
    assert len(index) == 20_000
    assert all(index[block_hash] == number for number, block_hash in enumerate(hashes[40_000:], 40_000))
    assert sum(sys.getsizeof(shard) for shard in index.shards) < sys.getsizeof(plain)
    index.drop(hashes[40_000:])
    assert list(index.blocks()) == []
    assert max(sys.getsizeof(shard) for shard in index.shards) < 2048
