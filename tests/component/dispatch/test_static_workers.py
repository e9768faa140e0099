"""A router with a list of workers, beside a registry that is away, and without any."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from http import HTTPStatus

import msgspec
import pytest

from kvrelay.fleet.worker_registry import RECORD_PAGE, WorkerRecord, record_as_json
from kvrelay.telemetry.pages import Page, Pages
from kvrelay_router.fleet.watch import MAX_ANSWER_BYTES, StaticWorker, StaticWorkers
from tests.component.dispatch.fake_workers import FakeDecode, FakePrefill, FakeWorker, true_tokens
from tests.component.dispatch.rig import Rig, pair, read
from tests.fakes.records import worker_record
from tests.fakes.waiting import until

INTERVAL_S = 0.02
GOOD = record_as_json(worker_record())


def record_page(worker: FakeWorker) -> Page:
    return Page(record_as_json(worker.record))


@asynccontextmanager
async def paged(*workers: FakeWorker) -> AsyncIterator[StaticWorkers]:
    """The list of these workers, each with its page."""
    pages = [Pages({RECORD_PAGE: partial(record_page, worker)}) for worker in workers]
    for each in pages:
        await each.start("127.0.0.1", 0)
    try:
        yield StaticWorkers([f"http://127.0.0.1:{each.port}" for each in pages], "fake", INTERVAL_S)
    finally:
        for each in pages:
            await each.close()


async def test_without_a_registry_requests_are_served_by_the_list(rig: Rig) -> None:
    prefill, decode = pair()
    async with paged(prefill, decode) as static:
        await rig.start(prefill, decode, static=static, has_registry=False)
        handle = rig.submit()
        assert await read(handle) == {0: true_tokens(0, 6)}
        assert (handle.served_by.prefill, handle.served_by.decode) == ("p0", "d0")
        assert (await rig.dispatcher.fleet())["router"]["registry"] == "none"
        decode.draining = True
        await until(lambda: rig.states()["d0"] == "draining")
        await rig.close()


async def test_a_registry_that_is_away_at_the_start_is_taken_when_it_comes(rig: Rig) -> None:
    prefill, decode = pair()
    rig.registry_is_away = True
    async with paged(prefill, decode) as static:
        await rig.start(prefill, decode, static=static)
        assert rig.dispatcher.watch.registry_state != "ok"
        assert await read(rig.submit()) == {0: true_tokens(0, 6)}
        rig.add(FakeDecode("d1"))  # which is not on the list
        rig.registry_is_away = False
        await until(lambda: rig.states() == {"p0": "ready", "d0": "ready", "d1": "ready"})
        assert rig.dispatcher.watch.registry_state == "ok"
        await rig.close()


def has_records(static: StaticWorkers, records: list[WorkerRecord]) -> bool:
    return [each.record for each in static.found()] == records


async def test_two_workers_with_one_id_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    asked = Counter[str]()

    def page(incarnation: str) -> Page:
        asked[incarnation] += 1
        return Page(record_as_json(worker_record(incarnation=incarnation)))

    pages = [Pages({RECORD_PAGE: partial(page, incarnation)}) for incarnation in ("2", "1")]
    for each in pages:
        await each.start("127.0.0.1", 0)
    later, earlier = [f"http://127.0.0.1:{each.port}" for each in pages]
    static = StaticWorkers([later, earlier], "m", INTERVAL_S)
    static.start(lambda: None)
    await until(lambda: min(asked["1"], asked["2"]) > 3)
    await static.close()
    for each in pages:
        await each.close()
    line = (
        f"static workers {earlier} and {later} are both worker w, only the second is used: give each its own worker_id"
    )
    assert caplog.messages == [line]


async def test_an_address_that_serves_another_fleet_leaves_this_one(caplog: pytest.LogCaptureFixture) -> None:
    """Both fleets of a router poll it."""
    record = worker_record()
    pages = Pages({RECORD_PAGE: lambda: Page(record_as_json(record))})
    await pages.start("127.0.0.1", 0)
    urls, changes = [f"http://127.0.0.1:{pages.port}"], list[str]()
    fleets = {
        model: StaticWorkers(urls, model, INTERVAL_S, other_models=frozenset({record.model, "other"}) - {model})
        for model in (record.model, "other")
    }
    try:
        for model, static in fleets.items():
            static.start(partial(changes.append, model))
        for model in (record.model, "other", record.model):
            record = msgspec.structs.replace(record, model=model, incarnation=record.incarnation + "1")
            (other,) = fleets.keys() - {model}
            await until(partial(has_records, fleets[model], [record]))
            await until(partial(has_records, fleets[other], []))
    finally:
        for static in fleets.values():
            await static.close()
        await pages.close()
    assert set(changes) == set(fleets), "each fleet was told"
    assert not [each for each in caplog.records if each.levelname == "WARNING"]


async def test_a_dead_worker_is_forgotten_and_its_successor_found(rig: Rig) -> None:
    prefill, decode, successor = FakePrefill("p0"), FakeDecode("d0"), FakeDecode("d1")
    behind: list[FakeWorker] = [decode]
    pages = Pages({RECORD_PAGE: lambda: record_page(behind[0])})
    await pages.start("127.0.0.1", 0)
    async with paged(prefill) as static:
        static._workers.append(StaticWorker(f"http://127.0.0.1:{pages.port}"))
        await rig.start(prefill, decode, static=static, has_registry=False)
        decode.kill()
        rig.add(successor)
        behind[0] = successor
        await until(lambda: rig.states() == {"p0": "ready", "d1": "ready"})
        assert await read(rig.submit()) == {0: true_tokens(0, 6)}
        await rig.close()
        await pages.close()


async def answering(data: bytes) -> asyncio.Server:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(data)
        writer.close()

    return await asyncio.start_server(answer, "127.0.0.1", 0)


def page(body: bytes, status: HTTPStatus = HTTPStatus.OK) -> bytes:
    return f"HTTP/1.0 {status.value} {status.phrase}\r\n\r\n".encode() + body


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (page(b"starting\n", HTTPStatus.SERVICE_UNAVAILABLE), "/worker answers 503 starting"),
        (page(b"no such page\n", HTTPStatus.NOT_FOUND), "/worker answers 404 no such page"),
        (page(GOOD[:-9]), "/worker is not a worker record"),
        (page(b'{"worker_id": 3}'), "/worker is not a worker record"),
        (page(b"\xff\xfe"), "/worker is not a worker record"),
        (page(b" " * MAX_ANSWER_BYTES + GOOD), "more than"),
        (page(record_as_json(worker_record(model="other"))), "it serves the model other, this router m"),
        (page(record_as_json(worker_record(address="ipc://x"))), "its address 'ipc://x' is not tcp://HOST:PORT"),
        (b"+PONG\r\n", "does not speak HTTP"),
        (b"", "does not speak HTTP"),
    ],
)
async def test_what_is_no_worker_is_named_and_left_out(
    answer: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = await answering(answer)
    static = StaticWorkers([f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"], "m", INTERVAL_S)
    static.start(lambda: None)
    await until(lambda: reason in static._workers[0].silence)
    assert static.found() == []
    await static.close()
    server.close()
    assert reason in caplog.text


async def test_a_worker_is_told_of_when_its_answer_changes() -> None:
    told: set[str] = set()
    now = [worker_record(incarnation="1")]
    pages = Pages({RECORD_PAGE: lambda: Page(record_as_json(now[0]))})
    await pages.start("127.0.0.1", 0)
    static = StaticWorkers([f"http://127.0.0.1:{pages.port}"], "m", INTERVAL_S)
    static.start(lambda: told.update(found.record.incarnation for found in static.found() if found.record is not None))
    await until(lambda: told == {"1"})
    now[0] = msgspec.structs.replace(now[0], incarnation="2")
    await until(lambda: told == {"1", "2"})
    await pages.close()
    await until(lambda: static.found()[0].silence)
    assert static.found()[0].record == now[0]
    await static.close()
