"""Limits of keys over several routers, on a real Redis, and without it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable

import pytest

from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.fleet.limits import KeyLimits, Refusal, SharedLimits

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
    limits = KeyLimits(requests_per_minute=6, burst=3)
    verdicts = [await (one, other)[i % 2].enter("k", limits, str(i), LEASE_S) for i in range(8)]
    assert [verdict is None for verdict in verdicts] == [True] * 3 + [False] * 5
    refused = verdicts[-1]
    assert refused is not None and refused.limit == "rate" and 8.0 < refused.retry_after_s <= 10.0


async def test_places_of_a_router_that_died_come_back(make: Make) -> None:
    limits = KeyLimits(concurrency=1)
    assert await make().enter("k", limits, "dead", 0.05) is None
    survivor = make()
    async with asyncio.timeout(5):
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
        server.stop()
