"""Connections that are handed to processes: evenly, each to one, and none lost with a process that leaves or dies."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay_router.http.connection_passing import PassedConnections, ServingProcess, SharedPort
from kvrelay_router.http.http_server import bind
from tests.fakes.waiting import PATIENCE_S
from tests.thoroughness import examples


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0)


class Served(asyncio.Protocol):
    """A connection at a process. The client has said who it is."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.client: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._process.open.add(self)

    def data_received(self, data: bytes) -> None:
        assert self.client is None
        self.client = int(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._process.open.discard(self)


class Process:
    """One of those that share a port, and its starts."""

    def __init__(self, member: ServingProcess, port: int) -> None:
        self.member = member
        self._port = port
        self.handed: PassedConnections | None = None
        self.open: set[Served] = set()
        self.is_frozen = False

    @property
    def takes(self) -> bool:
        return self.handed is not None

    async def start(self) -> None:
        """As a new process would: with a descriptor of its own, and no connection."""
        self._channel = socket.socket(fileno=os.dup(self.member.descriptor))
        self.open, self.is_frozen = set(), False
        self.handed = PassedConnections(self._channel, self._port)
        self.handed.start(lambda: Served(self))
        self.handed.report_ready()
        await until(lambda: self.member.accepts)

    def freeze(self) -> None:
        """It takes nothing out of its channel, and does not say so."""
        assert self.handed is not None
        self.handed.stop()
        self.is_frozen = True

    async def leave(self) -> None:
        assert self.handed is not None
        await self.handed.leave()
        await until(lambda: not self.member.accepts)
        await self._end()

    async def kill(self) -> None:
        assert self.handed is not None
        self.handed.stop()
        await self._end()

    async def _end(self) -> None:
        for each in list(self.open):
            each.transport.abort()
        await until(lambda: not self.open)
        self.handed, self.is_frozen = None, False
        self._channel.close()
        self.member.died()

    async def tell(self) -> None:
        """How many connections it has."""
        assert self.handed is not None
        self.handed.report_open(len(self.open))
        await until(lambda: self.member.num_open == len(self.open))

    def clients(self) -> list[int]:
        return sorted(each.client for each in self.open if each.client is not None)


@dataclass
class Fleet:
    """A port, its processes, and the clients that are connected."""

    shared: SharedPort
    processes: list[Process]
    clients: dict[int, socket.socket] = field(default_factory=dict)
    num_clients: int = 0

    @classmethod
    def open(cls, num_processes: int) -> Fleet:
        shared = SharedPort(bind("127.0.0.1", 0), num_processes)
        return cls(shared, [Process(member, shared.port) for member in shared.members])

    def connect(self) -> None:
        client = socket.create_connection(("127.0.0.1", self.shared.port), timeout=PATIENCE_S)
        client.sendall(str(self.num_clients).encode())
        self.clients[self.num_clients] = client
        self.num_clients += 1

    def taking(self) -> list[Process]:
        return [each for each in self.processes if each.takes]

    def served(self) -> list[int]:
        return sorted(client for process in self.taking() for client in process.clients())

    async def close(self) -> None:
        for client in self.clients.values():
            client.close()
        for process in self.taking():
            await process.kill()
        self.shared.close()


@pytest.mark.parametrize("num_clients", [1, 7, 64, 200])
async def test_clients_that_come_at_once_are_shared_equally(num_clients: int) -> None:
    fleet = Fleet.open(4)
    for process in fleet.processes:
        await process.start()
    for _ in range(num_clients):  # the loop does not come round: all of them wait in the queue
        fleet.connect()
    await until(lambda: fleet.served() == list(range(num_clients)))
    shares = [len(process.open) for process in fleet.processes]
    assert max(shares) - min(shares) <= 1
    await fleet.close()


async def test_a_process_that_comes_back_is_given_connections_until_it_has_as_many_as_the_others() -> None:
    fleet = Fleet.open(3)
    for process in fleet.processes:
        await process.start()
    for _ in range(30):
        fleet.connect()
    await until(lambda: fleet.served() == list(range(30)))
    await fleet.processes[0].kill()
    await fleet.processes[0].start()
    for _ in range(10):
        fleet.connect()
    await until(lambda: len(fleet.processes[0].clients()) == 10)
    assert [len(process.open) for process in fleet.processes] == [10, 10, 10]
    await fleet.close()


async def test_a_channel_that_is_full_delays_nobody_else() -> None:
    """More come than the channel of a process that does not take them holds; it dies, and all are served."""
    fleet = Fleet.open(2)
    for process in fleet.processes:
        await process.start()
    slow, quick = fleet.processes
    slow.freeze()
    slow.member._ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the least that there is: a few connections
    for _ in range(200):
        fleet.connect()
    await until(lambda: len(quick.clients()) + slow.member.num_open == 200)
    assert 0 < slow.member.num_open < 100
    await slow.kill()
    await until(lambda: fleet.served() == list(range(200)))
    await fleet.close()


@pytest.mark.parametrize("end", [Process.leave, Process.kill])
async def test_a_process_that_ends_at_once_had_been_ready(end: Callable[[Process], Awaitable[None]]) -> None:
    fleet = Fleet.open(1)
    (process,) = fleet.processes
    assert not await process.member.is_ready()
    await process.start()
    await end(process)
    assert not process.member.accepts
    assert await process.member.is_ready()
    process.member.restarted()
    assert not await process.member.is_ready()
    await fleet.close()


async def test_those_that_wait_when_the_port_is_closed_are_handed_over_first() -> None:
    fleet = Fleet.open(2)
    for process in fleet.processes:
        await process.start()
    for _ in range(50):
        fleet.connect()
    fleet.shared.stop_listening()
    with pytest.raises(ConnectionRefusedError):
        fleet.connect()
    await asyncio.gather(*(process.handed.leave() for process in fleet.processes if process.handed))
    await until(lambda: fleet.served() == list(range(50)))
    await fleet.close()


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["connect"] * 4 + ["close", "start", "freeze", "leave", "kill"]),
        st.integers(0, 1 << 16),
    ),
    max_size=40,
)


@settings(max_examples=examples(100))
@given(STEPS)
def test_every_client_is_served_once_by_a_process_that_had_the_fewest(steps: list[tuple[str, int]]) -> None:
    async def run() -> None:
        fleet = Fleet.open(3)
        try:
            for step, number in steps:
                await take(fleet, step, number)
                await check(fleet)
            for process in fleet.processes:  # nobody is forgotten, whatever came before
                if process.is_frozen:
                    await lose(fleet, process, process.kill)
                if not process.takes:
                    await process.start()
            await until(lambda: fleet.served() == sorted(fleet.clients))
        finally:
            await fleet.close()

    asyncio.run(run())


async def take(fleet: Fleet, step: str, number: int) -> None:
    process = fleet.processes[number % 3]
    if step == "connect":
        before = {each: each.member.num_open for each in fleet.taking()}
        fleet.connect()
        if before:
            await until(lambda: any(each.member.num_open > before[each] for each in before))
            (chosen,) = [each for each in before if each.member.num_open > before[each]]
            assert before[chosen] == min(before.values())
    elif step == "close":
        owners = [(each, served) for each in fleet.taking() if not each.is_frozen for served in each.open]
        if owners:
            owner, served = owners[number % len(owners)]
            assert served.client is not None
            fleet.clients.pop(served.client).close()
            await until(lambda: served not in owner.open)
            await owner.tell()
    elif step == "start" and not process.takes:
        await process.start()
    elif step == "freeze" and process.takes and not process.is_frozen:
        process.freeze()
    elif step == "leave" and process.takes and not process.is_frozen:
        await lose(fleet, process, process.leave)
    elif step == "kill" and process.takes:
        await lose(fleet, process, process.kill)


async def lose(fleet: Fleet, process: Process, end: Callable[[], object]) -> None:
    """Only those that it has taken go with it."""
    for client in process.clients():
        fleet.clients.pop(client).close()
    result = end()
    assert asyncio.iscoroutine(result)
    await result


async def check(fleet: Fleet) -> None:
    """All are served, but those that wait in the channel of a frozen process, or for any process at all."""
    frozen = [each for each in fleet.taking() if each.is_frozen]
    if not fleet.taking():
        assert fleet.served() == []
        return
    num_waiting = sum(each.member.num_open - len(each.open) for each in frozen)
    await until(lambda: len(fleet.served()) == len(fleet.clients) - num_waiting)
    assert set(fleet.served()) <= set(fleet.clients)
