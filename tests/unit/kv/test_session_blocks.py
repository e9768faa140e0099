"""Blocks that only a session has used, held against the set of all users of each block."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.kv.hashing import BlockHash, hash_blocks, root_hash
from kvrelay.kv.pool import BlockPool, BlockState
from kvrelay.kv.prefix_cache import PrefixCache
from kvrelay.kv.session_blocks import SessionBlocks

ROOT = root_hash(model="m")
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


def test_blocks_that_others_use_stay_where_they_are() -> None:
    worker = Worker(8)
    worker.serve("a", [1, 2, 3, 4])
    worker.serve("b", [1, 2, 5])
    worker.serve(NONE, [6])
    worker.end("b")
    worker.serve(NONE, [7, 8, 9])  # one more than there is free
    assert worker.cache.peek(chain_of([1, 2, 5])) == 2
    assert worker.cache.peek(chain_of([1, 2, 3, 4])) == 4


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
