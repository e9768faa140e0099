"""Sockets and the clock around `kvrelay.protocol.link`: one PULL inbox, one PUSH socket per peer address.

Sends never block: ZMQ queues without bound, and a peer that stays silent is reported lost, which closes its socket and
with it the queue.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable

import zmq

from kvrelay.curve import OVERHEAD_BYTES, CurveKey
from kvrelay.protocol.codec import MAX_FRAME_BYTES
from kvrelay.protocol.link import LinkEvent, Links, LinkSettings, PeerLost
from kvrelay.protocol.messages import AnyBody, PeerRef

log = logging.getLogger(__name__)

EVENTS, NOBLOCK, POLLIN, SNDMORE = int(zmq.EVENTS), int(zmq.NOBLOCK), int(zmq.POLLIN), int(zmq.SNDMORE)
"""Plain integers: pyzmq takes them several times as fast as its enumerations."""
TICK_S = 0.05
MAX_MESSAGES_PER_WAKEUP = 256
OUTBOX_LINGER_MS = 200
"""How long the last messages to a peer that we are done with (a refusal, mostly) may take to leave."""


def new_incarnation() -> str:
    """A name for this start of a process: sorts by start time, and is unique."""
    return f"{time.time_ns():016x}{secrets.token_hex(4)}"


def _tcp(host: str) -> str:
    """An address without its port; ZMQ wants IPv6 in brackets."""
    return f"tcp://[{host}]" if ":" in host else f"tcp://{host}"


def _receive(inbox: zmq.Socket[bytes]) -> list[bytes]:
    """The frames of the next message, without a question to the socket after each. Raises zmq.Again."""
    frame = inbox.recv(NOBLOCK, copy=False)
    frames = [frame.bytes]
    while frame.more:
        frame = inbox.recv(NOBLOCK, copy=False)
        frames.append(frame.bytes)
    return frames


def _send(outbox: zmq.Socket[bytes], frames: list[bytes]) -> None:
    """The frames of a message, by the methods below those that look at flags and frames first. Raises zmq.Again."""
    *before, last = frames
    for frame in before:
        zmq.backend.Socket.send(outbox, frame, SNDMORE | NOBLOCK)
    zmq.backend.Socket.send(outbox, last, NOBLOCK)


class Messenger:
    """Control messages of one process. All methods and the callback run on one event loop's thread."""

    def __init__(
        self,
        peer_id: str,
        on_event: Callable[[LinkEvent], None],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise_host: str | None = None,
        fingerprint: str = "",
        settings: LinkSettings | None = None,
        curve: CurveKey | None = None,
    ) -> None:
        self._context = zmq.Context()
        self._curve = curve
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._inbox.linger = 0
        self._inbox.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + OVERHEAD_BYTES)
        self._inbox.setsockopt(zmq.IPV6, int(":" in host))
        if curve is not None:
            curve.open_gate(self._context)
            curve.guard_server(self._inbox)
        try:
            if port:
                self._inbox.bind(f"{_tcp(host)}:{port}")
            else:
                port = self._inbox.bind_to_random_port(_tcp(host))
        except zmq.ZMQError:
            self._inbox.close(linger=0)
            self._context.term()
            raise
        self.me = PeerRef(peer_id, new_incarnation(), f"{_tcp(advertise_host or host)}:{port}")
        self._inbox_fd = int(self._inbox.getsockopt(zmq.FD))
        self._links = Links(self.me, fingerprint, settings)
        self._on_event = on_event
        self._outboxes: dict[str, zmq.Socket[bytes]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._flush_due = False
        self._drain_due = False
        self._is_closed = False

    def start(self) -> None:
        """Begins to receive. To be called on the event loop's thread."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._inbox_fd, self._drain_inbox)
        self._on_tick()
        self._drain_soon()  # the descriptor is edge-triggered: what came before counts too

    def send(
        self,
        peer: PeerRef,
        body: AnyBody,
        *,
        request: str = "",
        attempt: int = 0,
        sequence: int = 0,
        trace: str = "",
    ) -> None:
        """Sends reliably, or reports the peer lost. Raises MessageTooLarge. After `close` it does nothing."""
        if self._is_closed:
            return
        self._links.send(peer, body, time.monotonic(), request=request, attempt=attempt, sequence=sequence, trace=trace)
        if self._loop is None:
            return  # `start` sends it
        self._send_out()
        if self._links.has_events:
            self._flush_soon()

    @property
    def num_unacked(self) -> int:
        """Messages that no peer has acknowledged yet."""
        return self._links.num_unacked

    @property
    def alive_interval_s(self) -> float:
        """Time between life signs."""
        return self._links.settings.alive_interval_s

    def silent_s(self, peer: PeerRef) -> float:
        """Seconds since this start of a peer was heard, life signs included; infinite without a link to it."""
        return self._links.silent_s(peer, time.monotonic())

    def close(self, linger_s: float = 0.2) -> None:
        """Closes all sockets; what was sent gets `linger_s` to leave, for which this blocks. May be called twice."""
        if self._is_closed:
            return
        self._send_out()
        self._is_closed = True
        if self._tick is not None:
            self._tick.cancel()
        if self._loop is not None:
            self._loop.remove_reader(self._inbox_fd)
        self._inbox.close(linger=0)
        for outbox in self._outboxes.values():
            outbox.close(linger=int(linger_s * 1000))
        self._outboxes.clear()
        self._context.term()

    def _on_tick(self) -> None:
        if self._is_closed:
            return
        assert self._loop is not None
        self._tick = self._loop.call_later(TICK_S, self._on_tick)
        self._links.tick(time.monotonic())
        self._flush()
        self._forget_addresses()

    def _drain_inbox(self) -> None:
        self._drain_due = False
        if self._is_closed:
            return
        now = time.monotonic()
        for _ in range(MAX_MESSAGES_PER_WAKEUP):
            try:
                frames = _receive(self._inbox)
            except zmq.Again:
                break
            self._links.receive(frames, now)
            if not int(self._inbox.getsockopt(EVENTS)) & POLLIN:
                break  # at a quarter of what the exception costs
        else:
            self._drain_soon()  # the descriptor is edge-triggered: nobody else says that there is more
        self._flush()

    def _drain_soon(self) -> None:
        if not self._drain_due and self._loop is not None:
            self._drain_due = True
            self._loop.call_soon(self._drain_inbox)

    def _flush_soon(self) -> None:
        if not self._flush_due and self._loop is not None:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Sends, hands out events, and sends what they brought. Events that they brought wait for the next turn of the
        event loop, so that a callback which answers each event with the next one stops nobody else."""
        self._flush_due = False
        self._send_out()
        events = self._links.take_events()
        if PeerLost in map(type, events):
            self._forget_addresses()  # before a callback sends there again, which would keep the old queue
        for event in events:
            if self._is_closed:
                return
            try:
                self._on_event(event)
            except Exception:
                log.exception("handling %s failed", type(event).__name__)
        self._send_out()
        if self._links.has_events:
            self._flush_soon()

    def _send_out(self) -> None:
        if not self._is_closed:
            for address, frames in self._links.take_outgoing():
                self._transmit(address, frames)

    def _transmit(self, address: str, frames: list[bytes]) -> None:
        outbox = self._outboxes.get(address)
        if outbox is None:
            outbox = self._context.socket(zmq.PUSH)
            outbox.set_hwm(0)
            outbox.linger = 0
            outbox.setsockopt(zmq.IPV6, int("[" in address))
            outbox.setsockopt(zmq.RECONNECT_IVL, 50)
            outbox.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            if self._curve is not None:
                self._curve.guard_client(outbox)
            try:
                outbox.connect(address)
            except zmq.ZMQError as error:
                log.warning("cannot send to %s: %s", address, error)
                outbox.close()
                return
            self._outboxes[address] = outbox
        try:
            _send(outbox, frames)
        except zmq.Again:
            log.warning("no room to send to %s; the link will repeat it", address)

    def _forget_addresses(self) -> None:
        """Closes sockets to addresses where no peer of ours is (any more), and with them what is queued there."""
        for address in set(self._outboxes) - self._links.addresses():
            self._outboxes.pop(address).close(linger=OUTBOX_LINGER_MS)
