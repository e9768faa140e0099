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

from kvrelay.protocol.link import LinkEvent, Links, LinkSettings
from kvrelay.protocol.messages import AnyBody, PeerRef

log = logging.getLogger(__name__)

TICK_S = 0.05
MAX_MESSAGES_PER_WAKEUP = 256


def new_incarnation() -> str:
    """A name for this start of a process: sorts by start time, and is unique."""
    return f"{time.time_ns():016x}{secrets.token_hex(4)}"


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
    ) -> None:
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._inbox.linger = 0
        if port:
            self._inbox.bind(f"tcp://{host}:{port}")
        else:
            port = self._inbox.bind_to_random_port(f"tcp://{host}")
        self.me = PeerRef(peer_id, new_incarnation(), f"tcp://{advertise_host or host}:{port}")
        self._inbox_fd = int(self._inbox.getsockopt(zmq.FD))
        self._links = Links(self.me, fingerprint, settings)
        self._on_event = on_event
        self._outboxes: dict[str, zmq.Socket[bytes]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._flush_due = False

    def start(self) -> None:
        """Begins to receive. To be called on the event loop's thread."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._inbox_fd, self._drain_inbox)
        self._on_tick()
        self._loop.call_soon(self._drain_inbox)  # the descriptor is edge-triggered: what came before start counts too

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
        """Sends reliably, or reports the peer lost."""
        self._links.send(
            peer, body, time.monotonic(), request=request, attempt=attempt, sequence=sequence, trace=trace
        )
        self._flush_soon()

    @property
    def num_unacked(self) -> int:
        """Messages that no peer has acknowledged yet."""
        return self._links.num_unacked

    def close(self, linger_s: float = 0.2) -> None:
        """Closes all sockets; what was sent gets `linger_s` to leave."""
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
        assert self._loop is not None
        self._links.tick(time.monotonic())
        self._flush()
        self._forget_addresses()
        self._tick = self._loop.call_later(TICK_S, self._on_tick)

    def _drain_inbox(self) -> None:
        assert self._loop is not None
        now = time.monotonic()
        for _ in range(MAX_MESSAGES_PER_WAKEUP):
            try:
                frames = self._inbox.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            except zmq.ZMQError:
                return
            self._links.receive(frames, now)
        else:
            self._loop.call_soon(self._drain_inbox)
        self._flush()

    def _flush_soon(self) -> None:
        if not self._flush_due and self._loop is not None:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Hands out events, then sends what they and others brought, until both are empty."""
        self._flush_due = False
        while True:
            for address, frames in self._links.take_outgoing():
                self._transmit(address, frames)
            events = self._links.take_events()
            if not events:
                return
            for event in events:
                try:
                    self._on_event(event)
                except Exception:
                    log.exception("handling %s failed", type(event).__name__)

    def _transmit(self, address: str, frames: list[bytes]) -> None:
        outbox = self._outboxes.get(address)
        if outbox is None:
            outbox = self._context.socket(zmq.PUSH)
            outbox.set_hwm(0)
            outbox.linger = 0
            outbox.setsockopt(zmq.RECONNECT_IVL, 50)
            outbox.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            try:
                outbox.connect(address)
            except zmq.ZMQError as error:
                log.warning("cannot send to %s: %s", address, error)
                outbox.close()
                return
            self._outboxes[address] = outbox
        try:
            outbox.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            log.warning("no room to send to %s; the link will repeat it", address)

    def _forget_addresses(self) -> None:
        """Closes sockets to peers that were lost, and with them what is still queued there."""
        if len(self._outboxes) == 0:
            return
        for address in set(self._outboxes) - self._links.addresses():
            self._outboxes.pop(address).close(linger=200)
