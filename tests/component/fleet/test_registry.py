"""Leases on a real Redis."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest
import redis
import redis.asyncio
import uvloop

from kvrelay.fleet import (
    FleetFull,
    LeaseLost,
    Registry,
    RegistryMisconfigured,
    RegistryUnavailable,
    WorkerIdTaken,
    WorkerRecord,
)
from kvrelay.fleet import (
    worker_registry as registry_module,
)
from kvrelay.fleet.embedded import EmbeddedRedis
from tests.fakes.waiting import PATIENCE_S

TTL_S = 30.0
SHORT_S = 0.15


@pytest.fixture
async def registry(redis_server: EmbeddedRedis) -> AsyncIterator[Registry]:
    """A registry of one's own on the shared server."""
    registry = Registry(redis_server.url, f"test-{secrets.token_hex(4)}")
    yield registry
    await registry.close()


@pytest.fixture
def own_server() -> Iterator[EmbeddedRedis]:
    """For tests that hurt the server."""
    with EmbeddedRedis() as server:
        yield server


def worker(worker_id: str = "w", incarnation: str = "", model: str = "m") -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        role="prefill",
        incarnation=incarnation or secrets.token_hex(8),
        address="tcp://127.0.0.1:5000",
        model=model,
        fingerprint="f" * 32,
        protocol_version=1,
        block_size=16,
        num_blocks=100,
        max_model_len=8192,
        vocab_size=1000,
        load={"waiting": 1.5},
    )


async def test_workers_take_the_smallest_free_slots(registry: Registry) -> None:
    first, second, third = [await registry.join(worker(f"w{i}"), TTL_S) for i in range(3)]
    assert [first.slot, second.slot, third.slot] == [0, 1, 2]
    assert await registry.leave(second)
    assert (await registry.join(worker("w3"), TTL_S)).slot == 1


async def test_records_come_back_as_they_were_given_by_slot(registry: Registry) -> None:
    joined = [await registry.join(worker(f"w{i}"), TTL_S) for i in range(12)]
    assert await registry.list_workers("m") == joined


async def test_a_renewal_publishes_load_and_draining(registry: Registry) -> None:
    joined = await registry.join(worker(), TTL_S)
    changed = msgspec.structs.replace(joined, draining=True, load={"waiting": 7.0})
    await registry.renew(changed, TTL_S)
    assert await registry.list_workers("m") == [changed]


async def test_concurrent_joins_never_share_a_slot(redis_server: EmbeddedRedis) -> None:
    prefix = f"test-{secrets.token_hex(4)}"
    registries = [Registry(redis_server.url, prefix) for _ in range(8)]
    joins = [each.join(worker(f"w{i}-{j}"), TTL_S) for i, each in enumerate(registries) for j in range(8)]
    joined = await asyncio.gather(*joins)
    assert sorted(record.slot for record in joined) == list(range(64))
    for each in registries:
        await each.close()


async def test_a_lease_that_is_not_renewed_ends(registry: Registry) -> None:
    await registry.join(worker("silent"), SHORT_S)
    kept = await registry.join(worker("renewed"), SHORT_S)
    await registry.renew(kept, TTL_S)
    await asyncio.sleep(SHORT_S * 1.5)
    assert await registry.list_workers("m") == [kept]
    assert (await registry.join(worker("next"), TTL_S)).slot == 0


async def test_a_renewal_after_the_end_takes_the_slot_again_while_it_is_free(registry: Registry) -> None:
    joined = await registry.join(worker(), SHORT_S)
    await asyncio.sleep(SHORT_S * 1.5)
    await registry.renew(joined, TTL_S)
    assert await registry.list_workers("m") == [joined]


async def test_a_slot_that_another_took_is_lost(registry: Registry) -> None:
    late = await registry.join(worker("late"), SHORT_S)
    await asyncio.sleep(SHORT_S * 1.5)
    other = await registry.join(worker("other"), TTL_S)
    assert other.slot == late.slot
    with pytest.raises(LeaseLost, match=other.incarnation):
        await registry.renew(late, TTL_S)
    assert not await registry.leave(late)
    assert await registry.list_workers("m") == [other]
    assert (await registry.join(late, TTL_S)).slot == 1


async def test_a_worker_that_starts_again_replaces_the_incarnation_that_ended(registry: Registry) -> None:
    before = await registry.join(worker("w"), TTL_S)
    await registry.join(worker("x"), TTL_S)
    with pytest.raises(WorkerIdTaken) as taken:
        await registry.join(worker("w"), TTL_S, ended="another")
    assert (taken.value.incarnation, taken.value.record) == (before.incarnation, before)
    after = await registry.join(worker("w"), TTL_S, ended=before.incarnation)
    assert [record.incarnation for record in await registry.list_workers("m") if record.worker_id == "w"] == [
        after.incarnation
    ]
    with pytest.raises(LeaseLost):
        await registry.renew(before, TTL_S)
    assert not await registry.leave(before)


async def test_an_old_incarnation_stays_out_when_its_slot_is_free_but_its_successor_lives(registry: Registry) -> None:
    blocker = await registry.join(worker("blocker"), TTL_S)
    before = await registry.join(worker("w"), TTL_S)
    await registry.leave(blocker)
    after = await registry.join(worker("w"), TTL_S, ended=before.incarnation)
    assert (before.slot, after.slot) == (1, 0)
    with pytest.raises(LeaseLost):
        await registry.renew(before, TTL_S)
    assert await registry.list_workers("m") == [after]


async def test_renewals_heal_a_redis_that_lost_its_data_and_scripts(own_server: EmbeddedRedis) -> None:
    registry = Registry(own_server.url)
    joined = [await registry.join(worker(f"w{i}"), TTL_S) for i in range(3)]
    own_server.stop()
    own_server.restart()
    assert await registry.list_workers("m") == []
    for record in joined:
        await registry.renew(record, TTL_S)
    assert await registry.list_workers("m") == joined
    await registry.close()


async def test_models_and_prefixes_do_not_see_each_other(redis_server: EmbeddedRedis) -> None:
    prefixes = [f"test-{secrets.token_hex(4)}" for _ in range(2)]
    one, two = [Registry(redis_server.url, prefix) for prefix in prefixes]
    odd = await one.join(worker(model="org/a model {with} braces:1"), TTL_S)
    await one.join(worker(model="org/a"), TTL_S)
    assert await one.list_workers(odd.model) == [odd]
    assert await two.list_workers(odd.model) == []
    await one.close()
    await two.close()


async def test_all_keys_of_a_model_share_one_hash_tag(own_server: EmbeddedRedis) -> None:
    registry = Registry(own_server.url, "p")
    await registry.join(worker(model="a}b{c"), TTL_S)
    client = redis.asyncio.Redis.from_url(own_server.url)
    keys = [key.decode() for key in await client.keys("*") if isinstance(key, bytes)]
    assert len(keys) == 2
    assert {key[key.index("{") + 1 : key.index("}")] for key in keys} == {"a%7Db%7Bc"}
    await client.aclose()
    await registry.close()


async def test_listing_is_one_round_trip(own_server: EmbeddedRedis) -> None:
    registry = Registry(own_server.url)
    for i in range(20):
        await registry.join(worker(f"w{i}"), TTL_S)
    await registry.list_workers("m")
    client = redis.asyncio.Redis.from_url(own_server.url)
    before = await client.info("commandstats")
    await registry.list_workers("m")
    after = await client.info("commandstats")
    assert after["cmdstat_evalsha"]["calls"] - before["cmdstat_evalsha"]["calls"] == 1
    from_clients = {"cmdstat_eval", "cmdstat_script", "cmdstat_script|load", "cmdstat_get", "cmdstat_mget"}
    assert all(after.get(name) == before.get(name) for name in from_clients)
    await client.aclose()
    await registry.close()


async def test_a_record_from_the_future_does_not_hide_the_others(
    registry: Registry, redis_server: EmbeddedRedis
) -> None:
    strange = await registry.join(worker("strange"), TTL_S)
    known = await registry.join(worker("known"), TTL_S)
    client = redis.asyncio.Redis.from_url(redis_server.url)
    data = msgspec.msgpack.encode({**msgspec.to_builtins(known), "unheard_of": 1})
    await client.hset(registry._keys("m")[1], str(known.slot), data)
    await client.hset(registry._keys("m")[1], str(strange.slot), b"\xc1")
    assert await registry.list_workers("m") == [known]
    await client.aclose()


async def test_a_full_fleet_is_said(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_SLOTS", 2)
    for i in range(2):
        await registry.join(worker(f"w{i}"), TTL_S)
    with pytest.raises(FleetFull, match="all 2 slots"):
        await registry.join(worker("w2"), TTL_S)


async def test_a_record_that_never_joined_cannot_be_renewed(registry: Registry) -> None:
    with pytest.raises(ValueError, match="has not joined"):
        await registry.renew(worker(), TTL_S)


async def test_a_redis_that_is_gone_is_said_at_once_and_is_used_again_when_it_is_back(
    own_server: EmbeddedRedis,
) -> None:
    registry = Registry(own_server.url)
    joined = await registry.join(worker(), TTL_S)
    own_server.stop()
    for call in (registry.renew(joined, TTL_S), registry.leave(joined), registry.list_workers("m")):
        with pytest.raises(RegistryUnavailable):
            await call
    own_server.restart()
    await registry.renew(joined, TTL_S)
    assert await registry.list_workers("m") == [joined]
    await registry.close()


async def test_a_redis_that_accepts_but_never_answers_does_not_hang_us() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        registry = Registry(f"redis://127.0.0.1:{silent.getsockname()[1]}", socket_timeout_s=0.2)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(RegistryUnavailable):
                await registry.list_workers("m")
        await registry.close()


async def test_a_server_that_evicts_is_refused(own_server: EmbeddedRedis, caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry(own_server.url)
    await registry.check_server()
    client = redis.asyncio.Redis.from_url(own_server.url)
    await client.config_set("maxmemory-policy", "allkeys-lru")
    await registry.check_server()  # without a limit nothing is evicted yet
    assert "noeviction" in caplog.text
    await client.config_set("maxmemory", "100mb")
    with pytest.raises(RegistryMisconfigured, match="noeviction"):
        await registry.check_server()
    await client.aclose()
    await registry.close()


async def test_a_worker_marked_to_drain_is_listed_so_until_it_is_taken_back_or_starts_again(registry: Registry) -> None:
    record = await registry.join(worker("w"), TTL_S)
    await registry.join(worker("v"), TTL_S)
    assert await registry.mark_draining("m", "w", draining=True)
    assert {each.worker_id: each.draining for each in await registry.list_workers("m")} == {"w": True, "v": False}
    await registry.renew(record, TTL_S)
    assert [each.draining for each in await registry.list_workers("m")] == [True, False]
    assert await registry.mark_draining("m", "w", draining=False)
    assert not any(each.draining for each in await registry.list_workers("m"))
    assert await registry.mark_draining("m", "w", draining=True)
    await registry.join(worker("w", incarnation="later"), TTL_S, ended=record.incarnation)
    assert not any(each.draining for each in await registry.list_workers("m"))
    assert not await registry.mark_draining("m", "nobody", draining=True)


def test_a_connection_that_breaks_before_the_command_is_written_is_a_redis_that_is_away(
    redis_server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Services run on uvloop, whose broken connections raise RuntimeError when they are written to."""

    async def scenario() -> None:
        registry = Registry(redis_server.url, f"test-{secrets.token_hex(4)}")
        pool = registry._redis.connection_pool
        take = pool.get_connection

        async def take_broken(*args: object, **options: object) -> redis.asyncio.Connection:
            connection: redis.asyncio.Connection = await take(*args, **options)
            assert connection._writer is not None
            connection._writer.transport.abort()
            return connection

        with monkeypatch.context() as broken:
            broken.setattr(pool, "get_connection", take_broken)
            with pytest.raises(RegistryUnavailable):
                await registry.join(worker(), TTL_S)
        assert (await registry.join(worker(), TTL_S)).slot == 0
        await registry.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())
