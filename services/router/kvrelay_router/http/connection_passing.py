"""Serves one port from several processes: the owner of the port accepts each connection and passes it to the process
with the fewest connections.

A channel is a pair of Unix sockets. The owner sends a connection as one byte with its descriptor (SCM_RIGHTS, unix(7)).
The process reports that it accepts connections, how many have ended, and that it leaves. The owner keeps both ends of
the channel, so it can take back connections that a dead or leaving process has not received, and pass them to another
one. While no process accepts connections, they wait in the listening socket's queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)

CONNECTION, ACCEPTS, ENDED, LEAVES = b"c", b"+", b".", b"-"
AT_ONCE = 64
"""Maximum connections to accept in one callback of the event loop."""
FULL_RETRY_S = 0.02
"""Time until the next attempt if every channel is full."""
ACCEPT_RETRY_S = 0.5
"""Time until the next attempt if accepting failed for lack of descriptors or memory."""


class ServingProcess:
    """The owner's end of the channel to one process. Implements `ReadyCheck` with the reports of the process."""

    def __init__(self, on_change: Callable[[ServingProcess], None]) -> None:
        self._on_change = on_change
        self._ours, self._theirs = socket.socketpair()
        for end in (self._ours, self._theirs):
            end.setblocking(False)
        self.accepts = False
        self._was_ready = False
        self.num_open = 0
        """Connections that were passed to the process, less those that it reported as ended."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._ours.fileno(), self._read_reports)

    @property
    def descriptor(self) -> int:
        """File descriptor of the channel's end that the process inherits. A restart does not change it."""
        return self._theirs.fileno()

    def restarted(self) -> None:
        self._was_ready = False

    async def is_ready(self) -> bool:
        """True from the first report on, even if the process has left or died since: its start did not fail."""
        return self._was_ready

    def pass_on(self, connection: socket.socket) -> bool:
        """Returns False if the channel is full. The caller keeps its own descriptor and closes it."""
        try:
            socket.send_fds(self._ours, [CONNECTION], [connection.fileno()])
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM):
                return False
            raise
        self.num_open += 1
        return True

    def take_back(self) -> list[socket.socket]:
        """Returns the connections that the process has not received. Call it when the process no longer reads."""
        found = []
        while (taken := _receive(self._theirs)) is not None:
            found += taken
        return found

    def died(self) -> None:
        """The process has ended, and with it all connections that it had received."""
        self._read_reports()  # its last reports do not count for the next incarnation
        self.accepts = False
        self._on_change(self)
        self.num_open = 0

    def close(self) -> None:
        self._loop.remove_reader(self._ours.fileno())
        self._ours.close()
        self._theirs.close()

    def _read_reports(self) -> None:
        try:
            reports = self._ours.recv(65536)
        except BlockingIOError:
            return
        self.num_open -= reports.count(ENDED)
        if ACCEPTS in reports:
            self._was_ready = True
        if ACCEPTS in reports or LEAVES in reports:
            self.accepts = reports.rfind(ACCEPTS) > reports.rfind(LEAVES)
            self._on_change(self)


class SharedPort:
    """The listening socket, and the processes that share its connections."""

    def __init__(self, listener: socket.socket, num_members: int) -> None:
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._members = [ServingProcess(self._changed) for _ in range(num_members)]
        self._by_turn = deque(self._members)  # the process that waited longest for a connection comes first
        self._waiting: deque[socket.socket] = deque()  # accepted, and not passed on yet
        self._retry: asyncio.TimerHandle | None = None

    @property
    def members(self) -> Sequence[ServingProcess]:
        return self._members

    def stop_listening(self) -> None:
        """Accepts and passes on every connection that waits, and closes the port. Idempotent."""
        if self._listener.fileno() < 0:
            return
        self._pause()
        with contextlib.suppress(OSError):  # the queue is empty, or accepting fails
            while True:
                self._waiting.append(self._listener.accept()[0])
        self._listener.close()
        self._resume()

    def close(self) -> None:
        """Closes the connections that no process received. Call it after all processes have ended."""
        self.stop_listening()
        self._pause()
        for connection in self._waiting:
            connection.close()
        for member in self._members:
            member.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _changed(self, member: ServingProcess) -> None:
        if not member.accepts:
            back = member.take_back()
            member.num_open -= len(back)
            self._waiting.extend(back)
        self._resume()

    def _resume(self) -> None:
        """Passes on waiting connections, and accepts further ones if a process accepts them."""
        self._pause()
        if not any(member.accepts for member in self._members):
            return
        while self._waiting:
            if not self._pass_on(self._waiting[0]):
                self._retry = self._loop.call_later(FULL_RETRY_S, self._resume)
                return
            self._waiting.popleft().close()
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept, AT_ONCE)

    def _pause(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())

    def _accept(self, at_most: int) -> None:
        for _ in range(at_most):
            try:
                connection, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue  # the client has left
            except OSError as error:
                log.warning("cannot take a connection: %s", error)
                self._pause()
                self._retry = self._loop.call_later(ACCEPT_RETRY_S, self._resume)
                return
            if not self._pass_on(connection):
                self._waiting.append(connection)
                self._resume()
                return
            connection.close()

    def _pass_on(self, connection: socket.socket) -> bool:
        for member in sorted(self._by_turn, key=lambda member: member.num_open):
            if member.accepts and member.pass_on(connection):
                self._by_turn.remove(member)
                self._by_turn.append(member)
                return True
        return False


class PassedConnections:
    """The end of a channel in the process that receives connections."""

    def __init__(self, channel: socket.socket, port: int) -> None:
        self.port = port
        self._channel = channel
        self._make_protocol: Callable[[], asyncio.Protocol] | None = None
        self._starting: set[asyncio.Task[None]] = set()
        self._num_taken = 0
        self._num_ended = 0  # ended connections that were reported to the owner

    def start(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        """Gives each received connection a protocol. None arrives before `report_ready`."""
        self._make_protocol = make_protocol
        asyncio.get_running_loop().add_reader(self._channel.fileno(), self._take, AT_ONCE)

    def report_ready(self) -> None:
        """Reports to the owner that this process accepts connections."""
        with contextlib.suppress(BrokenPipeError):
            self._channel.send(ACCEPTS)

    def report_open(self, num_open: int) -> None:
        """Reports to the owner how many connections have ended if `num_open` protocols are left."""
        num_ended = self._num_taken - len(self._starting) - num_open
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # a full channel: reported with the next call
            if num_ended > self._num_ended:
                self._num_ended += self._channel.send(ENDED * (num_ended - self._num_ended))

    async def leave(self) -> None:
        """Receives all connections in the channel, and reports that this process accepts no more. Idempotent."""
        if self._make_protocol is None:
            return
        while self._take(AT_ONCE):
            pass
        self.stop()
        await asyncio.gather(*self._starting)
        with contextlib.suppress(BrokenPipeError):
            await asyncio.get_running_loop().sock_sendall(self._channel, LEAVES)

    def stop(self) -> None:
        """Stops receiving, without a report."""
        if self._make_protocol is not None:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._make_protocol = None

    def _take(self, at_most: int) -> bool:
        """Returns False if no more connections wait."""
        assert self._make_protocol is not None
        loop = asyncio.get_running_loop()
        for _ in range(at_most):
            try:
                taken = _receive(self._channel)
            except EOFError:
                self.stop()
                return False
            if taken is None:
                return False
            self._num_taken += 1
            for connection in taken:
                connection.setblocking(False)
                task = loop.create_task(_start(self._make_protocol, connection))
                self._starting.add(task)
                task.add_done_callback(self._starting.discard)
        return True


async def _start(make_protocol: Callable[[], asyncio.Protocol], connection: socket.socket) -> None:
    try:
        await asyncio.get_running_loop().connect_accepted_socket(make_protocol, connection)
    except OSError as error:
        log.debug("a connection ended before it was served: %s", error)
        connection.close()


def _receive(channel: socket.socket) -> list[socket.socket] | None:
    """Returns the next connection, [] if this process had no descriptor left for it, or None if none waits.

    Raises EOFError if the owner has closed the channel.
    """
    try:
        reports, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    except BlockingIOError:
        return None
    if not reports:
        raise EOFError
    if not descriptors:
        log.warning("a connection was lost: no file descriptor is left for it")
    return [socket.socket(fileno=each) for each in descriptors]
