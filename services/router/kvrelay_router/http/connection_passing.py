"""One port, several processes: connections are taken by the process that owns the port, and each is handed to the
process that has the fewest.

A channel is a pair of Unix sockets. Down it a connection goes as one byte with its descriptor (SCM_RIGHTS, unix(7));
up it a process says that it takes connections, how many have ended, and that it leaves. The owner keeps both ends: what
a process that died or left has not taken out of its channel is taken back, and handed to another one. While no process
takes connections they wait in the listening socket's queue.
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

CONNECTION, TAKES, ENDED, LEAVES = b"c", b"+", b".", b"-"
AT_ONCE = 64
"""Connections that are taken before the event loop comes round."""
FULL_RETRY_S = 0.02
"""After every channel was full."""
ACCEPT_RETRY_S = 0.5
"""After accepting failed, for want of descriptors or memory."""


class Member:
    """A process as the owner of the port sees it; what it says of its start is a `ReadyCheck`."""

    def __init__(self, on_change: Callable[[Member], None]) -> None:
        self._on_change = on_change
        self._ours, self._theirs = socket.socketpair()
        for end in (self._ours, self._theirs):
            end.setblocking(False)
        self.takes = False
        self._was_ready = False
        self.num_open = 0
        """Connections that were handed to it and have not ended, as far as it said."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._ours.fileno(), self._hear)

    @property
    def descriptor(self) -> int:
        """Of the end that the process inherits, the same for all its starts."""
        return self._theirs.fileno()

    def restarted(self) -> None:
        """See `ReadyCheck`. `died` has been called."""
        self._was_ready = False

    async def is_ready(self) -> bool:
        """See `ReadyCheck`. Still so where it has left, or died, before this is asked: its start did not fail."""
        return self._was_ready

    def hand(self, connection: socket.socket) -> bool:
        """False where the channel is full. The caller's descriptor stays open."""
        try:
            socket.send_fds(self._ours, [CONNECTION], [connection.fileno()])
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM):
                return False
            raise
        self.num_open += 1
        return True

    def take_back(self) -> list[socket.socket]:
        """What the process has not taken out of its channel, and will not."""
        found = []
        while (taken := _receive(self._theirs)) is not None:
            found += taken
        return found

    def died(self) -> None:
        """The process has ended, so all its connections have, but for those that it has not taken."""
        self._hear()  # its last words are not the next start's
        self.takes = False
        self._on_change(self)
        self.num_open = 0

    def close(self) -> None:
        """Closes both ends."""
        self._loop.remove_reader(self._ours.fileno())
        self._ours.close()
        self._theirs.close()

    def _hear(self) -> None:
        try:
            said = self._ours.recv(65536)
        except BlockingIOError:
            return
        self.num_open -= said.count(ENDED)
        if TAKES in said:
            self._was_ready = True
        if TAKES in said or LEAVES in said:
            self.takes = said.rfind(TAKES) > said.rfind(LEAVES)
            self._on_change(self)


class SharedPort:
    """The listening socket, and those among whom its connections are shared."""

    def __init__(self, listener: socket.socket, num_members: int) -> None:
        self.port: int = listener.getsockname()[1]
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._members = [Member(self._changed) for _ in range(num_members)]
        self._turn = deque(self._members)  # of those that have equally many the one whose last is longest ago
        self._waiting: deque[socket.socket] = deque()  # taken, and handed to nobody yet
        self._retry: asyncio.TimerHandle | None = None

    @property
    def members(self) -> Sequence[Member]:
        """As many as were asked for."""
        return self._members

    def stop_listening(self) -> None:
        """Hands over all that wait, and closes the port. Idempotent."""
        if self._listener.fileno() < 0:
            return
        self._pause()
        with contextlib.suppress(OSError):  # nothing waits any more, or nothing more can be taken
            while True:
                self._waiting.append(self._listener.accept()[0])
        self._listener.close()
        self._go_on()

    def close(self) -> None:
        """Once the processes have ended; what none of them took is closed."""
        self.stop_listening()
        self._pause()
        for connection in self._waiting:
            connection.close()
        for member in self._members:
            member.close()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _changed(self, member: Member) -> None:
        if not member.takes:
            back = member.take_back()
            member.num_open -= len(back)
            self._waiting.extend(back)
        self._go_on()

    def _go_on(self) -> None:
        """Hands over what waits, and listens if there is somebody to hand connections to."""
        self._pause()
        if not any(member.takes for member in self._members):
            return
        while self._waiting:
            if not self._hand(self._waiting[0]):
                self._retry = self._loop.call_later(FULL_RETRY_S, self._go_on)
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
        """Takes connections and hands them over."""
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
                self._retry = self._loop.call_later(ACCEPT_RETRY_S, self._go_on)
                return
            if not self._hand(connection):
                self._waiting.append(connection)
                self._go_on()
                return
            connection.close()

    def _hand(self, connection: socket.socket) -> bool:
        for member in sorted(self._turn, key=lambda member: member.num_open):
            if member.takes and member.hand(connection):
                self._turn.remove(member)
                self._turn.append(member)
                return True
        return False


class PassedConnections:
    """The other end of a channel: the connections that are handed to this process."""

    def __init__(self, channel: socket.socket, port: int) -> None:
        self.port = port
        self._channel = channel
        self._make_protocol: Callable[[], asyncio.Protocol] | None = None
        self._starting: set[asyncio.Task[None]] = set()
        self._num_taken = 0
        self._num_ended = 0  # of which the owner was told

    def start(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        """From now on each that comes gets a protocol; none comes before `report_ready`."""
        self._make_protocol = make_protocol
        asyncio.get_running_loop().add_reader(self._channel.fileno(), self._take, AT_ONCE)

    def report_ready(self) -> None:
        """Asks for connections."""
        with contextlib.suppress(BrokenPipeError):
            self._channel.send(TAKES)

    def report_open(self, num_open: int) -> None:
        """Tells the owner how many have ended, where there are `num_open` protocols."""
        num_ended = self._num_taken - len(self._starting) - num_open
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # then with the next that end
            if num_ended > self._num_ended:
                self._num_ended += self._channel.send(ENDED * (num_ended - self._num_ended))

    async def leave(self) -> None:
        """Takes what waits in the channel, and asks for no more. Idempotent."""
        if self._make_protocol is None:
            return
        while self._take(AT_ONCE):
            pass
        self.stop()
        await asyncio.gather(*self._starting)
        with contextlib.suppress(BrokenPipeError):
            await asyncio.get_running_loop().sock_sendall(self._channel, LEAVES)

    def stop(self) -> None:
        """Takes no more, without a word."""
        if self._make_protocol is not None:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            self._make_protocol = None

    def _take(self, at_most: int) -> bool:
        """False where no more wait."""
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
    """The next connection; [] where there was no descriptor left for it; None where none waits.

    Raises EOFError where the owner has gone.
    """
    try:
        said, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    except BlockingIOError:
        return None
    if not said:
        raise EOFError
    if not descriptors:
        log.warning("a connection was lost: no file descriptor is left for it")
    return [socket.socket(fileno=each) for each in descriptors]
