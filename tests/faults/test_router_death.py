"""A router dies or drains under load: workers free what it had, and other routers and a new start serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from tests.component.dispatch.test_server import until_refused
from tests.faults.storm.bench import Bench, open_bench
from tests.faults.storm.load import Job, Load
from tests.faults.storm.processes import StackSettings

pytestmark = [pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Bench]:
    settings = StackSettings(num_prefill=1, num_decode=1, num_routers=2)
    async with open_bench(tmp_path_factory.mktemp("routers"), settings) as bench:
        yield bench


async def lose_a_router(bench: Bench, load: Load) -> None:
    """Long streams through router-0, which is killed once decode runs them; every client must notice."""
    jobs = bench.make_jobs(6, max_tokens=2000)

    async def read(job: Job) -> None:
        url, body = load.urls[0] + job.path, job.body | {"stream": True}
        async with httpx.AsyncClient(timeout=None) as http, http.stream("POST", url, json=body) as answer:
            async for _ in answer.aiter_bytes():
                pass

    async def client(job: Job) -> None:
        with pytest.raises(httpx.TransportError):
            await read(job)

    async with asyncio.TaskGroup() as group:
        for job in jobs:
            group.create_task(client(job))
        await bench.stack.until_busy("decode-0", "running", "router-1")
        bench.stack.kill("router-0")


@pytest.mark.parametrize("is_noticed", [True, False])
async def test_what_a_dead_router_had_is_freed_and_its_new_start_serves(bench: Bench, is_noticed: bool) -> None:
    """Whether it is back before or after its silence was noticed."""
    await lose_a_router(bench, bench.load("router-0"))
    if is_noticed:
        await bench.until_none_running("router-1")
    bench.stack.spawn("router-0")
    await bench.stack.until_router_serves("router-0")
    load = bench.load("router-0")
    for job, expected in await bench.jobs(5):
        await load.run(job, expected)
    assert load.counts["equal"] == 5
    await bench.stack.until_clean()


async def test_streams_of_the_other_router_go_on(bench: Bench) -> None:
    load = bench.load("router-1")
    workers = await bench.stack.workers("router-1")
    before = (await bench.stack.fleet("router-1"))["requests"]

    async def disturb() -> None:
        await lose_a_router(bench, bench.load("router-0"))
        bench.stack.spawn("router-0")
        await bench.stack.until_router_serves("router-0")

    await bench.under_load(load, await bench.jobs(6), disturb)
    after = (await bench.stack.fleet("router-1"))["requests"]
    assert after["retries"] == before["retries"]
    assert after["failed"] == before["failed"]
    assert load.counts["equal"] >= 6
    assert load.counts["asked again, the router was gone"] == 0
    await bench.stack.until_clean()
    assert await bench.stack.incarnations() == {name: each["incarnation"] for name, each in workers.items()}


async def test_a_router_that_drains_ends_its_streams_while_another_serves(bench: Bench) -> None:
    """Its port is closed at once; a client whose connection ends before the first byte asks the other router."""
    stack = bench.stack
    long = [pair for pair in await bench.jobs(6, max_tokens=600) if pair[0].body["stream"]]
    others = await bench.jobs(6)
    own, both = bench.load("router-0"), bench.load()

    async def drain() -> None:
        stack.terminate("router-0")
        url = httpx.URL(stack.url("router-0"))
        await until_refused(url.host, url.port)
        assert not any(stream.done() for stream in streams)
        await asyncio.wait(streams)
        assert await stack.until_gone("router-0") == 0
        stack.spawn("router-0")
        await stack.until_router_serves("router-0")

    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(own.run(*pair)) for pair in long]
        while (await stack.fleet("router-0"))["requests"]["running"] < len(long):
            await asyncio.sleep(0.02)
        await bench.under_load(both, others, drain)
    assert own.counts["equal"] == len(long) and not own.errors
    assert own.counts["asked again, the router was gone"] == 0
    await stack.until_clean()
