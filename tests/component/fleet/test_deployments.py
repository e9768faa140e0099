"""Redis as others run it: behind Sentinels, as a Cluster, with access control lists and TLS; what a wrong password or
certificate says."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import redis

from kvrelay.config.common import check_redis_url
from kvrelay.fleet import Registry, RegistryError, RegistryUnavailable, WorkerRecord
from kvrelay.fleet.embedded import EmbeddedRedis, RedisServer
from kvrelay.fleet.index import IndexFeed, IndexPublisher, IndexReader
from kvrelay.fleet.key_limits import KeyLimits, SharedLimits
from kvrelay.fleet.shared_responses import SharedResponses, StoreBounds
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


async def test_a_cluster_holds_all(cluster: ClusterNode) -> None:
    await use(f"redis+cluster://127.0.0.1:{cluster.port}")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1", "must start with redis://"),
        ("redis+sentinel://127.0.0.1:26379", "the primary's name"),
        ("redis+sentinel://127.0.0.1:26379/main/x", "the primary's name"),
        ("redis+sentinel://127.0.0.1:port/main", "is not a sentinel address"),
        ("rediss://127.0.0.1?ssl_ca_certs=/nowhere", "cannot read /nowhere: No such file"),
        (f"rediss://127.0.0.1?ssl_ca_certs={__file__}", "holds no certificate"),
    ],
)
def test_bad_urls_are_said(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_redis_url(url)


def make_certificate(directory: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    openssl = shutil.which("openssl")
    assert openssl is not None
    certificate, key = directory / "certificate.pem", directory / "key.pem"
    name = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *name, *files]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


@asynccontextmanager
async def tls_in_front_of(port: int, certificate: Path, key: Path) -> AsyncIterator[int]:
    """The port at which connections are decrypted and passed on."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(_pass_on(reader, inner_writer), _pass_on(inner_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


ACL = ["on", ">secret", "resetkeys", "~kvrelay:*", "resetchannels", "-@all", "+@read", "+@write", "+@scripting"]
ACL += ["+info", "+time", "+ping", "+hello", "+client|setinfo", "-flushall", "-flushdb"]
"""As in docs/security.md, without the user's name."""


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


def add_user(server: EmbeddedRedis, *rules: str) -> str:
    """The URL of a user with these rules."""
    with redis.Redis.from_url(server.url) as client:
        client.execute_command("ACL", "SETUSER", "kvrelay", *rules)
    return f"redis://kvrelay:secret@127.0.0.1:{server.port}/0"


async def use(url: str, prefix: str = "kvrelay") -> None:
    """Everything that kvrelay does with Redis."""
    registry = Registry(url, prefix)
    publisher = IndexPublisher(url, prefix, "m", "w", f"{1:016x}", renew_interval_s=0.1)
    feed = IndexFeed(IndexReader(url, prefix, "m"), check_interval_s=0.1)
    limits = SharedLimits(url, prefix, "m")
    responses = SharedResponses(url, prefix, StoreBounds(max_responses=1))
    try:
        await registry.check_server()
        worker = await registry.join(worker_record(), 30.0)
        assert await registry.list_workers("m") == [worker]
        assert await registry.mark_draining("m", "w", draining=True)
        publisher.start()
        feed.start()
        chain = chain_of(100)
        publisher.publish([Stored(None, tuple(chain))])
        await until_found(feed, chain, {"w": 100})
        one = KeyLimits(requests_per_minute=1, concurrency=1)
        assert await limits.enter("k", one, "1", 30.0) is None
        assert await limits.enter("k", one, "2", 30.0) is not None, "Redis was asked"
        await limits.leave("k", "1")
        assert await responses.put("k", "1", b"one") and await responses.put("k", "2", b"two")
        assert await responses.get("k", "1") is None and await responses.delete("k", "2")
        assert await registry.leave(worker)
    finally:
        await feed.close()
        await asyncio.to_thread(publisher.close)
        await limits.close()
        await responses.close()
        await registry.close()


async def test_a_user_that_may_use_the_prefix_only_is_enough(server: EmbeddedRedis) -> None:
    url = add_user(server, *ACL)
    await use(url)
    registry = Registry(url, "other")
    with pytest.raises(RegistryError, match="Redis refused"):
        await registry.join(worker_record(), 30.0)
    await registry.close()


async def test_a_wrong_password_is_said(server: EmbeddedRedis) -> None:
    url = add_user(server, *ACL).replace("secret", "wrong")
    registry = Registry(url)
    with pytest.raises(RegistryError, match=r"(?i)invalid username-password|WRONGPASS"):
        await registry.check_server()
    await registry.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
async def test_redis_behind_tls(server: EmbeddedRedis, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    password = server.url.removeprefix("redis://:").partition("@")[0]
    async with tls_in_front_of(server.port, certificate, key) as port:
        url = f"rediss://:{password}@127.0.0.1:{port}/0"
        await use(f"{url}?ssl_ca_certs={certificate}")
        for wrong in (url, url.replace("rediss", "redis")):
            registry = Registry(wrong)
            with pytest.raises(RegistryUnavailable):
                await registry.check_server()
            await registry.close()
