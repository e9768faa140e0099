"""An answer's head and what follows it go out together."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import pytest
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from kvrelay_router.http.event_writer import EventWriter
from kvrelay_router.http.uvicorn_internals import Exchange
from kvrelay_router.pending_memory import BodyBytes, PendingMemory

HEAD: Any = {"type": "http.response.start", "status": 200, "headers": [(b"x-kvrelay-router", b"r")]}
PART: Any = {"type": "http.response.body", "body": b"data: otter\n\n", "more_body": True}
END: Any = {"type": "http.response.body", "body": b"data: [DONE]\n\n"}


class Transport:
    """Notes what uvicorn does with it; `paused`, as flow control."""

    def __init__(self) -> None:
        self.done: list[bytes | str] = []
        self.write_paused = False
        self.room = asyncio.Event()

    def write(self, data: bytes) -> None:
        self.done.append(data)

    def close(self) -> None:
        self.done.append("closed")

    def is_closing(self) -> bool:
        return "closed" in self.done

    def resume_reading(self) -> None: ...

    async def drain(self) -> None:
        await self.room.wait()


def cycle_on(transport: Transport, *, keep_alive: bool = True) -> RequestResponseCycle:
    log: Any = logging.getLogger("test")
    scope: Any = {"type": "http", "method": "POST", "http_version": "1.1", "state": {}}
    return RequestResponseCycle(
        scope, cast("Any", transport), cast("Any", transport), log, log, False, [], asyncio.Event(), False, keep_alive,
        lambda: None,
    )  # fmt: skip


async def test_a_head_and_the_first_events_are_one_write() -> None:
    transport = Transport()
    cycle = cycle_on(transport)
    writer = EventWriter(Exchange(cycle), BodyBytes(PendingMemory()))
    with writer.in_one_write():
        await cycle.send(HEAD)
        await cycle.send(PART)
        assert not transport.done
    writer.write(b"data: more\n\n")
    await cycle.send(END)
    (first, second, third) = cast("list[bytes]", transport.done)
    assert first.startswith(b"HTTP/1.1 200 OK\r\n") and first.endswith(b"\r\n\r\nd\r\ndata: otter\n\n\r\n")
    assert second == b"c\r\ndata: more\n\n\r\n"
    assert third == b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


async def test_the_connection_ends_after_what_was_written() -> None:
    transport = Transport()
    cycle = cycle_on(transport, keep_alive=False)
    with EventWriter(Exchange(cycle), BodyBytes(PendingMemory())).in_one_write():
        await cycle.send(HEAD)
        await cycle.send(END)
    written, closed = transport.done
    assert isinstance(written, bytes) and written.endswith(b"[DONE]\n\n\r\n0\r\n\r\n")
    assert closed == "closed"


async def test_what_was_written_before_an_error_or_the_end_of_the_task_goes_out() -> None:
    transport = Transport()
    cycle = cycle_on(transport)

    async def answer() -> None:
        with EventWriter(Exchange(cycle), BodyBytes(PendingMemory())).in_one_write():
            await cycle.send(HEAD)
            raise ValueError("otter")

    with pytest.raises(ValueError, match="otter"):
        await answer()
    assert len(transport.done) == 1
    assert cycle.transport is cast("Any", transport)


async def test_a_full_buffer_is_waited_for_and_holds_nothing_else_back() -> None:
    transport = Transport()
    transport.write_paused = True
    cycle = cycle_on(transport)

    async def answer() -> None:
        with EventWriter(Exchange(cycle), BodyBytes(PendingMemory())).in_one_write():
            await cycle.send(HEAD)
            await cycle.send(PART)

    task = asyncio.create_task(answer())
    await asyncio.sleep(0)
    assert not transport.done
    transport.write_paused = False
    transport.room.set()
    await task
    assert len(transport.done) == 1


async def test_a_body_that_is_all_there_is_taken_and_one_that_is_not_is_received() -> None:
    cycle = cycle_on(Transport())
    writer = EventWriter(Exchange(cycle), BodyBytes(PendingMemory()))
    cycle.body += b"ott"
    assert writer.whole_body() is None
    cycle.body += b"er"
    cycle.more_body = False
    cycle.message_event.set()
    assert writer.whole_body() == b"otter"
    assert not cycle.message_event.is_set() and not cycle.body


@pytest.mark.parametrize("state", ["disconnected", "waiting_for_100_continue"])
async def test_a_client_that_left_or_waits_is_for_receive(state: str) -> None:
    cycle = cycle_on(Transport())
    cycle.more_body = False
    setattr(cycle, state, True)
    assert EventWriter(Exchange(cycle), BodyBytes(PendingMemory())).whole_body() is None
