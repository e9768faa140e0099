"""The prefix cache: what it refuses, no cache, and the blocks of sessions."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kv.ablations import NullCache, TableCache
from kvrelay.kv.block_index import BlockIndex
from kvrelay.kv.cache import BlockError, IntegrityError
from kvrelay.kv.hashing import BlockHash, hash_blocks, root_hash
from kvrelay.kv.pool import BlockPool, BlockState
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.kv.session_blocks import SessionBlocks

ROOT = root_hash(model="m")


def chain(text: str) -> list[BlockHash]:
    """The hashes of a prefix, a character a block."""
    return hash_blocks(ROOT, [ord(character) for character in text], 1)


def publish(pool: BlockPool, cache: PrefixCache, text: str) -> list[int]:
    """A whole request: match, compute, publish, end. Returns its blocks."""
    hashes = chain(text)
    blocks = cache.match(hashes)
    pool.hold(blocks, BlockState.RUNNING)
    blocks += pool.allocate(len(hashes) - len(blocks), BlockState.RUNNING)
    assert cache.insert(hashes, blocks) == blocks
    pool.release(blocks, BlockState.RUNNING)
    pool.check_integrity()
    return blocks


def cached_texts(cache: PrefixCache, texts: list[str]) -> list[str]:
    """The cached prefix of each text."""
    return [text[: cache.peek(chain(text))] for text in texts]


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(16, 1)


@pytest.fixture
def cache(pool: BlockPool) -> PrefixCache:
    return PrefixCache(pool, record_events=True)


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
    cache = NullCache(pool)
    publish(pool, cache, "ab")
    hashes = chain("abc")
    assert cache.match(hashes) == []
    assert cache.extend(hashes[1], hashes[2:], [5]) == [5]
    assert (cache.peek(hashes), cache.num_cached, cache.num_evictable) == (0, 0, 0)
    assert cache.evict(3) == cache.remove(hashes) == cache.clear() == []
    assert cache.drain_events() == []
    assert pool.num_free == 16


class TestTableCache:
    @pytest.fixture
    def table(self, pool: BlockPool) -> TableCache:
        return TableCache(pool)

    def test_only_whole_sequences_are_found(self, pool: BlockPool, table: TableCache) -> None:
        blocks = publish(pool, table, "abc")
        assert table.match(chain("abcd")) == blocks
        assert cached_texts(table, ["abx", "ab"]) == ["", ""]

    def test_a_conversation_grows_its_entry(self, pool: BlockPool, table: TableCache) -> None:
        publish(pool, table, "abc")
        publish(pool, table, "abcde")
        assert cached_texts(table, ["abcdef", "abcx"]) == ["abcde", ""]

    def test_chains_can_be_published_in_pieces(self, pool: BlockPool, table: TableCache) -> None:
        hashes = chain("abcd")
        blocks = pool.allocate(4, BlockState.RUNNING)
        assert table.extend(None, hashes[:2], blocks[:2]) == blocks[:2]
        assert table.extend(hashes[1], hashes[2:], blocks[2:]) == blocks[2:]
        assert table.match(hashes) == blocks
        assert table.peek(hashes[:3]) == 0

    def test_an_evicted_end_is_not_found(self, pool: BlockPool, table: TableCache) -> None:
        publish(pool, table, "abc")
        table.evict(1)
        assert cached_texts(table, ["abcd"]) == [""]
        for each in range(100):  # ends of evicted sequences do not pile up
            publish(pool, table, f"{chr(200 + each)}xyz")
        assert cached_texts(table, [f"{chr(299)}xyz", f"{chr(200)}xyz"]) == [f"{chr(299)}xyz", ""]
        assert len(table._ends) <= pool.num_blocks


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


# -- blocks that only a session has used, held against the set of all users of each block ----------------------------


NONE = ""
SESSIONS = (NONE, "a", "b", "c")


def chain_of(tokens: Sequence[int]) -> list[BlockHash]:
    return hash_blocks(ROOT, list(tokens), 1)


class Worker:
    """A pool with a tree, used as a worker does. `users` has the sessions that used each cached block; None is the user
    of a block that belongs to none."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, 1)
        self.cache = PrefixCache(self.pool)
        self.sessions = SessionBlocks(most_blocks=1000)
        self.users: dict[BlockHash, set[str]] = {}
        self.ended: set[BlockHash] = set()

    def serve(self, session: str, tokens: Sequence[int], *, keeps: bool = False) -> list[int]:
        hashes = chain_of(tokens)
        matched = self.cache.match(hashes)
        self.pool.hold(matched, BlockState.RUNNING)
        self.sessions.matched(session, hashes[: len(matched)])
        blocks = matched + self.pool.allocate(len(hashes) - len(matched), BlockState.RUNNING)
        self.forget_evicted()
        parent = hashes[len(matched) - 1] if matched else None
        new = hashes[len(matched) :]
        self.cache.extend(parent, new, blocks[len(matched) :])
        self.sessions.published(session, new)
        for block_hash in hashes:
            self.users.setdefault(block_hash, set()).add(session)
        if not keeps:
            self.pool.release(blocks, BlockState.RUNNING)
        self.ended -= set(hashes)
        return blocks

    def end(self, session: str) -> None:
        own = self.sessions.end(session)
        expected = {each for each, users in self.users.items() if users == {session}}
        assert {each for each in own if self.cache.block_of(each) is not None} == expected
        self.cache.demote(own)
        for each in expected:
            self.users[each] = {NONE}  # whoever uses it later, the session is over
            block = self.cache.block_of(each)
            assert block is not None
            if not self.pool.is_held(block):
                self.ended.add(each)

    def forget_evicted(self) -> None:
        cached = {each for each in self.users if self.cache.block_of(each) is not None}
        self.users = {each: users for each, users in self.users.items() if each in cached}
        self.ended &= cached


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(SESSIONS), st.none() | st.lists(st.integers(0, 1), min_size=1, max_size=6)), max_size=40
)


@given(OPERATIONS, st.integers(6, 20))
def test_what_only_an_ended_session_has_used_is_evicted_first(
    operations: list[tuple[str, list[int] | None]], num_blocks: int
) -> None:
    worker = Worker(num_blocks)
    for session, tokens in operations:
        if tokens is not None:
            worker.serve(session, tokens)
        elif session != NONE:
            worker.end(session)
        worker.pool.check_integrity()
    num_ended = len(worker.ended)
    evicted = worker.cache.evict(num_ended)
    assert len(evicted) == num_ended
    worker.forget_evicted()
    assert not worker.ended
    worker.pool.check_integrity()


def test_held_blocks_are_not_moved() -> None:
    worker = Worker(4)
    blocks = worker.serve("a", [1, 2], keeps=True)
    worker.end("a")
    worker.pool.check_integrity()
    assert worker.cache.evict(4) == []
    worker.pool.release(blocks, BlockState.RUNNING)
    worker.pool.check_integrity()


def test_sessions_that_do_not_end_are_forgotten() -> None:
    sessions = SessionBlocks(most_blocks=4)
    for number in range(10):
        sessions.published(f"s{number}", chain_of([number, 0]))
    assert len(sessions) == 2
    assert sessions.end("s7") == [] and sessions.end("s9") == chain_of([9, 0])


def test_a_block_that_was_evicted_belongs_to_whoever_publishes_it_next() -> None:
    sessions = SessionBlocks(most_blocks=100)
    x, y = chain_of([1, 2])
    sessions.published("a", [x, y])
    sessions.published(NONE, [x, y])
    assert sessions.end("a") == []
    sessions.published("a", [y])  # behind a block of another session
    sessions.published("a", [x, y])  # after both were evicted
    assert sessions.end("a") == [x, y]
