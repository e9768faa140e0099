"""The sending end over ZMQ: one PUSH socket per receiver, and one thread that owns them all.

`outbox` decides which piece is sent next and `sender_thread` runs the thread; this module has the sockets, the clock
and the copies. No call waits for a socket: ZMQ accepts every frame, and the outbox's window bounds how many it holds. A
receiver that refuses the connection fails the push.
ZMQ has finished with a frame's memory when it drops the last reference to the view that it was given. A weak reference
reports this and wakes the thread, so nothing is polled."""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

from kvrelay.curve import CurveKey
from kvrelay.messaging.zmq_context import ZmqContext
from kvrelay.transfer.base import SenderEvent
from kvrelay.transfer.checksums import PoolChecksums
from kvrelay.transfer.counters import SenderCounters
from kvrelay.transfer.endpoints import MalformedEndpoint, Unreachable, choose_address, machine_id
from kvrelay.transfer.outbox import InFlightSend, Outbox
from kvrelay.transfer.pool_memory import PoolLike, PoolMemory, as_pool
from kvrelay.transfer.push_pieces import FrameSizes, Piece, cut, frame_blocks
from kvrelay.transfer.sender_thread import Push, SenderThread, TransportDriver
from kvrelay.transfer.wire import Bytes, Checksums, encode_header

log = logging.getLogger(__name__)

RECONNECT_AT_MOST_MS = 1000
MAX_RECEIVERS = 2048
SPARE_SOCKETS = 64
"""Sockets besides one for each receiver: closed ones that libzmq has not released yet."""


@dataclass(frozen=True, slots=True)
class SenderSettings:
    """ZMQ holds up to `window` frames per receiver. A connection is closed if an abort has not drained after
    `drain_timeout_s`, or if the connection was not used for `idle_close_s`.
    """

    sizes: FrameSizes = field(default_factory=FrameSizes)
    window: int = 8
    drain_timeout_s: float = 2.0
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
        curve: CurveKey | None = None,
    ) -> None:
        self._settings = settings or SenderSettings()
        self._pool = as_pool(pool)
        self._checksums = checksums
        self._curve = curve
        super().__init__("kv-sender", self._pool.num_blocks, self._driver)

    def _driver(self, wake: Callable[[], None]) -> TransportDriver:
        self._pool.enter_thread()
        return _ZmqDriver(self._pool, self._settings, self._checksums, self._curve, self.counters, wake)


class _ZmqDriver:
    """The sockets by address, the views that ZMQ holds, and staging buffers to gather into."""

    def __init__(
        self,
        pool: PoolMemory,
        settings: SenderSettings,
        checksums: PoolChecksums | None,
        curve: CurveKey | None,
        counters: SenderCounters,
        wake: Callable[[], None],
    ) -> None:
        self._pool = pool
        self._block_bytes = pool.block_bytes
        self._in_place = pool.view(0, 1) is not None
        self._settings = settings
        self._checksums = checksums
        self._curve = curve
        self._counters = counters
        self._wake = wake
        self._machine = machine_id()
        self.outbox = Outbox(
            self._block_bytes,
            window=settings.window,
            drain_timeout_s=settings.drain_timeout_s,
            idle_close_s=settings.idle_close_s,
        )
        self._context = ZmqContext(settings.max_receivers + SPARE_SOCKETS)
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._views: dict[int, weakref.ref[Bytes]] = {}
        self._completed: deque[int] = deque()
        self._spare_buffers: list[Bytes] = []

    def enqueue(self, push: Push) -> None:
        """Connects to the receiver first if there is no connection."""
        address = choose_address(push.endpoint, self._machine)
        self._socket_to(address)
        sizes = self._settings.sizes
        if push.part is not None and push.part.source.block_bytes != self._block_bytes:
            raise MalformedEndpoint(f"blocks of {self._block_bytes} bytes have no part {push.part.source}")
        pieces = cut(push.reservation, push.copies, self._block_bytes, sizes, in_place=self._in_place, part=push.part)
        self.outbox.push(address, pieces)

    def collect(self) -> list[SenderEvent]:
        """Returns the events of frames whose memory ZMQ has released."""
        events: list[SenderEvent] = []
        while self._completed:
            events += self._remove(self._completed.popleft())
        return events

    def patience_s(self) -> float | None:
        """Until a connection's time is over."""
        deadline = self.outbox.next_deadline()
        return None if deadline is None else max(0.0, deadline - time.monotonic())

    def close(self) -> None:
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
            if self._curve is not None:
                self._curve.guard_client(socket)
            try:
                socket.connect(address)
            except zmq.ZMQError as error:
                self._context.close_socket(socket)
                raise MalformedEndpoint(f"cannot connect to {address}: {error}") from error
            self._sockets[address] = socket
        return self._sockets[address]

    def send(self, in_flight: InFlightSend) -> list[SenderEvent]:
        """Gives a frame to ZMQ, which accepts every one unless the receiver refused the connection. Blocks that are not
        neighbours are gathered first."""
        try:
            socket = self._socket_to(in_flight.peer)
        except Unreachable as error:
            return self.outbox.fail(in_flight.number, str(error), time.monotonic())
        piece = in_flight.piece
        events: list[SenderEvent] = []
        if not piece.direct and piece.staging is None:
            piece.staging = self._gather(piece)
            events = [self.outbox.pushed(piece)]
        # A view that only ZMQ will hold: its end says that the memory is no longer read.
        view = self._view_of(piece)
        self._views[in_flight.number] = weakref.ref(view, lambda _: self._note_completed(in_flight.number))
        copies = piece.copies
        checksums = self._checksums_of(piece)
        number = 0 if piece.part is None else piece.part.number
        block_bytes = piece.bytes_per_block(self._block_bytes)
        header = encode_header(piece.reservation, block_bytes, copies.indices, copies.slots, checksums, number)
        try:
            socket.send(header, zmq.SNDMORE | zmq.NOBLOCK)
            socket.send(zmq.Frame(view, copy=False), zmq.NOBLOCK)
        except zmq.Again:
            return events + self._refused(in_flight)
        self._counters.num_messages += 1
        self._counters.num_blocks += len(copies)
        self._counters.num_runs += copies.num_runs
        self._counters.num_bytes += view.nbytes
        return events

    def _refused(self, in_flight: InFlightSend) -> list[SenderEvent]:
        """Libzmq ends the queue of a socket whose handshake fails, for another key or another protocol. A send that
        blocks would never return, and the thread would not end. The next push connects anew."""
        del self._views[in_flight.number]  # nothing of this frame is queued, so its end says nothing
        self._context.close_socket(self._sockets.pop(in_flight.peer))
        cause = f"{in_flight.peer} refuses the connection: it has another key, or is no receiver"
        return self.outbox.fail(in_flight.number, cause, time.monotonic())

    def _checksums_of(self, piece: Piece) -> Checksums | None:
        """Kept with the piece: it may be sent again when its blocks are no longer held."""
        if self._checksums is not None and piece.checksums is None:
            part = None if piece.part is None else piece.part.source
            piece.checksums = self._checksums.of(piece.copies.sources, part)
        return piece.checksums

    def _gather(self, piece: Piece) -> Bytes:
        if self._spare_buffers:
            buffer = self._spare_buffers.pop()
        else:
            buffer = self._pool.buffer(frame_blocks(self._block_bytes, self._settings.sizes))
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
        returned = self.outbox.complete(number, time.monotonic())
        staging = returned.piece.staging
        if staging is not None and not returned.queued_again and len(self._spare_buffers) < self._settings.window:
            self._spare_buffers.append(staging)
        return returned.events

    def expire(self) -> None:
        """Closes what the outbox says."""
        closing = self.outbox.expire(time.monotonic())
        for address in closing.reset + closing.idle:
            socket = self._sockets.pop(address, None)  # None: a reset closed it, and nothing was sent there since
            if socket is not None:
                self._context.close_socket(socket)
        self._counters.num_resets += len(closing.reset)
        for address in closing.reset:
            log.warning("closed the connection to %s: aborted frames were not taken in time", address)


def _rows_in(buffer: Bytes, piece: Piece) -> Bytes:
    """The first rows of a buffer for whole blocks, if a row has only the piece's part of a block."""
    assert piece.part is not None
    num_blocks, num_bytes = len(piece.copies), piece.part.source.size
    return buffer.reshape(-1)[: num_blocks * num_bytes].reshape(num_blocks, num_bytes)
