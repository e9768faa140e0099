"""A network between processes on one machine that can be cut, stalled and healed pair by pair.

Every process listens on a loopback address of its own and is told to others by another one, where a proxy listens. Who
connects is seen from the owner of the connection's socket, so the way from A to B can be disturbed while the way from C
to B is not. A connection to a process carries its incoming messages alone (PUSH to PULL), so one way of a pair is one
connection.

1. OPEN     bytes go through.
2. STALLED  connections stay, nothing arrives: packets are lost. What was sent meanwhile arrives when it is healed.
3. CUT      connections are reset, and new ones too.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from enum import Enum
from pathlib import Path

CHUNK_BYTES = 1 << 18
NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, NLMSG_ERROR = 4, 20, 1, 2
NETLINK_HEADER = struct.Struct("=IHHII")
ALL_STATES = 0xFFFFFFFF
INODE_OFFSET = 68  # in inet_diag_msg

Address = tuple[str, int]


class Way(Enum):
    OPEN = "open"
    STALLED = "stalled"
    CUT = "cut"


class Network:
    """`join` gives each process its addresses; `pids` are kept by whoever starts the processes."""

    def __init__(self) -> None:
        self.pids: dict[int, str] = {}
        self._second = _free_second_octet()
        self._num_joined = 0
        self._names: dict[str, tuple[str, str]] = {}
        self._ways: dict[tuple[str, str], Way] = {}
        self._changed = asyncio.Event()
        self._connections: dict[asyncio.Task[None], tuple[str, str]] = {}
        self._servers: list[asyncio.Server] = []

    def join(self, name: str) -> tuple[str, str]:
        """(address to listen on, address to be told to others)."""
        if name not in self._names:
            self._num_joined += 1
            self._names[name] = tuple(f"127.{self._second}.{side}.{self._num_joined}" for side in (1, 2))  # type: ignore[assignment]
        return self._names[name]

    async def open(self, name: str, port: int, behind: tuple[str, int] | None = None) -> None:
        """Proxies a port of this process; `behind` is where it listens if not there."""
        own, told = self.join(name)
        host, target = behind or (own, port)

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            ends = writer.get_extra_info("peername"), writer.get_extra_info("sockname")
            source = await asyncio.to_thread(self._owner_of, *ends)
            self._connections[task] = (source, name)
            try:
                await self._serve(source, name, reader, writer, host, target)
            except (OSError, asyncio.CancelledError):
                pass  # a connection that ends is what this is for
            finally:
                writer.transport.abort()
                del self._connections[task]

        self._servers.append(await asyncio.start_server(connected, told, port))

    def set(self, source: str, target: str, way: Way) -> None:
        """Changes one way. Cutting resets its connections at once."""
        self._ways[source, target] = way
        if way is Way.CUT:
            for task, pair in self._connections.items():
                if pair == (source, target):
                    task.cancel()
        self._changed.set()
        self._changed = asyncio.Event()

    def heal(self) -> None:
        for source, target in list(self._ways):
            self.set(source, target, Way.OPEN)

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    # -- inside -------------------------------------------------------------------------------------------------------

    async def _serve(
        self,
        source: str,
        name: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        host: str,
        port: int,
    ) -> None:
        await self._until_passable(source, name)
        upstream_reader, upstream = await asyncio.open_connection(host, port)
        try:
            pumps = [
                asyncio.ensure_future(self._pump(source, name, reader, upstream)),
                asyncio.ensure_future(self._pump(source, name, upstream_reader, writer)),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        finally:
            upstream.transport.abort()

    async def _pump(self, source: str, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            await self._until_passable(source, name)
            writer.write(data)
            await writer.drain()

    async def _until_passable(self, source: str, name: str) -> None:
        """Raises ConnectionResetError where the way is cut."""
        while (way := self._ways.get((source, name), Way.OPEN)) is not Way.OPEN:
            if way is Way.CUT:
                raise ConnectionResetError
            await self._changed.wait()

    def _owner_of(self, peer: Address, accepted_at: Address) -> str:
        """The process at the other end of an accepted connection, by the kernel's books of sockets."""
        inode = _inode_of(peer, accepted_at)
        for pid, name in list(self.pids.items()):
            if inode is not None and inode in _socket_inodes(pid):
                return name
        return ""


def _inode_of(address: Address, connected_to: Address) -> str | None:
    try:
        return _inode_by_question(address, connected_to)
    except OSError:
        return _inode_by_table(address)


def _inode_by_question(address: Address, connected_to: Address) -> str | None:
    """Asks for this very socket (sock_diag(7)), while the table of all takes tens of milliseconds where they are many.

    Raises OSError where that is not allowed, or not known to the system.
    """
    (host, port), (to_host, to_port) = address, connected_to
    addresses = socket.inet_aton(host).ljust(16, b"\0") + socket.inet_aton(to_host).ljust(16, b"\0")
    any_interface_and_cookie = bytes(4) + b"\xff" * 8
    socket_id = struct.pack(">HH", port, to_port) + addresses + any_interface_and_cookie
    wanted = struct.pack("=BBxxI", socket.AF_INET, socket.IPPROTO_TCP, ALL_STATES) + socket_id
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_SOCK_DIAG) as kernel:
        size = NETLINK_HEADER.size + len(wanted)
        kernel.send(NETLINK_HEADER.pack(size, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST, 1, 0) + wanted)
        answer = kernel.recv(4096)
    _, kind, *_ = NETLINK_HEADER.unpack_from(answer)
    if kind == NLMSG_ERROR:
        (error,) = struct.unpack_from("=i", answer, NETLINK_HEADER.size)
        if -error == errno.ENOENT:
            return None
        raise OSError(-error, "the kernel does not tell of sockets")
    return str(*struct.unpack_from("=I", answer, NETLINK_HEADER.size + INODE_OFFSET))


def _inode_by_table(address: Address) -> str | None:
    host, port = address
    wanted = f"{socket.inet_aton(host)[::-1].hex().upper()}:{port:04X}"
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1] == wanted:
            return fields[9]
    return None


def _socket_inodes(pid: int) -> Iterator[str]:
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                link = os.readlink(f"/proc/{pid}/fd/{descriptor}")
                if link.startswith("socket:["):
                    yield link[8:-1]


def _free_second_octet() -> int:
    """Of a /16 of the loopback that no other run uses: its first address is held as long as this process lives."""
    while True:
        octet = random.randint(16, 250)
        guard = socket.socket()
        try:
            guard.bind((f"127.{octet}.0.1", 20000))
        except OSError:
            guard.close()
            continue
        _guards.append(guard)
        return octet


_guards: list[socket.socket] = []
