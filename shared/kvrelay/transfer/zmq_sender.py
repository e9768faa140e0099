"""The sending end over ZMQ: one PUSH socket per receiver, and one thread that owns them all.

What is to be sent, and in which order, stands in `outbox`; here are the sockets, the clock, and the copies. The thread
waits on one queue only. It never waits for a socket: ZMQ takes every frame, and the outbox's window bounds how many it
holds. ZMQ is done with a frame's memory when it drops the last reference to the view it was given, which a weak
reference reports into the same queue; nothing is polled.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread

import numpy as np
import zmq

from kvrelay.transfer.base import BlockCopy, SenderEvent, TransferFailed
from kvrelay.transfer.counters import SenderCounters
from kvrelay.transfer.endpoints import Endpoint, MalformedEndpoint, choose_address, machine_id
from kvrelay.transfer.loop_port import LoopPort
from kvrelay.transfer.outbox import Loan, Outbox
from kvrelay.transfer.plan import Copies, FrameSizes, Piece, cut, frame_blocks
from kvrelay.transfer.wire import Bytes, checksum_of, encode_header

log = logging.getLogger(__name__)

RECONNECT_AT_MOST_MS = 1000


@dataclass(frozen=True, slots=True)
class SenderSettings:
    """`window` frames per receiver may be with ZMQ at once. An abort that has not drained after `drain_timeout_s`
    closes the connection; one that nobody used for `idle_close_s` is closed too. `checksum` adds a CRC-32 per frame,
    which costs about as much as another copy.
    """

    sizes: FrameSizes = field(default_factory=FrameSizes)
    window: int = 8
    drain_timeout_s: float = 2.0
    idle_close_s: float = 60.0
    checksum: bool = False


@dataclass(frozen=True, slots=True)
class _Push:
    reservation: str
    endpoint: Endpoint
    copies: Copies


@dataclass(frozen=True, slots=True)
class _Abort:
    reservation: str


@dataclass(frozen=True, slots=True)
class _GaveBack:
    loan: int


@dataclass(frozen=True, slots=True)
class _Close:
    pass


_Command = _Push | _Abort | _GaveBack | _Close


class ZmqSender:
    """Pushes blocks out of `pool_bytes`, uint8 of shape [num_blocks, block_bytes], C-contiguous.

    Raises ValueError for a pool of another kind.
    """

    name = "zmq"

    def __init__(self, pool_bytes: Bytes, *, settings: SenderSettings | None = None) -> None:
        if pool_bytes.ndim != 2 or not pool_bytes.flags.c_contiguous:
            raise ValueError("a pool is a C-contiguous array of shape [num_blocks, block_bytes]")
        self._settings = settings or SenderSettings()
        self._pool = pool_bytes
        self.counters = SenderCounters()
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._machine = machine_id()
        self._thread: Thread | None = None

    def start(self, on_event: Callable[[SenderEvent], None]) -> None:
        """Must be called once, on the event loop's thread, which then gets the events."""
        port = LoopPort(on_event)
        self._thread = Thread(target=self._run, args=(port,), name="kv-sender", daemon=True)
        self._thread.start()

    def push(self, reservation: str, endpoint: Endpoint, copies: Sequence[BlockCopy]) -> None:
        """Queues a push; a `Pushed` for each frame, or `TransferFailed` for an endpoint that makes no sense.

        The caller keeps the source blocks until `Pushed`. A receiver that cannot be reached causes no event: the frames
        wait for it until `abort`. Raises ValueError for a source outside the pool. No copies, no event.
        """
        if copies:
            self._commands.put(_Push(reservation, dict(endpoint), Copies.of(copies, len(self._pool))))

    def abort(self, reservation: str) -> None:
        """Drops what is queued; `SenderDrained` follows, always, also for an unknown reservation.

        Bytes that the kernel took already may still arrive; a receiver of this transport refuses them by itself.
        """
        self._commands.put(_Abort(reservation))

    def close(self) -> None:
        """Stops the thread and closes the sockets; the pool is not read after this returns. Idempotent."""
        if self._thread is not None:
            self._commands.put(_Close())
            self._thread.join()

    def _run(self, port: LoopPort[SenderEvent]) -> None:
        courier = _Courier(self._pool, self._settings, self._commands, self.counters, self._machine)
        try:
            courier.run(port.emit)
        except Exception as error:
            port.report_crash("kv-sender", error)
        finally:
            courier.close()


class _Courier:
    """What the sender's thread has: the outbox, the sockets by address, and staging buffers to gather into."""

    def __init__(
        self,
        pool: Bytes,
        settings: SenderSettings,
        commands: SimpleQueue[_Command],
        counters: SenderCounters,
        machine: str | None,
    ) -> None:
        self._pool = pool
        self._block_bytes = pool.shape[1]
        self._settings = settings
        self._commands = commands
        self._counters = counters
        self._machine = machine
        self._outbox = Outbox(
            self._block_bytes,
            window=settings.window,
            drain_timeout_s=settings.drain_timeout_s,
            idle_close_s=settings.idle_close_s,
        )
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._views: dict[int, weakref.ref[Bytes]] = {}
        self._spare_buffers: list[Bytes] = []

    def run(self, emit: Callable[[SenderEvent], None]) -> None:
        """Works until told to close. Between two frames it obeys what was asked meanwhile."""
        may_wait = True
        while True:
            for command in self._take_commands(may_wait):
                if isinstance(command, _Close):
                    return
                for event in self._obey(command):
                    emit(event)
            self._close_connections()
            loan = self._outbox.lend()
            may_wait = loan is None
            if loan is not None:
                for event in self._send(loan):
                    emit(event)

    def close(self) -> None:
        """Closes all sockets and waits until ZMQ let go of every frame."""
        for socket in self._sockets.values():
            socket.close(linger=0)
        self._context.term()

    def _take_commands(self, may_wait: bool) -> list[_Command]:
        """What is there now, and no more, so that a steady flow of commands holds up no frame."""
        commands: list[_Command] = []
        if may_wait:
            deadline = self._outbox.next_deadline()
            timeout_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            with suppress(Empty):
                commands.append(self._commands.get(timeout=timeout_s))
        commands += [self._commands.get_nowait() for _ in range(self._commands.qsize())]
        return commands

    def _obey(self, command: _Push | _Abort | _GaveBack) -> list[SenderEvent]:
        match command:
            case _Push():
                return self._queue(command)
            case _Abort(reservation):
                return self._outbox.abort(reservation, time.monotonic())
            case _GaveBack(loan):
                return self._take_back(loan)

    def _queue(self, push: _Push) -> list[SenderEvent]:
        if self._outbox.is_aborting(push.reservation):
            return [TransferFailed(push.reservation, "the reservation is being aborted")]
        try:
            address = choose_address(push.endpoint, self._machine)
            self._socket_to(address)
        except MalformedEndpoint as error:
            return [TransferFailed(push.reservation, str(error))]
        self._outbox.push(address, cut(push.reservation, push.copies, self._block_bytes, self._settings.sizes))
        return []

    def _socket_to(self, address: str) -> zmq.Socket[bytes]:
        if address not in self._sockets:
            socket = self._context.socket(zmq.PUSH)
            socket.linger = 0
            socket.set_hwm(0)  # the outbox's window is the bound; ZMQ's own would count messages it has sent already
            socket.setsockopt(zmq.IPV6, "[" in address)
            socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_AT_MOST_MS)
            try:
                socket.connect(address)
            except zmq.ZMQError as error:
                socket.close()
                raise MalformedEndpoint(f"cannot connect to {address}: {error}") from error
            self._sockets[address] = socket
        return self._sockets[address]

    def _send(self, loan: Loan) -> list[SenderEvent]:
        piece = loan.piece
        events: list[SenderEvent] = []
        if not piece.direct and piece.staging is None:
            piece.staging = self._gather(piece)
            events = [self._outbox.pushed(piece)]
        # A view that only ZMQ will hold: its end says that the memory is no longer read.
        view = self._view_of(piece)
        self._views[loan.number] = weakref.ref(view, lambda _: self._commands.put(_GaveBack(loan.number)))
        checksum = checksum_of(view.data) if self._settings.checksum else None
        copies = piece.copies
        header = encode_header(piece.reservation, self._block_bytes, copies.indices, copies.slots, checksum)
        socket = self._socket_to(loan.peer)
        socket.send(header, zmq.SNDMORE)
        socket.send(zmq.Frame(view, copy=False))
        self._counters.num_messages += 1
        self._counters.num_blocks += len(copies)
        self._counters.num_bytes += view.nbytes
        self._counters.num_direct_bytes += view.nbytes if piece.direct else 0
        return events

    def _gather(self, piece: Piece) -> Bytes:
        began = time.perf_counter()
        if self._spare_buffers:
            buffer = self._spare_buffers.pop()
        else:
            buffer = np.empty((frame_blocks(self._block_bytes, self._settings.sizes), self._block_bytes), np.uint8)
        # mode="clip" writes straight into `out`; "raise" would copy once more. The sources were checked in `push`.
        np.take(self._pool, piece.copies.sources, axis=0, out=buffer[: len(piece.copies)], mode="clip")
        self._counters.gather_s += time.perf_counter() - began
        return buffer

    def _view_of(self, piece: Piece) -> Bytes:
        if piece.staging is not None:
            return piece.staging[: len(piece.copies)]
        first = int(piece.copies.sources[0])
        return self._pool[first : first + len(piece.copies)]

    def _take_back(self, number: int) -> list[SenderEvent]:
        del self._views[number]
        returned = self._outbox.give_back(number, time.monotonic())
        staging = returned.piece.staging
        if staging is not None and not returned.queued_again and len(self._spare_buffers) < self._settings.window:
            self._spare_buffers.append(staging)
        return returned.events

    def _close_connections(self) -> None:
        closing = self._outbox.expire(time.monotonic())
        for address in closing.reset + closing.idle:
            socket = self._sockets.pop(address, None)  # None: a reset closed it, and nothing was sent there since
            if socket is not None:
                socket.close(linger=0)
        self._counters.num_resets += len(closing.reset)
        for address in closing.reset:
            log.warning("closed the connection to %s: aborted frames were not taken in time", address)
