"""Registry and index behind Sentinels, through a failover, and on a Cluster."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from kvrelay.fleet import Registry, RegistryError, WorkerRecord
from kvrelay.fleet.connect import check_redis_url
from kvrelay.fleet.embedded import redis_executable
from kvrelay.fleet.index import IndexFeed, IndexPublisher, IndexReader
from kvrelay.kv.cache import Stored
from kvrelay.kv.hashing import BlockHash
from tests.component.fleet.test_index_publisher import chain_of

WITHIN_S = 40.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Servers:
    """Processes of redis-server, ended together."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._running: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, *options: str, settings: str = "", is_sentinel: bool = False) -> int:
        """The port of a new one, which answers."""
        port = free_port()
        directory = self._directory / str(port)
        directory.mkdir()
        file = directory / "redis.conf"
        file.write_text(f"port {port}\nbind 127.0.0.1\ndir {directory}\n{settings}")
        command = [redis_executable(), str(file), *(["--sentinel"] if is_sentinel else []), *options]
        self._running[port] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with redis.Redis(port=port) as client:
            until(lambda: bool(client.ping()))
        return port

    def kill(self, port: int) -> None:
        process = self._running.pop(port)
        process.kill()
        process.wait()

    def stop(self) -> None:
        for port in list(self._running):
            self.kill(port)


def until(condition: Any) -> None:

    deadline = time.monotonic() + WITHIN_S
    while True:
        try:
            if condition():
                return
        except redis.RedisError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    servers = Servers(tmp_path)
    yield servers
    servers.stop()


def record() -> WorkerRecord:
    return WorkerRecord(
        worker_id="w",
        role="prefill",
        incarnation="0000000000000001",
        address="tcp://127.0.0.1:5000",
        model="m",
        fingerprint="f",
        protocol_version=1,
        block_size=16,
        num_blocks=100,
        max_model_len=100,
        vocab_size=100,
    )


async def until_found(feed: IndexFeed, chain: list[BlockHash], expected: dict[str, int]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while feed.replica is None or feed.replica.match(chain) != expected or await feed.lookup(chain) != expected:
            await asyncio.sleep(0.02)


async def until_registered(registry: Registry, worker: WorkerRecord) -> None:
    async with asyncio.timeout(WITHIN_S):
        while True:
            try:
                await registry.renew(worker, 30.0)
                if await registry.list_workers("m") == [worker]:
                    return
            except RegistryError:
                pass
            await asyncio.sleep(0.1)


async def test_a_failover_by_sentinels_is_survived(servers: Servers) -> None:
    primary = servers.start("--save", "")
    replica = servers.start("--save", "", "--replicaof", "127.0.0.1", str(primary))
    settings = "\n".join(
        (
            f"sentinel monitor main 127.0.0.1 {primary} 1",
            "sentinel down-after-milliseconds main 300",
            "sentinel failover-timeout main 2000\n",
        )
    )
    sentinel = servers.start(settings=settings, is_sentinel=True)
    with redis.Redis(port=sentinel, decode_responses=True) as client:
        until(lambda: int(client.sentinel_master("main")["num-slaves"]) == 1)
    with redis.Redis(port=replica) as client:
        until(lambda: client.info("replication")["master_link_status"] == "up")
    url = f"redis+sentinel://127.0.0.1:{sentinel}/main"
    registry = Registry(url)
    await registry.check_server()
    worker = await registry.join(record(), 30.0)
    publisher = IndexPublisher(url, "kvrelay", "m", "w", "0000000000000001", renew_interval_s=0.2)
    publisher.start()
    feed = IndexFeed(IndexReader(url, "kvrelay", "m"), check_interval_s=0.2)
    feed.start()
    try:
        chain = chain_of(1200)
        publisher.publish([Stored(None, tuple(chain[:1000]))])
        await until_found(feed, chain, {"w": 1000})
        servers.kill(primary)
        publisher.publish([Stored(chain[999], tuple(chain[1000:]))])
        await until_found(feed, chain, {"w": 1200})
        await until_registered(registry, worker)
    finally:
        await feed.close()
        await asyncio.to_thread(publisher.close)
        await registry.close()


async def test_a_cluster_holds_registry_and_index(servers: Servers) -> None:
    port = servers.start("--save", "", "--cluster-enabled", "yes")
    with redis.Redis(port=port) as node:
        for first in range(0, 16384, 4096):
            node.execute_command("CLUSTER", "ADDSLOTS", *range(first, first + 4096))
        until(lambda: cluster_is_ok(node))
    url = f"redis+cluster://127.0.0.1:{port}"
    registry = Registry(url)
    await registry.check_server()
    worker = await registry.join(record(), 30.0)
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


def cluster_is_ok(node: redis.Redis) -> bool:
    info: Any = node.execute_command("CLUSTER", "INFO")  # type: ignore[no-untyped-call]
    return b"cluster_state:ok" in info


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1", "must start with redis://"),
        ("redis+sentinel://127.0.0.1:26379", "the primary's name"),
        ("redis+sentinel://127.0.0.1:26379/main/x", "the primary's name"),
        ("redis+sentinel://127.0.0.1:port/main", "no address of a sentinel"),
    ],
)
def test_bad_urls_are_said(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_redis_url(url)
