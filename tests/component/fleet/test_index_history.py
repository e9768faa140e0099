"""After any history of stores, evictions, crashes, gaps and Redis' accidents the index is the union of the caches: on a
real Redis without threads or clocks, with real caches, publications, scripts and a replica."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.fleet.index import publication
from kvrelay.fleet.index.feed import IndexFeed, IndexReader
from kvrelay.fleet.index.layout import MAX_SLOTS, NUM_BUCKETS, IndexScripts, decode_slots, index_base
from kvrelay.fleet.index.publication import Apply, OpenSlot, Publication, RangeState
from kvrelay.kv.hashing import BlockHash, hash_blocks, root_hash
from kvrelay.kv.pool import BlockPool, BlockState
from kvrelay.kv.prefix_cache import PrefixCache

TTL_MS = 600_000
NUM_BLOCKS = 12


def all_chains(depth: int = 6) -> list[list[BlockHash]]:
    """Chains that share beginnings: what differs is the first block, or the third, or the fifth."""
    chains = []
    for first in range(2):
        for third in range(2):
            for fifth in range(2):
                tokens = [first, 0, third, 0, fifth, 0][:depth]
                chains.append(hash_blocks(root_hash(model="m"), [t for t in tokens for _ in range(8)], 8))
    return chains


CHAINS = all_chains()
UNIVERSE = sorted({block_hash for chain in CHAINS for block_hash in chain})


def held_prefix(chain: Sequence[BlockHash], held: set[BlockHash]) -> int:
    """The oracle: one block after the other."""
    for number, block_hash in enumerate(chain):
        if block_hash not in held:
            return number
    return len(chain)


class World:
    """Workers, one index, one router. Numbers name workers."""

    def __init__(self, client: redis.Redis, url: str, *, num_workers: int = 3, max_pending: int = 10) -> None:
        self.prefix = f"test-{secrets.token_hex(4)}"
        self.client: Any = client
        self.url = url
        self.base = index_base(self.prefix, "m")
        self.scripts = IndexScripts(client, self.base)
        self.max_pending = max_pending
        self.loop = asyncio.new_event_loop()
        self._num_starts = 0
        self.workers = [self._start(number) for number in range(num_workers)]
        self.zombies: list[Worker] = []
        self.copy: dict[bytes, bytes] | None = None
        self.feed = self._open_feed()

    def close(self) -> None:
        self.loop.run_until_complete(self.feed.close())
        self.loop.close()
        self.empty()

    # -- what may happen ----------------------------------------------------------------------------------------------

    def crash(self, number: int) -> None:
        """The process is gone, or is believed to be, and another one starts under its name."""
        self.zombies.append(self.workers[number])
        self.workers[number] = self._start(number)

    def empty(self) -> None:
        for key in self._keys():
            self.client.delete(key)

    def remember(self) -> None:
        self.copy = {key: self.client.dump(key) for key in self._keys()}

    def roll_back(self) -> None:
        """As a restart with an old dump, or a failover to a replica that lags."""
        if self.copy is not None:
            self.empty()
            for key, value in self.copy.items():
                self.client.restore(key, 0, value)

    def expire(self, number: int) -> None:
        """The worker's lease ends, and another worker notices."""
        slot = self.workers[number].publication.slot
        if slot >= 0 and self.client.hexists(f"{self.base}:slots", slot):
            self.client.zadd(f"{self.base}:leases", {slot: 1})

    def sweep(self, budget: int) -> int:
        return int(self.scripts.run("sweep", ["sweeper", 10_000, budget]))

    def restart_router(self) -> None:
        self.loop.run_until_complete(self.feed.close())
        self.feed = self._open_feed()

    def follow(self) -> None:
        self.loop.run_until_complete(self.feed.step())

    def forget_scripts(self) -> None:
        self.client.script_flush()

    def check_in_time(self) -> None:
        """The router's next step holds its replica against Redis."""
        self.feed._checked_at = 0.0

    def publish(self, worker: Worker, *, renew: bool = False, loses: str = "") -> bool:
        """One call; `loses` the "question" or the "answer". Whether there was something to do."""
        worker.publication.absorb(worker.cache.drain_events())
        call = worker.publication.next_call(renew=renew)
        if call is None or loses == "question":
            return call is not None
        if isinstance(call, OpenSlot):
            worker_id, incarnation = worker.worker_id, worker.incarnation
            slot = int(self.scripts.run("open", [worker_id, incarnation, call.range_id, TTL_MS, MAX_SLOTS]))
            if not loses:
                worker.publication.opened(slot) if slot >= 0 else worker.publication.refused()
            return True
        assert isinstance(call, Apply)
        arguments = [call.slot, call.range_id, call.seq, TTL_MS, call.operations, call.event]
        answer = self.scripts.run("apply", arguments)
        if not loses:
            worker.publication.applied() if answer in (b"OK", b"SWEEP") else worker.publication.lost()
        return True

    def settle(self) -> None:
        """Everybody gets the time to finish."""
        for _ in range(4):  # a renewal may find a gap, or retire somebody
            for worker in self.workers:
                self.publish(worker, renew=True)
                while self.publish(worker):
                    pass
        while self.sweep(1_000):
            pass
        self.check_in_time()
        for _ in range(4):
            self.follow()

    # -- what must hold -----------------------------------------------------------------------------------------------

    def contents(self) -> dict[BlockHash, int]:
        """Every block with its slots, read key by key and not by a script."""
        found = {}
        for key in self.client.scan_iter(match=f"{_glob(self.base)}:b:*", count=10_000):
            for field, value in self.client.hgetall(key).items():
                found[key[-2:] + field] = decode_slots(value)
        return found

    def check_always(self) -> None:
        """No bit without an owner; what is live is closed under prefixes."""
        contents = self.contents()
        live = {int(slot) for slot in self.client.hkeys(f"{self.base}:slots")}
        retired = {int(slot) for slot in self.client.hkeys(f"{self.base}:retired")}
        assert not live & retired
        owned = sum(1 << slot for slot in live | retired)
        assert all(slots and not slots & ~owned for slots in contents.values())
        for chain in CHAINS:
            for parent, child in pairwise(chain):
                dangling = contents.get(child, 0) & ~contents.get(parent, 0)
                assert not [slot for slot in live if dangling >> slot & 1]

    def check_settled(self) -> None:
        """The index is the union of the caches; the replica agrees with the oracle."""
        held = {worker.worker_id: worker.held() for worker in self.workers}
        contents = self.contents()
        slots = {worker.worker_id: worker.publication.slot for worker in self.workers}
        for worker in self.workers:
            assert worker.publication.state is RangeState.OPEN
            assert set(worker.publication.mirror) == held[worker.worker_id]
        expected: dict[BlockHash, int] = {}
        for worker_id, blocks in held.items():
            for block_hash in blocks:
                expected[block_hash] = expected.get(block_hash, 0) | 1 << slots[worker_id]
        assert contents == expected
        assert self.client.hlen(f"{self.base}:retired") == 0
        replica = self.feed.replica
        assert replica is not None
        assert replica.num_blocks == len(expected)
        for chain in CHAINS:
            depths = {worker_id: held_prefix(chain, blocks) for worker_id, blocks in held.items()}
            depths = {worker_id: depth for worker_id, depth in depths.items() if depth}
            assert replica.match(chain) == depths

    # -- inside -------------------------------------------------------------------------------------------------------

    def _start(self, number: int) -> Worker:
        self._num_starts += 1
        return Worker(f"w{number}", f"{self._num_starts:016x}", self.max_pending)

    def _open_feed(self) -> IndexFeed:
        return IndexFeed(IndexReader(self.url, self.prefix, "m", block_ms=None))

    def _keys(self) -> list[bytes]:
        return list(self.client.scan_iter(match=f"{_glob(self.base)}*", count=10_000))


class Worker:
    """One start of one worker: its cache, and what it publishes."""

    def __init__(self, worker_id: str, incarnation: str, max_pending: int) -> None:
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.pool = BlockPool(NUM_BLOCKS, 8)
        self.cache = PrefixCache(self.pool, record_events=True)
        self.publication = Publication(incarnation, max_pending_blocks=max_pending)

    def compute(self, chain: Sequence[BlockHash]) -> None:
        """As a prompt does: takes what is cached, computes the rest, publishes it, lets go of it."""
        cached = self.cache.match(chain)
        self.pool.hold(cached, BlockState.COMPUTING)
        blocks = [*cached, *self.pool.allocate(len(chain) - len(cached), BlockState.COMPUTING)]
        self.cache.insert(chain, blocks)
        self.pool.release(blocks, BlockState.COMPUTING)

    def compute_twice(self, chain: Sequence[BlockHash], random_source: random.Random) -> None:
        """Two prompts compute the same blocks side by side: the later one's are duplicates, and end first or last."""
        tables = [self.pool.allocate(len(chain), BlockState.COMPUTING) for _ in range(2)]
        for table in tables:
            self.cache.insert(chain, table)
        random_source.shuffle(tables)
        for table in tables:
            self.pool.release(table, BlockState.COMPUTING)

    def held(self) -> set[BlockHash]:
        return {block_hash for block_hash in UNIVERSE if self.cache.block_of(block_hash) is not None}


def _glob(text: str) -> str:
    return text.replace("[", "\\[")


assert NUM_BUCKETS == 1 << 16


Happening = Callable[[World], None]
NUM_EXAMPLES = 60


def compute(number: int, chain: list[bytes], length: int, world: World) -> None:
    world.workers[number].compute(chain[:length])


def compute_twice(number: int, chain: list[bytes], seed: int, world: World) -> None:
    world.workers[number].compute_twice(chain, random.Random(seed))


def evict(number: int, num_blocks: int, world: World) -> None:
    world.workers[number].cache.evict(num_blocks)


def withdraw(number: int, chain: list[bytes], at: int, world: World) -> None:
    world.workers[number].cache.remove([chain[at]])


def publish(number: int, num_calls: int, loses: str, world: World) -> None:
    for _ in range(num_calls):
        world.publish(world.workers[number], loses=loses)


def everybody_publishes(world: World) -> None:
    for worker in world.workers:
        while world.publish(worker):
            pass


def renew(number: int, world: World) -> None:
    world.publish(world.workers[number], renew=True)


def crash(number: int, world: World) -> None:
    world.crash(number)


def stopped_processes_wake_up(num_calls: int, world: World) -> None:
    """They may still take a range where their successor has none yet, and lose it to it."""
    for zombie in world.zombies[-2:]:
        for _ in range(num_calls):
            world.publish(zombie)


def expire(number: int, world: World) -> None:
    world.expire(number)


def sweep(budget: int, world: World) -> None:
    world.sweep(budget)


def settle(world: World) -> None:
    world.settle()
    for zombie in world.zombies:  # their ranges are gone by now, whatever they believe
        world.publish(zombie, renew=True)
        assert zombie.publication.state is not RangeState.OPEN
    world.zombies.clear()
    world.check_settled()


WORKERS = st.integers(0, 2)
STORES = st.one_of(
    st.builds(partial, st.just(compute), WORKERS, st.sampled_from(CHAINS), st.integers(1, 6)),
    st.builds(partial, st.just(compute_twice), WORKERS, st.sampled_from(CHAINS), st.integers(0, 9)),
    st.builds(partial, st.just(evict), WORKERS, st.integers(1, 12)),
    st.builds(partial, st.just(withdraw), WORKERS, st.sampled_from(CHAINS), st.integers(0, 5)),
)
CALLS = st.one_of(
    st.just(everybody_publishes),
    st.builds(partial, st.just(publish), WORKERS, st.integers(1, 4), st.sampled_from(["", "", "question", "answer"])),
    st.builds(partial, st.just(renew), WORKERS),
    st.just(World.follow),
    st.just(World.follow),
    st.just(World.check_in_time),
    st.builds(partial, st.just(sweep), st.integers(5_000, 70_000)),
)
ACCIDENTS = st.one_of(
    st.builds(partial, st.just(crash), WORKERS),
    st.builds(partial, st.just(stopped_processes_wake_up), st.integers(1, 3)),
    st.builds(partial, st.just(expire), WORKERS),
    st.just(World.empty),
    st.just(World.remember),
    st.just(World.remember),
    st.just(World.roll_back),
    st.just(World.roll_back),
    st.just(World.forget_scripts),
    st.just(World.restart_router),
)
HISTORIES: st.SearchStrategy[list[Happening]] = st.lists(
    st.one_of(STORES, STORES, CALLS, CALLS, ACCIDENTS, st.just(settle)), min_size=30, max_size=60
)


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that runs are cut."""
    monkeypatch.setattr(publication, "MAX_BATCH_BLOCKS", 4)


@pytest.mark.slow
@pytest.mark.usefixtures("small_batches")
@settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(history=HISTORIES)
def test_any_history(redis_server: EmbeddedRedis, history: list[Happening]) -> None:
    with redis.Redis.from_url(redis_server.url) as client:
        world = World(client, redis_server.url)
        try:
            for happening in [*history, settle]:
                happening(world)
                world.check_always()
        finally:
            world.close()
