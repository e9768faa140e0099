"""The clock of Redis' machine jumps by an hour: leases, the limits of keys and the prefix index go on."""

from __future__ import annotations

import asyncio
import os
import shutil
import struct
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
import redis

from kvrelay.fleet import Registry
from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.fleet.index import IndexFeed, IndexPublisher, IndexReader
from kvrelay.fleet.index.layout import index_base
from kvrelay.fleet.key_limits import KeyLimits, SharedLimits
from kvrelay.kv.cache import Stored
from tests.component.fleet.test_deployments import until_found
from tests.component.fleet.test_index_publisher import chain_of
from tests.fakes.records import worker_record
from tests.fakes.waiting import until

SOURCE = r"""
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long *offset_s;

__attribute__((constructor)) static void map_offset(void) {
    const char *path = getenv("SHIFTED_CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *mapped = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof(long), PROT_READ, MAP_SHARED, fd, 0);
    if (mapped != MAP_FAILED) offset_s = mapped;
    if (fd >= 0) close(fd);
}

int clock_gettime(clockid_t id, struct timespec *now) {
    int result = syscall(SYS_clock_gettime, id, now);
    if (!result && offset_s && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += *offset_s;
    return result;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (now) *now = precise.tv_sec;
    return precise.tv_sec;
}
"""


class ShiftedClock:
    """Start processes with `environ`; `shift` then moves their clock at once."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        source, library, self._offset = directory / "clock.c", directory / "clock.so", directory / "offset"
        source.write_text(SOURCE)
        compiler = shutil.which("cc") or shutil.which("gcc")
        assert compiler is not None, "a C compiler is needed, as for kvrelay itself"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source)], check=True)
        self.shift(0)
        self.environ = {"LD_PRELOAD": str(library), "SHIFTED_CLOCK": str(self._offset)}

    def shift(self, by_s: int) -> None:
        """The clock is so many seconds ahead of the true one; a negative number puts it back."""
        descriptor = os.open(self._offset, os.O_RDWR | os.O_CREAT, 0o600)
        os.pwrite(descriptor, struct.pack("l", by_s), 0)
        os.close(descriptor)


HOUR_S = 3600
TTL_S = 30.0
JUMPS = pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S], ids=["forward", "back"])


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ShiftedClock:
    clock = ShiftedClock(tmp_path / "clock")
    for name, value in clock.environ.items():
        monkeypatch.setenv(name, value)
    return clock


@pytest.fixture
def server(clock: ShiftedClock) -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
async def registry(server: EmbeddedRedis) -> AsyncIterator[Registry]:
    registry = Registry(server.url)
    yield registry
    await registry.close()


def server_time(server: EmbeddedRedis) -> int:
    with redis.Redis.from_url(server.url) as client:
        seconds: int = client.time()[0]
        return seconds


@JUMPS
async def test_living_workers_stay_registered_and_dead_ones_do_not(
    server: EmbeddedRedis, registry: Registry, clock: ShiftedClock, jump_s: int
) -> None:
    living, dead = worker_record(worker_id="living"), worker_record(worker_id="dead")
    living, dead = await registry.join(living, TTL_S), await registry.join(dead, TTL_S)
    before = server_time(server)
    clock.shift(jump_s)
    assert abs(server_time(server) - before - jump_s) < 60
    await registry.renew(living, TTL_S)
    assert await registry.list_workers("m") == [living]
    again = msgspec.structs.replace(dead, incarnation="f" * 16)
    again = await registry.join(again, TTL_S)
    assert {each.worker_id: each.incarnation for each in await registry.list_workers("m")} == {
        "living": living.incarnation,
        "dead": "f" * 16,
    }


@JUMPS
async def test_a_key_is_not_refused_for_an_hour(server: EmbeddedRedis, clock: ShiftedClock, jump_s: int) -> None:
    limits = SharedLimits(server.url, "kvrelay", "m")
    rules = KeyLimits(requests_per_minute=60, burst=2, concurrency=3)
    try:
        assert await limits.enter("k", rules, "1", TTL_S) is None
        clock.shift(jump_s)
        for number in range(2, 4):
            async with asyncio.timeout(60):
                while (refusal := await limits.enter("k", rules, str(number), TTL_S)) is not None:
                    assert refusal.retry_after_s <= 2.0
                    await asyncio.sleep(refusal.retry_after_s)
    finally:
        await limits.close()


@JUMPS
async def test_the_index_goes_on_and_takes_a_worker_that_starts_with_an_earlier_clock(
    server: EmbeddedRedis, clock: ShiftedClock, jump_s: int
) -> None:
    def publisher(incarnation: int) -> IndexPublisher:
        name = f"{incarnation:016x}"
        made = IndexPublisher(server.url, "kvrelay", "m", "w", name, ttl_s=TTL_S, renew_interval_s=0.1)
        made.start()
        return made

    feed = IndexFeed(IndexReader(server.url, "kvrelay", "m"), check_interval_s=0.1)
    feed.start()
    chain, first = chain_of(400), publisher(5)
    publishers = [first]
    try:
        first.publish([Stored(None, tuple(chain[:200]))])
        await until_found(feed, chain, {"w": 200})
        clock.shift(jump_s)
        first.publish([Stored(chain[199], tuple(chain[200:300]))])
        await until_found(feed, chain, {"w": 300})
        first.abandon()
        clock.shift(2 * jump_s)
        publishers.append(publisher(3 if jump_s < 0 else 7))
        publishers[-1].publish([Stored(None, tuple(chain))])
        await until_found(feed, chain, {"w": 400})
    finally:
        await feed.close()
        for each in publishers:
            await asyncio.to_thread(each.close)


async def test_the_stream_of_the_index_stays_short_after_the_clock_was_set_back(
    server: EmbeddedRedis, clock: ShiftedClock
) -> None:
    """Redis' ids never go back, so no entry grows older for an hour."""
    publisher = IndexPublisher(server.url, "kvrelay", "m", "w", f"{1:016x}", ttl_s=TTL_S, renew_interval_s=0.1)
    publisher.start()
    stream = index_base("kvrelay", "m") + ":stream"
    try:
        publisher.publish([Stored(None, tuple(chain_of(10)))])
        with redis.Redis.from_url(server.url) as client:
            await until(lambda: client.xlen(stream) > 0)
            clock.shift(-HOUR_S)
            with client.pipeline() as pipeline:
                for _ in range(30_000):
                    pipeline.xadd(stream, {"e": b""})
                pipeline.execute()
            await until(lambda: client.xlen(stream) < 11_000)
    finally:
        await asyncio.to_thread(publisher.close)
