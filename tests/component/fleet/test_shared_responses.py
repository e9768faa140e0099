"""Responses in a real Redis: what is kept, what expires, and what happens while Redis is away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvrelay.fleet import shared_responses
from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.fleet.shared_responses import ENTRY_BYTES, SharedResponses, StoreBounds, StoreUnavailable
from tests.fakes.response_oracle import CALLS, Key, ResponseOracle
from tests.fakes.waiting import until
from tests.thoroughness import examples

UNIT = 1000
"""Bytes of one unit of size in the oracle: more than a key takes."""


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as running:
        yield running


@pytest.fixture
def client(server: EmbeddedRedis) -> Iterator[Any]:
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
        yield client


@asynccontextmanager
async def opened(url: str, bounds: StoreBounds) -> AsyncIterator[SharedResponses]:
    store = SharedResponses(url, "kvrelay", bounds)
    try:
        yield store
    finally:
        await store.close()


def digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:32]


@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=CALLS, max_responses=st.integers(1, 6))
def test_it_keeps_what_the_store_in_memory_keeps(
    server: EmbeddedRedis, client: Any, calls: list[tuple[str, Key, int]], max_responses: int
) -> None:
    client.flushall()

    async def run() -> None:
        # Two routers use it in turn.
        bounds = StoreBounds(30 * UNIT, max_responses)
        stores = [SharedResponses(server.url, "kvrelay", bounds) for _ in range(2)]
        oracle = ResponseOracle(30, max_responses, digest)
        kept: dict[Key, bytes] = {}
        for number, (call, key, size) in enumerate(calls):
            store = stores[number % 2]
            if call == "put":
                kept[key] = b"%d" % number + b"x" * (size * UNIT - ENTRY_BYTES - len(b"%d" % number))
                assert await store.put(*key, kept[key]) == oracle.put(key, size)
            elif call == "get":
                assert await store.get(*key) == (kept[key] if oracle.get(key) else None)
            else:
                assert await store.delete(*key) == oracle.delete(key)
            check_accounts(client, oracle)
        for store in stores:
            await store.close()

    asyncio.run(run())


def check_accounts(client: Any, oracle: ResponseOracle) -> None:
    """The keys hold what the oracle holds, and nothing else."""
    sizes = {key.decode(): int(size) for key, size in client.hgetall("kvrelay:{responses}:sizes").items()}
    total = sizes.pop("", 0)
    expected = {f"{digest(owner)} {digest(name)}": size * UNIT for (owner, name), size in oracle.sizes.items()}
    assert sizes == expected and total == sum(expected.values())
    assert {key.decode() for key in client.zrange("kvrelay:{responses}:order", 0, -1)} == set(expected)
    owners = {each.partition(" ")[0] for each in expected}
    assert {key.decode() for key in client.zrange("kvrelay:{responses}:owners", 0, -1)} == owners
    values = {f"kvrelay:{{responses}}:order:{each.replace(' ', ':')}" for each in expected}
    orders = {f"kvrelay:{{responses}}:order:{each}" for each in owners}
    assert {key.decode() for key in client.keys("*:order:*")} == values | orders


async def test_a_response_is_kept_for_a_time_after_its_last_use(server: EmbeddedRedis, client: Any) -> None:
    async with opened(server.url, StoreBounds(kept_s=3600.0)) as store:
        await store.put("a", "1", b"one")
        (value,) = client.keys("*:order:*:*")
        client.pexpire(value, 1000)
        assert await store.get("a", "1") == b"one"
        assert client.pttl(value) > 1_000_000
        client.delete(value)  # as if it had expired, or been evicted by Redis itself
        assert await store.get("a", "1") is None
        check_accounts(client, ResponseOracle(1, 1))
    async with opened(server.url, StoreBounds(kept_s=0.05)) as store:
        await store.put("a", "1", b"one")
        await until(lambda: not client.keys("*:order:*:*"))
        await store.put("b", "2", b"two")
        members = [key.decode() for key in client.zrange("kvrelay:{responses}:order", 0, -1)]
        assert members == [f"{digest('b')} {digest('2')}"], "what expired no longer counts"


@pytest.mark.parametrize("name", ["x" * 10_000, "a b", "\ud800", "", "*"])
async def test_any_id_is_just_unknown(server: EmbeddedRedis, client: Any, name: str) -> None:
    async with opened(server.url, StoreBounds()) as store:
        await store.put("a", "1", b"one")
        assert await store.get("a", name) is None and not await store.delete("a", name)
        assert await store.get("a", "1") == b"one"


async def test_while_redis_is_away_nothing_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_responses, "AWAY_S", 5.0)
    now = 100.0
    with EmbeddedRedis() as server:
        store = SharedResponses(server.url, "kvrelay", StoreBounds(), clock=lambda: now)
        await store.put("a", "1", b"one")
    with pytest.raises(StoreUnavailable):
        await store.get("a", "1")
    now = 104.0
    with pytest.raises(StoreUnavailable, match="a moment ago"):
        await store.put("a", "2", b"two")
    now = 106.0
    with pytest.raises(StoreUnavailable) as asked:
        await store.delete("a", "1")
    assert "a moment ago" not in str(asked.value)
    await store.close()
