"""A router whose process has no file descriptor left: it serves who is connected, and everybody when there are some."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tests.component.router.http.test_streams_under_load import connect, read_answer, request
from tests.component.router.rig import Router

NUM_LATE = 8


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fillers = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[0] + 50, hard))
    try:
        with suppress(OSError):
            while True:
                fillers.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)


async def test_a_router_without_descriptors_serves_on_and_recovers(router: Router) -> None:
    reader, writer = await connect(router)
    late = [socket.socket() for _ in range(NUM_LATE)]  # the clients' ends, which are of this process, too
    for each in late:
        each.setblocking(False)
    loop = asyncio.get_running_loop()
    with no_descriptor_left():
        for each in late:
            await loop.sock_connect(each, ("127.0.0.1", router.server.port))
        for _ in range(3):
            writer.write(request())
            assert await read_answer(reader) == "An otter is a mammal."
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            length = re.search(rb"content-length: (\d+)", head.lower())
            assert length is not None
            await reader.readexactly(int(length[1]))
    again, other = await connect(router)
    other.write(request())
    assert await read_answer(again) == "An otter is a mammal."
    for each in late:
        each.close()
    for end in (writer, other):
        end.close()
