"""The publisher's thread and the router's feed on a Redis that fails in every way it can."""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Iterator

import pytest
import redis

from kvrelay.fleet.embedded import EmbeddedRedis, RedisServer
from kvrelay.fleet.index import FeedState, IndexFeed, IndexPublisher, IndexReader
from kvrelay.fleet.index import publication as publication_module
from kvrelay.fleet.index.layout import index_base
from kvrelay.kv.cache import CacheEvent, Removed, Stored
from kvrelay.kv.hashing import BlockHash
from tests.fakes.waiting import PATIENCE_S, until

INCARNATIONS = iter(range(1, 1 << 20))


class Fleet:
    """Publishers, and one router's feed, on one server."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.prefix = f"test-{secrets.token_hex(4)}"
        self.publishers: list[IndexPublisher] = []
        self.feed = self.open_feed()
        self.feed.start()

    def open_feed(self) -> IndexFeed:
        return IndexFeed(IndexReader(self.server.url, self.prefix, "m"), check_interval_s=0.1)

    def worker(self, worker_id: str, *, ttl_s: float = 30.0) -> IndexPublisher:
        incarnation = f"{next(INCARNATIONS):016x}"
        publisher = IndexPublisher(
            self.server.url, self.prefix, "m", worker_id, incarnation, ttl_s=ttl_s, renew_interval_s=0.1
        )
        publisher.start()
        self.publishers.append(publisher)
        return publisher

    async def until_matches(self, chain: list[BlockHash], expected: dict[str, int]) -> None:
        """The router's replica is current and finds `expected`."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while self.feed.replica is None or self.feed.match(chain) != expected:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            reports = [publisher.report() for publisher in self.publishers]
            raise AssertionError((self.feed.match(chain), expected, self.feed.describe(), reports)) from None

    async def close(self) -> None:
        await self.feed.close()
        for publisher in self.publishers:
            await asyncio.to_thread(publisher.close)


def chain_of(length: int) -> list[BlockHash]:
    return [os.urandom(16) for _ in range(length)]


def stored(chain: list[BlockHash], parent: BlockHash | None = None) -> list[CacheEvent]:
    return [Stored(parent, tuple(chain))]


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
async def fleet(server: EmbeddedRedis) -> AsyncIterator[Fleet]:
    fleet = Fleet(server)
    yield fleet
    await fleet.close()


async def test_a_worker_that_leaves_is_withdrawn_and_its_slot_is_used_again(fleet: Fleet) -> None:
    chain = chain_of(50)
    one, two = fleet.worker("one"), fleet.worker("two")
    one.publish(stored(chain))
    two.publish(stored(chain))
    await fleet.until_matches(chain, {"one": 50, "two": 50})
    slot = one.publication.slot
    await asyncio.to_thread(one.close)
    await fleet.until_matches(chain, {"two": 50})
    with redis.Redis.from_url(fleet.server.url) as client:
        retired = f"{index_base(fleet.prefix, 'm')}:retired"
        await until(lambda: not client.exists(retired))
    three = fleet.worker("three")
    three.publish(stored(chain[:5]))
    await fleet.until_matches(chain, {"two": 50, "three": 5})
    assert three.publication.slot == slot


async def test_a_worker_that_dies_expires(fleet: Fleet) -> None:
    chain = chain_of(50)
    silent = fleet.worker("silent", ttl_s=0.5)
    silent.publish(stored(chain))
    fleet.worker("other")
    await fleet.until_matches(chain, {"silent": 50})
    silent.abandon()
    await fleet.until_matches(chain, {})


async def test_a_redis_that_comes_back_empty_is_filled_again(fleet: Fleet) -> None:
    chain = chain_of(3000)
    workers = [fleet.worker(f"w{i}") for i in range(3)]
    for number, worker in enumerate(workers, 1):
        worker.publish(stored(chain[: 1000 * number]))
    expected = {"w0": 1000, "w1": 2000, "w2": 3000}
    await fleet.until_matches(chain, expected)
    fleet.server.stop()
    await until(lambda: fleet.feed.state is FeedState.AWAY)
    assert fleet.feed.replica is None
    assert fleet.feed.match(chain) == {}
    workers[0].publish([Removed(tuple(reversed(chain[400:1000])))])
    fleet.server.restart()
    await fleet.until_matches(chain, expected | {"w0": 400})
    assert all(worker.report()["index_replacements"] >= 1 for worker in workers)


async def test_too_many_waiting_events_are_dropped_and_the_range_replaced(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publication_module, "MAX_PENDING_BLOCKS", 100)
    chain = chain_of(5000)
    worker = fleet.worker("w")
    worker.publication._max_pending = 100
    worker.publish(stored(chain[:10]))
    await fleet.until_matches(chain, {"w": 10})
    fleet.server.stop()
    for start in range(10, 5000, 10):
        worker.publish(stored(chain[start : start + 10], chain[start - 1]))
    await until(lambda: worker.report()["index_dropped"] > 0)
    assert worker.report()["index_pending"] <= 100
    fleet.server.restart()
    await fleet.until_matches(chain, {"w": 5000})


async def test_a_server_that_is_out_of_memory_heals_when_it_is_not(fleet: Fleet) -> None:
    chain = chain_of(20)
    worker = fleet.worker("w")
    worker.publish(stored(chain[:10]))
    await fleet.until_matches(chain, {"w": 10})
    with redis.Redis.from_url(fleet.server.url) as client:
        client.config_set("maxmemory", 1)
        worker.publish(stored(chain[10:], chain[9]))
        await until(lambda: worker.report()["index_open"] == 0.0)
        client.config_set("maxmemory", 0)
    await fleet.until_matches(chain, {"w": 20})


async def test_closing_does_not_wait_for_a_redis_that_is_gone(fleet: Fleet) -> None:
    worker = fleet.worker("w")
    worker.publish(stored(chain_of(5)))
    await until(lambda: worker.publication.is_settled)
    fleet.server.stop()
    await asyncio.to_thread(worker.close)
    assert not worker._thread.is_alive()
