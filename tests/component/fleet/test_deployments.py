"""Registry and index behind Sentinels, through a failover, and on a Cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from kvrelay.config.common import check_redis_url
from kvrelay.fleet import Registry, RegistryError, WorkerRecord
from kvrelay.fleet.embedded import RedisServer
from kvrelay.fleet.index import IndexFeed, IndexPublisher, IndexReader
from kvrelay.kv.cache import Stored
from kvrelay.kv.hashing import BlockHash
from tests.component.fleet.test_index_publisher import chain_of
from tests.fakes.records import worker_record
from tests.fakes.redis_servers import ONLY_WHEN_TOLD, ClusterNode, Sentinel
from tests.fakes.waiting import PATIENCE_S, wait_until


async def until_found(feed: IndexFeed, chain: list[BlockHash], expected: dict[str, int]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while feed.replica is None or feed.match(chain) != expected:
            await asyncio.sleep(0.02)


async def until_registered(registry: Registry, worker: WorkerRecord) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await registry.renew(worker, 30.0)
                if await registry.list_workers("m") == [worker]:
                    return
            except RegistryError:
                pass
            await asyncio.sleep(0.1)


@pytest.fixture
def primary(tmp_path: Path) -> Iterator[RedisServer]:
    with make_server(tmp_path, "primary") as server:
        yield server


@pytest.fixture
def replica(primary: RedisServer, tmp_path: Path) -> Iterator[RedisServer]:
    with make_server(tmp_path, "replica", f"replicaof 127.0.0.1 {primary.port}") as server:
        with redis.Redis(port=server.port) as client:
            wait_until(lambda: client.info("replication")["master_link_status"] == "up")
        yield server


@pytest.fixture
def sentinel(primary: RedisServer, replica: RedisServer, tmp_path: Path) -> Iterator[Sentinel]:
    directory = tmp_path / "sentinel"
    directory.mkdir()
    with Sentinel(directory, primary.port) as server:
        with redis.Redis(port=server.port, decode_responses=True) as client:
            wait_until(lambda: int(client.sentinel_master("main")["num-slaves"]) == 1)
        yield server


def make_server(tmp_path: Path, name: str, settings: str = "") -> RedisServer:
    directory = tmp_path / name
    directory.mkdir()
    return RedisServer(directory, f"{ONLY_WHEN_TOLD}\n{settings}")


async def test_a_failover_by_sentinels_is_survived(primary: RedisServer, sentinel: Sentinel) -> None:
    url = f"redis+sentinel://127.0.0.1:{sentinel.port}/main"
    registry = Registry(url)
    await registry.check_server()
    worker = await registry.join(worker_record(), 30.0)
    publisher = IndexPublisher(url, "kvrelay", "m", "w", "0000000000000001", renew_interval_s=0.2)
    publisher.start()
    feed = IndexFeed(IndexReader(url, "kvrelay", "m"), check_interval_s=0.2)
    feed.start()
    try:
        chain = chain_of(1200)
        publisher.publish([Stored(None, tuple(chain[:1000]))])
        await until_found(feed, chain, {"w": 1000})
        primary.kill()
        publisher.publish([Stored(chain[999], tuple(chain[1000:]))])
        await until_found(feed, chain, {"w": 1200})
        await until_registered(registry, worker)
    finally:
        await feed.close()
        await asyncio.to_thread(publisher.close)
        await registry.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ClusterNode]:
    with ClusterNode(tmp_path) as node:
        yield node


async def test_a_cluster_holds_registry_and_index(cluster: ClusterNode) -> None:
    url = f"redis+cluster://127.0.0.1:{cluster.port}"
    registry = Registry(url)
    await registry.check_server()
    worker = await registry.join(worker_record(), 30.0)
    assert await registry.list_workers("m") == [worker]
    publisher = IndexPublisher(url, "kvrelay", "m", "w", "0000000000000001", renew_interval_s=0.2)
    publisher.start()
    feed = IndexFeed(IndexReader(url, "kvrelay", "m"), check_interval_s=0.2)
    feed.start()
    try:
        chain = chain_of(1200)
        publisher.publish([Stored(None, tuple(chain))])
        await until_found(feed, chain, {"w": 1200})
    finally:
        await feed.close()
        await asyncio.to_thread(publisher.close)
        await registry.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1", "must start with redis://"),
        ("redis+sentinel://127.0.0.1:26379", "the primary's name"),
        ("redis+sentinel://127.0.0.1:26379/main/x", "the primary's name"),
        ("redis+sentinel://127.0.0.1:port/main", "is not a sentinel address"),
    ],
)
def test_bad_urls_are_said(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_redis_url(url)
