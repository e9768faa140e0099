"""How programs call a server: connections, ended sessions, and texts that were sent before."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay_programs.content import MOST_KEPT, SentTexts
from kvrelay_programs.endpoint import Connections
from kvrelay_programs.errors import EndpointError
from kvrelay_programs.program_loop import MOST_AT_ONCE, SessionEnds


async def used(connections: Connections, number: int, held: AsyncExitStack) -> Counter[int]:
    """How many of `number` calls each client has, by the order in which the clients came."""
    clients = [await held.enter_async_context(connections.client()) for _ in range(number)]
    order = {client: place for place, client in enumerate(dict.fromkeys(clients))}
    return Counter(order[client] for client in clients)


def test_a_client_has_few_calls_at_once() -> None:
    async def run() -> None:
        async with AsyncExitStack() as held:
            assert await used(Connections({}, 1), 100, held) == {0: 16, 1: 16, 2: 16, 3: 16, 4: 16, 5: 16, 6: 4}

    asyncio.run(run())


def test_a_client_whose_calls_ended_is_used_again() -> None:
    async def run() -> None:
        connections = Connections({}, 1)
        async with AsyncExitStack() as held:
            async with AsyncExitStack() as first:
                before = await first.enter_async_context(connections.client())
            assert await held.enter_async_context(connections.client()) is before

    asyncio.run(run())


def test_more_calls_than_clients_have_room_for_are_spread_evenly() -> None:
    async def run() -> None:
        async with AsyncExitStack() as held:
            found = await used(Connections({}, 1), 64 * 16 + 128, held)
            assert set(found.values()) == {18}

    asyncio.run(run())


# -- ended sessions are reported together, and none is lost ----------------------------------------------------------


class Reports:
    def __init__(self, *, fails: bool = False) -> None:
        self.found: list[list[str]] = []
        self.came = asyncio.Event()
        self._fails = fails

    async def __call__(self, sessions: list[str]) -> None:
        self.found.append(sessions)
        self.came.set()
        if self._fails:
            raise EndpointError("it has ended, too")


@pytest.mark.parametrize("fails", [False, True])
async def test_sessions_that_end_one_after_the_other_are_reported_together(fails: bool) -> None:
    reports = Reports(fails=fails)
    ends = SessionEnds(reports)
    for name in ("one", "two"):
        ends.add(name)
        await asyncio.sleep(0)
    assert reports.found == []
    await reports.came.wait()
    assert reports.found == [["one", "two"]]
    await ends.flush()
    reports.came.clear()
    ends.add("three")
    await reports.came.wait()
    assert reports.found[1:] == [["three"]]


async def test_many_are_reported_at_once_and_each_one_time() -> None:
    reports = Reports()
    ends = SessionEnds(reports)
    names = [str(number) for number in range(2 * MOST_AT_ONCE + 5)]
    for name in names:
        ends.add(name)
    await ends.flush()
    await asyncio.sleep(0)
    assert [name for sessions in reports.found for name in sessions] == names
    assert max(map(len, reports.found)) == MOST_AT_ONCE


MODELS = {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "kvrelay"}]}
ANSWER = {"choices": [{"index": 0, "text": " so", "finish_reason": "length"}]}
PROGRAM = """
from kvrelay_programs import gen, program
@program
def one(s, x):
    s += x + gen("y", 1)
one.run_batch([{"x": "a"}, {"x": "b"}], base_url=URL)
one.run(x="c", base_url=URL)
"""


@contextmanager
def server(deleted: list[str]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self, status: int, body: bytes) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self._answer(200, json.dumps(MODELS).encode())

        def do_POST(self) -> None:
            self._answer(200, json.dumps(ANSWER).encode())

        def do_DELETE(self) -> None:
            deleted.append(self.path)
            self._answer(204, b"")

        def log_message(self, *_: object) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}"
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join()


def test_what_is_left_is_reported_when_the_process_ends() -> None:
    deleted: list[str] = []
    with server(deleted) as url:
        command = [sys.executable, "-c", PROGRAM.replace("URL", repr(url))]
        subprocess.run(command, check=True, timeout=120)
    sessions = [name for path in deleted for name in path.removeprefix("/sessions?session=").split("&session=")]
    assert len(set(sessions)) == len(sessions) == 3 and all(name.startswith("program-") for name in sessions)


# -- what is known of a text's beginning, against a comparison with each kept text -----------------------------------


texts = st.text(alphabet="ab", max_size=8)


@given(st.lists(texts, max_size=2 * MOST_KEPT), texts)
def test_the_longest_beginning_that_one_of_the_last_texts_has(sent: list[str], text: str) -> None:
    known = SentTexts()
    for each in sent:
        known.add(each)
    expected = [len(list(takewhile(lambda pair: pair[0] == pair[1], zip(each, text, strict=False)))) for each in sent]
    assert known.num_known(text) == max(expected[-MOST_KEPT:], default=0)
