"""Limits of keys over several routers, on a real Redis, and without it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvrelay.config.table_files import LEAST_PER_MINUTE
from kvrelay.fleet import Registry, RegistryUnavailable
from kvrelay.fleet.connect import REDIS_FAILED
from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.fleet.index import IndexFeed, IndexReader
from kvrelay.fleet.key_limits import AWAY_S, KeyLimits, Refusal, SharedLimits
from tests.fakes.waiting import PATIENCE_S

LEASE_S = 30.0
Make = Callable[[], SharedLimits]


@pytest.fixture
async def make(redis_server: EmbeddedRedis) -> AsyncIterator[Make]:
    """Limits of several routers of one fleet."""
    prefix, made = f"test-{secrets.token_hex(4)}", []

    def make_one() -> SharedLimits:
        made.append(SharedLimits(redis_server.url, prefix, "m"))
        return made[-1]

    yield make_one
    for each in made:
        await each.close()


async def test_routers_share_a_keys_concurrency(make: Make) -> None:
    one, other = make(), make()
    limits = KeyLimits(concurrency=4)
    verdicts = await asyncio.gather(
        *(
            router.enter("k", limits, f"{name}{i}", LEASE_S)
            for i in range(8)
            for name, router in zip("ab", (one, other), strict=True)
        )
    )
    assert sum(verdict is None for verdict in verdicts) == 4
    assert {verdict.limit for verdict in verdicts if verdict is not None} == {"concurrency"}
    assert await one.enter("other", limits, "x", LEASE_S) is None
    for i in range(8):
        await one.leave("k", f"a{i}")
        await one.leave("k", f"b{i}")
    assert await other.enter("k", limits, "again", LEASE_S) is None


async def test_routers_share_a_keys_rate_and_say_when_to_come_again(make: Make) -> None:
    one, other = make(), make()
    limits = KeyLimits(requests_per_minute=1, burst=3)
    began = time.monotonic()
    verdicts = [await (one, other)[i % 2].enter("k", limits, str(i), LEASE_S) for i in range(8)]
    assert [verdict is None for verdict in verdicts] == [True] * 3 + [False] * 5
    refused = verdicts[-1]
    assert (
        refused is not None
        and refused.limit == "rate"
        and 60.0 - (time.monotonic() - began) <= refused.retry_after_s <= 60.0
    )


async def test_places_of_a_router_that_died_come_back(make: Make) -> None:
    limits = KeyLimits(concurrency=1)
    assert await make().enter("k", limits, "dead", 0.05) is None
    survivor = make()
    async with asyncio.timeout(PATIENCE_S):
        while await survivor.enter("k", limits, "next", LEASE_S) is not None:
            await asyncio.sleep(0.01)


async def test_without_redis_a_router_goes_by_what_it_knows() -> None:
    now = 0.0
    limits = SharedLimits("redis://127.0.0.1:1/0", "p", "m", clock=lambda: now)
    rules = KeyLimits(concurrency=2)
    assert await limits.enter("k", rules, "1", LEASE_S) is None
    assert await limits.enter("k", rules, "2", LEASE_S) is None
    assert await limits.enter("k", rules, "3", LEASE_S) == Refusal("concurrency", 1.0)
    await limits.leave("k", "1")
    assert await limits.enter("k", rules, "3", LEASE_S) is None
    await limits.close()


async def test_what_runs_is_remembered_when_redis_goes_away() -> None:
    server = EmbeddedRedis()
    limits = SharedLimits(server.url, "p", "m")
    rules = KeyLimits(concurrency=1)
    try:
        assert await limits.enter("k", rules, "1", LEASE_S) is None
        server.stop()
        assert await limits.enter("k", rules, "2", LEASE_S) is not None
        await limits.leave("k", "1")
        assert await limits.enter("k", rules, "2", LEASE_S) is None
    finally:
        await limits.close()
        server.close()


class SilentServer:
    """Takes connections and what is sent, and never answers: what a Redis looks like that hangs."""

    def __init__(self) -> None:
        self.num_connections = 0
        self.asked = asyncio.Event()
        self._over = asyncio.Event()

    async def __aenter__(self) -> SilentServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._over.set()
        self._server.close()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        await reader.read(1)
        self.asked.set()
        await self._over.wait()
        writer.close()


async def test_while_redis_hangs_one_request_at_a_time_asks_it() -> None:
    now = 0.0
    rules = KeyLimits(concurrency=100)
    async with SilentServer() as server:
        limits = SharedLimits(server.url, "p", "m", clock=lambda: now)
        assert await limits.enter("k", rules, "first", LEASE_S) is None
        num_before = server.num_connections
        now += AWAY_S + 1
        server.asked.clear()
        probe = asyncio.create_task(limits.enter("k", rules, "probe", LEASE_S))
        await server.asked.wait()
        for i in range(50):
            assert await limits.enter("k", rules, f"other {i}", LEASE_S) is None
            await limits.leave("k", f"other {i}")
        assert not probe.done(), "others waited for the answer to the probe"
        assert await probe is None
        # The client opens another connection when the first one died; the others opened none.
        assert server.num_connections - num_before <= 2
        await limits.close()


async def test_places_given_up_while_redis_was_away_come_back_with_it() -> None:
    now = 0.0
    server = EmbeddedRedis()
    limits = SharedLimits(server.url, "p", "m", clock=lambda: now)
    other = SharedLimits(server.url, "p", "m")
    rules = KeyLimits(concurrency=1)
    try:
        assert await limits.enter("k", rules, "1", LEASE_S) is None
        limits._failed(TimeoutError())
        await limits.leave("k", "1")
        assert await other.enter("k", rules, "2", LEASE_S) is not None
        now += AWAY_S
        assert await limits.enter("k", rules, "3", LEASE_S) is None
    finally:
        await limits.close()
        await other.close()
        server.close()


async def test_a_client_that_leaves_at_the_door_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    server = EmbeddedRedis()
    limits = SharedLimits(server.url, "p", "m")
    rules = KeyLimits(concurrency=1)
    admit, counted = limits._admit, asyncio.Event()

    async def late(**arguments: Any) -> Any:
        answer = await admit(**arguments)
        counted.set()
        await asyncio.Event().wait()
        return answer

    try:
        monkeypatch.setattr(limits, "_admit", late)
        leaving = asyncio.create_task(limits.enter("k", rules, "1", LEASE_S))
        await counted.wait()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        monkeypatch.setattr(limits, "_admit", admit)
        assert await limits.enter("k", rules, "2", LEASE_S) is None
    finally:
        await limits.close()
        server.close()


async def test_a_cluster_that_is_away_refuses_nobody() -> None:
    limits = SharedLimits("redis+cluster://127.0.0.1:1", "p", "m")
    assert await limits.enter("k", KeyLimits(concurrency=1), "1", LEASE_S) is None
    await limits.leave("k", "1")
    await limits.close()
    feed = IndexFeed(IndexReader("redis+cluster://127.0.0.1:1", "p", "m"))
    with pytest.raises(REDIS_FAILED):
        await feed.step()
    registry = Registry("redis+cluster://127.0.0.1:1", "p")
    with pytest.raises(RegistryUnavailable):
        await registry.list_workers("m")
    await registry.close()


async def test_the_rarest_requests_that_can_be_configured_fit_redis_numbers(make: Make) -> None:
    limits = KeyLimits(requests_per_minute=LEAST_PER_MINUTE, burst=1 << 20)
    one, other = make(), make()
    assert await one.enter("k", limits, "1", LEASE_S) is None
    single = KeyLimits(requests_per_minute=LEAST_PER_MINUTE)
    refused = await other.enter("k", single, "2", LEASE_S)
    assert refused is not None and refused.limit == "rate" and refused.retry_after_s > 50_000
