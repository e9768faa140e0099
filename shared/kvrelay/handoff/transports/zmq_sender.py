"""The sending end over ZMQ: one PUSH socket per receiver, and one thread that owns them all.

`outbox` decides which piece is sent next and `sender_thread` runs the thread; this module has the sockets, the clock
and the copies. No call waits for a socket: ZMQ accepts every frame, and the outbox's window bounds how many it holds. A
receiver that refuses the connection fails the push.
ZMQ has finished with a frame's memory when it drops the last reference to the view that it was given. A weak reference
reports this and wakes the thread. Then the frame may still be in the kernel. So if a connection breaks, all its
reservations that have not ended fail: ZMQ would connect again by itself, without the frames that were on their way.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from dataclasses import dataclass, field

import zmq

from kvrelay.curve import CurveKeys, KeysDiffer
from kvrelay.handoff.transports.base import MalformedEndpoint, SenderEvent, Unreachable
from kvrelay.handoff.transports.outbox import FrameSizes, InFlightSend, Outbox, Piece, cut, frame_blocks
from kvrelay.handoff.transports.pool_memory import PoolChecksums, PoolLike, as_pool
from kvrelay.handoff.transports.sender_thread import QueuedPush, SenderThread
from kvrelay.handoff.transports.wire import Bytes
from kvrelay.handoff.transports.zmq_receiver import choose_address, machine_id
from kvrelay.messaging.zmq_context import ZmqContext, connect

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.05
"""How often connections are looked at while a reservation has not ended."""
RECONNECT_AT_MOST_MS = 1000
MAX_RECEIVERS = 2048
SOCKETS_A_RECEIVER = 3
"""A socket, and the two ends of its monitor."""
SPARE_SOCKETS = 64
"""Sockets besides one for each receiver: closed ones that libzmq has not released yet."""


@dataclass(frozen=True, slots=True)
class SenderSettings:
    """ZMQ holds up to `window` frames per receiver. A connection fails if an abort has not drained after
    `drain_timeout_s`, and is closed if it was not used for `idle_close_s`.
    """

    sizes: FrameSizes = field(default_factory=FrameSizes)
    window: int = 8
    drain_timeout_s: float = 5.0
    idle_close_s: float = 60.0
    max_receivers: int = MAX_RECEIVERS


class ZmqSender(SenderThread):
    """Pushes blocks out of `pool`, or of an array as `as_pool` takes it.

    A receiver that cannot be reached causes no event: the frames wait for it until `abort`. Bytes that the kernel took
    before that may still arrive; a receiver of this transport refuses them by itself. With `checksums`, each block goes
    with its own. Raises ValueError for a pool of another kind.
    """

    name = "zmq"

    def __init__(
        self,
        pool: PoolLike,
        *,
        settings: SenderSettings | None = None,
        checksums: PoolChecksums | None = None,
        curve: CurveKeys | None = None,
    ) -> None:
        self._settings = settings = settings or SenderSettings()
        memory = as_pool(pool)
        outbox = Outbox(
            memory.block_bytes,
            window=settings.window,
            drain_timeout_s=settings.drain_timeout_s,
            idle_close_s=settings.idle_close_s,
            is_acknowledged=False,
        )
        super().__init__("kv-sender", memory, outbox, checksums)
        self._curve = curve
        self._machine = machine_id()
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._breaks: dict[str, zmq.Socket[bytes]] = {}  # tell when the connection of an address breaks
        self._looks_at = 0.0
        self._views: dict[int, weakref.ref[Bytes]] = {}  # sends whose memory ZMQ holds
        self._completed: deque[int] = deque()
        self._spare_buffers: list[Bytes] = []  # free, for gathered pieces

    def _enter_thread(self) -> None:
        self._in_place = self._pool.view(0, 1) is not None
        self._context = ZmqContext(SOCKETS_A_RECEIVER * self._settings.max_receivers + SPARE_SOCKETS)
        self._poller = zmq.Poller()

    def _enqueue(self, push: QueuedPush) -> None:
        """Connects to the receiver first if there is no connection."""
        address = choose_address(push.endpoint, self._machine)
        self._socket_to(address)
        sizes = self._settings.sizes
        if push.part is not None and push.part.source.block_bytes != self._pool.block_bytes:
            raise MalformedEndpoint(f"blocks of {self._pool.block_bytes} bytes have no part {push.part.source}")
        pieces = cut(
            push.reservation, push.copies, self._pool.block_bytes, sizes, in_place=self._in_place, part=push.part
        )
        self.outbox.push(address, push.reservation, pieces)

    def _collect(self) -> list[SenderEvent]:
        """Returns the events of frames whose memory ZMQ has released, and of connections that broke."""
        events: list[SenderEvent] = []
        while self._completed:
            events += self._remove(self._completed.popleft())
        if time.monotonic() >= self._looks_at:
            self._looks_at = time.monotonic() + LOOK_EVERY_S
            broken = {socket for socket, _ in self._poller.poll(0)}
            for address in [address for address, socket in self._breaks.items() if socket in broken]:
                events += self._disconnect(address, "the connection broke")
        return events

    def _disconnect(self, address: str, cause: str) -> list[SenderEvent]:
        """The next push connects anew."""
        self._close_socket(address)
        events = self.outbox.fail_peer(address, f"{address}: {cause}", time.monotonic())
        self.counters.num_resets += 1
        level = logging.WARNING if events else logging.INFO
        log.log(level, "closed the connection to %s: %s, and %d handoffs fail", address, cause, len(events))
        return events

    def _patience_s(self) -> float | None:
        """Until a connection's time is over, or has to be looked at."""
        deadline = self.outbox.next_deadline()
        patience = None if deadline is None else max(0.0, deadline - time.monotonic())
        if any(map(self.outbox.has_reservations, self._sockets)):
            return LOOK_EVERY_S if patience is None else min(LOOK_EVERY_S, patience)
        return patience

    def _leave_thread(self) -> None:
        """Closes all sockets and waits until ZMQ has released every frame."""
        self._context.close()

    def _socket_to(self, address: str) -> zmq.Socket[bytes]:
        """Raises Unreachable, which concerns this receiver alone."""
        if address not in self._sockets:
            try:
                socket = self._context.socket(zmq.PUSH)
            except zmq.ZMQError as error:  # out of file descriptors, or too many receivers
                raise Unreachable(f"cannot open a socket to {address}: {error}") from error
            socket.set_hwm(0)  # the outbox's window is the bound; ZMQ's own would count messages it has sent already
            socket.setsockopt(zmq.IPV6, "[" in address)
            socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_AT_MOST_MS)
            try:
                breaks = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            except zmq.ZMQError as error:
                self._context.close_socket(socket)
                raise Unreachable(f"cannot open a socket to {address}: {error}") from error
            self._context.adopt(breaks)
            self._poller.register(breaks, zmq.POLLIN)
            self._sockets[address], self._breaks[address] = socket, breaks
            try:
                connect(socket, address, self._curve)
            except KeysDiffer as error:
                self._close_socket(address)
                raise Unreachable(f"{address}: {error}") from error
            except zmq.ZMQError as error:
                self._close_socket(address)
                raise MalformedEndpoint(f"cannot connect to {address}: {error}") from error
        return self._sockets[address]

    def _close_socket(self, address: str) -> None:
        """Does nothing if there is none."""
        socket = self._sockets.pop(address, None)
        if socket is None:
            return
        breaks = self._breaks.pop(address)
        self._poller.unregister(breaks)
        socket.disable_monitor()
        self._context.close_socket(breaks)
        self._context.close_socket(socket)

    def _send(self, in_flight: InFlightSend) -> list[SenderEvent]:
        """Gives a frame to ZMQ, which accepts every one unless the receiver refused the connection. Blocks that are not
        neighbours are gathered first."""
        try:
            socket = self._socket_to(in_flight.peer)
        except Unreachable as error:
            return self.outbox.fail(in_flight.number, str(error), time.monotonic())
        piece = in_flight.piece
        events: list[SenderEvent] = []
        if not piece.direct:
            piece.staging = self._gather(piece)
            events = [self.outbox.pushed(piece)]
        # A view that only ZMQ will hold: its end says that the memory is no longer read.
        view = self._view_of(piece)
        self._views[in_flight.number] = weakref.ref(view, lambda _: self._note_completed(in_flight.number))
        try:
            socket.send(self._header_of(piece), zmq.SNDMORE | zmq.NOBLOCK)
            socket.send(zmq.Frame(view, copy=False), zmq.NOBLOCK)
        except zmq.Again:
            return events + self._refused(in_flight)
        self._count(piece)
        return events

    def _refused(self, in_flight: InFlightSend) -> list[SenderEvent]:
        """Libzmq ends the queue of a socket whose handshake fails, for another key or another protocol. A send that
        blocks would never return, and the thread would not end. The next push connects anew."""
        del self._views[in_flight.number]  # nothing of this frame is queued, so its end says nothing
        self._close_socket(in_flight.peer)
        cause = f"{in_flight.peer} refuses the connection: it has another key, or is no receiver"
        return self.outbox.fail(in_flight.number, cause, time.monotonic())

    def _gather(self, piece: Piece) -> Bytes:
        if self._spare_buffers:
            buffer = self._spare_buffers.pop()
        else:
            buffer = self._pool.buffer(frame_blocks(self._pool.block_bytes, self._settings.sizes))
        # `push` has checked the sources.
        if piece.part is None:
            self._pool.gather(piece.copies.sources, buffer)
        else:
            self._pool.gather(piece.copies.sources, _rows_in(buffer, piece), piece.part.source)
        return buffer

    def _view_of(self, piece: Piece) -> Bytes:
        if piece.staging is not None:
            return piece.staging[: len(piece.copies)] if piece.part is None else _rows_in(piece.staging, piece)
        view = self._pool.view(int(piece.copies.sources[0]), len(piece.copies))
        if view is None:
            raise RuntimeError("a piece without staging, of a pool that cannot be read in place")
        return view

    def _note_completed(self, number: int) -> None:
        """On whatever thread dropped the last reference."""
        self._completed.append(number)
        self._wake()

    def _remove(self, number: int) -> list[SenderEvent]:
        del self._views[number]
        piece, events = self.outbox.complete(number, time.monotonic())
        if piece.staging is not None and len(self._spare_buffers) < self._settings.window:
            self._spare_buffers.append(piece.staging)
        return events

    def _expire(self) -> list[SenderEvent]:
        """Closes what the outbox says."""
        closing = self.outbox.expire(time.monotonic())
        for address in closing.idle:
            self._close_socket(address)
        events = [self._disconnect(address, "aborted frames were not taken in time") for address in closing.overdue]
        return [event for some in events for event in some]


def _rows_in(buffer: Bytes, piece: Piece) -> Bytes:
    """The first rows of a buffer for whole blocks, if a row has only the piece's part of a block."""
    assert piece.part is not None
    num_blocks, num_bytes = len(piece.copies), piece.part.source.size
    return buffer.reshape(-1)[: num_blocks * num_bytes].reshape(num_blocks, num_bytes)
