"""Events go out at once while the client reads, and in their order whether it does or not."""

from __future__ import annotations

import asyncio
import json
import random

import orjson
import pytest
from starlette.types import Message

from kvrelay_router.http.body import ClientGone, ClientWatch
from kvrelay_router.http.event_stream import EventStream


class Client:
    """`send` of a connection, which suspends while the client does not read."""

    def __init__(self) -> None:
        self.reads = asyncio.Event()
        self.reads.set()
        self.written = b""
        self.is_over = False

    async def send(self, message: Message) -> None:
        while not self.reads.is_set():
            await self.reads.wait()
        self.written += message.get("body", b"")
        self.is_over |= message["type"] == "http.response.body" and not message["more_body"]


async def test_a_callback_writes_at_once() -> None:
    client = Client()
    stream = EventStream(client.send)
    assert not stream.is_ready()
    await stream.start([("x-kvrelay-decode", "d")])
    stream.write(b"one")
    stream.write(b"two")
    assert client.written == b"onetwo" and stream.is_ready()
    assert len(asyncio.all_tasks()) == 1
    await stream.end(b"three")
    assert client.written == b"onetwothree" and client.is_over


async def test_what_a_slow_client_cannot_take_yet_is_written_before_what_follows() -> None:
    client = Client()
    stream = EventStream(client.send)
    await stream.start([])
    client.reads.clear()
    stream.write(b"one")
    assert not stream.is_ready()
    task = asyncio.create_task(stream.send(b"two"))
    await asyncio.sleep(0.001)
    assert client.written == b"" and not stream.is_ready()
    client.reads.set()
    await task
    assert stream.is_ready()
    assert bytes(client.written) == b"onetwo"


async def test_a_task_that_is_cancelled_while_its_client_does_not_read_can_still_end_the_stream() -> None:
    client = Client()
    stream = EventStream(client.send)
    await stream.start([])
    client.reads.clear()
    stream.write(b"one")
    task = asyncio.create_task(stream.send(b"two"))
    await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    client.reads.set()
    await stream.end(b"error")
    assert client.written == b"error" and client.is_over


@pytest.mark.parametrize("seed", range(20))
async def test_events_are_neither_lost_nor_repeated_nor_mixed_up(seed: int) -> None:
    draw = random.Random(seed)
    client = Client()
    stream = EventStream(client.send)
    await stream.start([])
    expected = b""
    for number in range(200):
        event = b"%d " % number
        expected += event
        if draw.random() < 0.2:
            client.reads.clear()
            asyncio.get_running_loop().call_later(draw.choice((0, 0.0005)), client.reads.set)
        if stream.is_ready():
            stream.write(event)
        else:
            await stream.send(event)
        if draw.random() < 0.3:
            await asyncio.sleep(0)
    await stream.end(b"end")
    assert client.written == expected + b"end"


# -- what runs for a client ends when the client goes, and only then -------------------------------------------------


class Connection:
    """`receive` of a connection whose client may go."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}


def watching(connection: Connection, inside: list[str]) -> asyncio.Task[None]:
    """Runs for ever; `inside` says how far it came."""

    async def run() -> None:
        with ClientWatch(connection.receive):
            inside.append("began")
            try:
                await asyncio.Event().wait()
            finally:
                inside.append("ended")

    return asyncio.create_task(run())


@pytest.mark.parametrize("before", [False, True])
async def test_a_client_that_goes_ends_what_runs_for_it(before: bool) -> None:
    connection, inside = Connection(), list[str]()
    if before:
        connection.gone.set()
    task = watching(connection, inside)
    await asyncio.sleep(0)
    connection.gone.set()
    with pytest.raises(ClientGone):
        await task
    assert inside == ["began", "ended"] and task.cancelling() == 0


@pytest.mark.parametrize("stopped", [False, True])
async def test_what_is_over_is_not_cancelled(stopped: bool) -> None:
    connection = Connection()
    with ClientWatch(connection.receive) as watch:
        await asyncio.sleep(0)
        if stopped:
            watch.stop()
            connection.gone.set()
            await asyncio.sleep(0.001)
    connection.gone.set()
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    await asyncio.sleep(0.001)  # a cancellation would come here


@pytest.mark.parametrize("goes", [False, True])
async def test_another_cancellation_stays_one(goes: bool) -> None:
    connection, inside = Connection(), list[str]()
    task = watching(connection, inside)
    await asyncio.sleep(0)
    if goes:
        connection.gone.set()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert inside == ["began", "ended"]


async def test_no_character_but_a_line_feed_ends_a_line_for_any_reader() -> None:
    """Python's `splitlines`, and so httpx's `iter_lines`, ends lines at others too."""
    texts = [chr(code) for code in [*range(0x250), *range(0x2000, 0x2070), 0x1F9A6]]
    client = Client()
    stream = EventStream(client.send)
    await stream.start([])
    for text in texts:
        stream.write(b"data: %b\n\n" % orjson.dumps(text))
    await stream.end(b"data: %b\n\n" % orjson.dumps("".join(texts)))
    lines = client.written.decode().splitlines()
    assert lines[1::2] == [""] * (len(texts) + 1)
    assert [json.loads(line.removeprefix("data: ")) for line in lines[::2]] == [*texts, "".join(texts)]
