"""After stores, evictions, crashes, gaps, accidents of Redis and of the router, the index is what the caches hold:
publishers' threads of many workers with real caches, and a router that follows."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from kvrelay.fleet.embedded import RedisServer
from kvrelay.fleet.index import IndexFeed, IndexPublisher, IndexReader
from kvrelay.fleet.index.layout import NUM_BUCKETS, decode_slots, index_base
from kvrelay.kv.hashing import BlockHash
from kvrelay.kv.pool import BlockPool, BlockState
from kvrelay.kv.prefix_cache import PrefixCache
from tests.fakes.redis_servers import ONLY_WHEN_TOLD
from tests.fakes.waiting import until

MODEL = "m"
PREFIX = "churn"
HEAD, MIDDLE, TAIL = 8, 8, 16
"""Blocks of a chain that all, some and none of the others share."""
CHAIN = HEAD + MIDDLE + TAIL
PATIENCE_S = 240.0
MOST_CHECKED = 2000
STARTS = itertools.count(1)
"""Names of starts are unique in a fleet: a range id contains one."""
Chain = list[BlockHash]


@dataclass(frozen=True, slots=True)
class Size:
    """`num_blocks` of each worker's pool: caches are full long before the end."""

    num_workers: int
    num_blocks: int
    num_rounds: int


class Worker:
    """One name over its starts: a cache, and the publisher of the present start."""

    def __init__(self, url: str, number: int, num_blocks: int) -> None:
        self.name = f"w{number}"
        self._url = url
        self._num_blocks = num_blocks
        self.start()

    def start(self) -> None:
        self.pool = BlockPool(self._num_blocks, 16)
        self.cache = PrefixCache(self.pool, record_events=True)
        incarnation = f"{next(STARTS):016x}"
        self.publisher = IndexPublisher(
            self._url, PREFIX, MODEL, self.name, incarnation, ttl_s=600.0, renew_interval_s=0.2
        )
        self.publisher.start()

    def crash(self) -> None:
        self.publisher.abandon()
        self.start()

    def compute(self, chain: Chain) -> None:
        """As a prompt does: takes what is cached, makes room, computes the rest, lets go of it."""
        cached = self.cache.match(chain)
        self.pool.hold(cached, BlockState.COMPUTING)
        missing = len(chain) - len(cached)
        self.cache.evict(max(0, missing - self.pool.num_free))
        blocks = [*cached, *self.pool.allocate(missing, BlockState.COMPUTING)]
        self.cache.insert(chain, blocks)
        self.pool.release(blocks, BlockState.COMPUTING)

    def tell(self) -> None:
        self.publisher.publish(self.cache.drain_events())

    def depth(self, chain: Chain) -> int:
        """Of the cache itself, block by block."""
        return next((at for at, each in enumerate(chain) if self.cache.block_of(each) is None), len(chain))


class Churn:
    def __init__(self, server: RedisServer, size: Size, seed: int) -> None:
        self.server = server
        self.size = size
        self.rng = random.Random(seed)
        self.workers = [Worker(server.url, number, size.num_blocks) for number in range(size.num_workers)]
        self.chains = self._make_chains()
        self.feed = self._open_feed()

    async def run(self) -> None:
        self.feed.start()
        accidents = [self.crash, self.empty, self.kill, self.pause, self.restart_router, self.forget_scripts]
        try:
            for number in range(self.size.num_rounds):
                self.work()
                await asyncio.sleep(0)
                await accidents[number % len(accidents)]()
            await self.until_equal()
        finally:
            await self.feed.close()
            for worker in self.workers:
                worker.publisher.abandon()

    def work(self) -> None:
        """Each worker computes some of what its pool holds, and lets some of it go."""
        for worker in self.workers:
            for _ in range(max(1, self.size.num_blocks // CHAIN // 2)):
                worker.compute(self.rng.choice(self.chains)[: self.rng.randint(1, CHAIN)])
            worker.cache.evict(self.rng.randrange(CHAIN))
            worker.tell()

    # -- accidents ----------------------------------------------------------------------------------------------------

    async def crash(self) -> None:
        for worker in self.rng.sample(self.workers, max(1, len(self.workers) // 16)):
            worker.crash()

    async def empty(self) -> None:
        with redis.Redis.from_url(self.server.url) as client:
            client.flushall()

    async def kill(self) -> None:
        """It comes back as of its last save, while workers and router had gone on."""
        with redis.Redis.from_url(self.server.url) as client:
            client.save()
        self.work()
        await asyncio.sleep(0.2)
        self.server.kill()
        self.work()
        await asyncio.to_thread(self.server.restart)

    async def pause(self) -> None:
        os.kill(self.server.pid, signal.SIGSTOP)
        self.work()
        await asyncio.sleep(0.3)
        os.kill(self.server.pid, signal.SIGCONT)

    async def restart_router(self) -> None:
        await self.feed.close()
        self.feed = self._open_feed()
        self.feed.start()

    async def forget_scripts(self) -> None:
        with redis.Redis.from_url(self.server.url) as client:
            client.script_flush()

    # -- what must hold -----------------------------------------------------------------------------------------------

    async def until_equal(self) -> None:
        """Redis, the router that went through it all, and one that has just begun hold what the caches hold."""
        await until(lambda: all(worker.publisher.publication.is_settled for worker in self.workers), PATIENCE_S)
        expected = self._expected()
        num_held = sum(self._num_cached(worker) for worker in self.workers)
        assert num_held > self.size.num_workers * self.size.num_blocks // 2, "too little is cached to prove anything"
        late = self._open_feed()
        late.start()
        try:
            await until(self._follows(self.feed, num_held), PATIENCE_S)
            with redis.Redis.from_url(self.server.url) as client:
                await until(lambda: not client.exists(f"{index_base(PREFIX, MODEL)}:retired"), PATIENCE_S)
            assert await asyncio.to_thread(self._num_in_redis) == num_held
            for feed in (self.feed, late):
                await until(self._follows(feed, num_held), PATIENCE_S)
                assert feed.replica is not None
                for number, depths in expected.items():
                    assert feed.replica.match(self.chains[number]) == depths
        finally:
            await late.close()

    def _follows(self, feed: IndexFeed, num_held: int) -> Callable[[], bool]:
        num_ranges = len(self.workers)
        return lambda: (
            (replica := feed.replica) is not None and replica.num_held == num_held and len(replica.ranges) == num_ranges
        )

    def _expected(self) -> dict[int, dict[str, int]]:
        """By chain: depth by worker, of the caches themselves. Where there are many chains, of some of them."""
        expected = {}
        for number in self.rng.sample(range(len(self.chains)), min(len(self.chains), MOST_CHECKED)):
            depths = {worker.name: worker.depth(self.chains[number]) for worker in self.workers}
            expected[number] = {name: depth for name, depth in depths.items() if depth}
        return expected

    @staticmethod
    def _num_cached(worker: Worker) -> int:
        return worker.pool.counts()[BlockState.CACHED]

    def _num_in_redis(self) -> int:
        """Bits, retired ranges' too: nothing may be left of those."""
        base = index_base(PREFIX, MODEL).encode()
        with redis.Redis.from_url(self.server.url) as client, client.pipeline(transaction=False) as pipeline:
            for bucket in range(NUM_BUCKETS):
                pipeline.hvals(base + b":b:" + bucket.to_bytes(2, "big"))
            return sum(decode_slots(value).bit_count() for values in pipeline.execute() for value in values)

    def _open_feed(self) -> IndexFeed:
        return IndexFeed(IndexReader(self.server.url, PREFIX, MODEL), check_interval_s=0.2)

    def _make_chains(self) -> list[Chain]:
        """Twice as many as all pools hold."""
        count = 2 * self.size.num_workers * self.size.num_blocks // CHAIN
        heads = [self._blocks(HEAD) for _ in range(4)]
        middles = [head + self._blocks(MIDDLE) for head in heads for _ in range(16)]
        return [self.rng.choice(middles) + self._blocks(TAIL) for _ in range(count)]

    def _blocks(self, count: int) -> Chain:
        return [self.rng.randbytes(16) for _ in range(count)]


@pytest.mark.parametrize(
    "size",
    [
        pytest.param(Size(num_workers=8, num_blocks=512, num_rounds=12), marks=pytest.mark.timeout(300)),
        pytest.param(
            Size(num_workers=64, num_blocks=1 << 14, num_rounds=12), marks=[pytest.mark.slow, pytest.mark.timeout(1200)]
        ),
    ],
    ids=["8 workers", "64 workers and a million blocks"],
)
async def test_everybody_agrees_after_it_all(tmp_path: Path, size: Size) -> None:
    with RedisServer(tmp_path, ONLY_WHEN_TOLD) as server:
        await Churn(server, size, seed=1).run()
