"""Two workers with one id: the one that finds the id in use ends, the other one keeps its lease."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from kvrelay.fleet import Registry, WorkerRecord
from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.process import ServiceEnds, StartFailed
from kvrelay.process_identity import identity_of, own_identity
from kvrelay.worker.membership import Membership
from tests.fakes.records import worker_record
from tests.fakes.waiting import PATIENCE_S, until

TTL_S = 30.0
SHORT_S = 0.5
NewMember = Callable[..., Membership]


@pytest.fixture
def new_member(redis_server: EmbeddedRedis) -> NewMember:
    """Makes a member of one fleet. Without `process` nobody can see whether its process runs."""
    prefix = f"test-{secrets.token_hex(4)}"

    def make(incarnation: str, process: str = "", ttl_s: float = TTL_S) -> Membership:
        record = worker_record(incarnation=incarnation, process=process)
        return Membership(Registry(redis_server.url, prefix), record, dict, ttl_s=ttl_s, interval_s=0.05)

    return make


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as made:
        yield made
        made.kill()


async def joined(member: Membership) -> asyncio.Task[None]:
    running = asyncio.create_task(member.run())
    await asyncio.wait_for(member.joined.wait(), PATIENCE_S)
    return running


async def ended(member: Membership, *running: asyncio.Task[None]) -> None:
    member.stop()
    await asyncio.gather(*running, return_exceptions=True)
    await member.leave()


async def leases(member: Membership) -> list[WorkerRecord]:
    assert member._registry is not None
    return await member._registry.list_workers("m")


@pytest.mark.parametrize("can_be_seen", [True, False])
async def test_a_worker_whose_id_is_in_use_does_not_start(new_member: NewMember, can_be_seen: bool) -> None:
    first, second = new_member("1", own_identity() if can_be_seen else ""), new_member("2")
    running = await joined(first)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(StartFailed, match=r"worker id w is in use .* at tcp://127.0.0.1:5000 .* --worker-id"):
            await second.run()
    assert not running.done()
    assert [each.incarnation for each in await leases(first)] == ["1"]
    await ended(second)
    await ended(first, running)


@pytest.mark.parametrize("can_be_seen", [True, False])
async def test_the_lease_of_a_dead_worker_is_taken_over(
    new_member: NewMember, process: subprocess.Popen[bytes], can_be_seen: bool
) -> None:
    """Before it expires if its process can be seen to have ended."""
    first = new_member("1", identity_of(process.pid), ttl_s=600) if can_be_seen else new_member("1", ttl_s=SHORT_S)
    await ended_without_leaving(first, await joined(first))
    process.kill()
    process.wait()
    second = new_member("2")
    running = await joined(second)
    assert [each.incarnation for each in await leases(second)] == ["2"]
    await ended(second, running)


async def test_a_worker_waits_for_its_draining_predecessor(new_member: NewMember) -> None:
    first, second = new_member("1", own_identity()), new_member("2")
    running = await joined(first)
    await first.announce(draining=True)
    while not (await leases(first))[0].draining:
        await asyncio.sleep(0)
    starting = asyncio.create_task(second.run())
    await until(lambda: second._holder is not None)
    assert not starting.done()
    await ended(first, running)
    await asyncio.wait_for(second.joined.wait(), PATIENCE_S)
    await ended(second, starting)


async def test_of_workers_that_start_together_one_stays(new_member: NewMember) -> None:
    members = [new_member(str(number), own_identity()) for number in range(6)]
    running = [asyncio.create_task(member.run()) for member in members]
    async with asyncio.timeout(PATIENCE_S):
        while sum(task.done() for task in running) < len(members) - 1:
            await asyncio.wait([task for task in running if not task.done()], return_when=asyncio.FIRST_COMPLETED)
    assert [type(task.exception()) for task in running if task.done()] == [StartFailed] * (len(members) - 1)
    (stayed,) = [member for member, task in zip(members, running, strict=True) if not task.done()]
    await asyncio.wait_for(stayed.joined.wait(), PATIENCE_S)
    for member, task in zip(members, running, strict=True):
        await ended(member, task)


async def test_a_worker_that_lost_its_lease_to_a_running_one_ends(new_member: NewMember) -> None:
    """As if it had been away from Redis for longer than its lease."""
    first, second = new_member("1", own_identity()), new_member("2", own_identity())
    running = await joined(first)
    second._ended = "1"
    successor = await joined(second)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(ServiceEnds, match="worker id w is in use"):
            await running
    assert not successor.done()
    assert [each.incarnation for each in await leases(second)] == ["2"]
    await ended(first)
    await ended(second, successor)


async def ended_without_leaving(member: Membership, running: asyncio.Task[None]) -> None:
    member.stop()
    await running
    assert member._registry is not None
    await member._registry.close()
