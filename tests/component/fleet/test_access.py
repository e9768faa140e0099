"""A Redis with access control lists, and one that speaks TLS; what a wrong password or certificate says."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from kvrelay.fleet import Registry, RegistryError, RegistryUnavailable
from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.fleet.index import IndexFeed, IndexPublisher, IndexReader
from kvrelay.fleet.key_limits import KeyLimits, SharedLimits
from kvrelay.fleet.shared_responses import SharedResponses, StoreBounds
from kvrelay.kv.cache import Stored
from tests.component.fleet.test_deployments import until_found
from tests.component.fleet.test_index_publisher import chain_of
from tests.fakes.records import worker_record
from tests.fakes.tls_proxy import make_certificate, tls_in_front_of

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
