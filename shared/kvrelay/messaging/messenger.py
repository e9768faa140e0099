"""Sockets and the clock around `kvrelay.protocol.link`.

`send` never blocks: ZMQ queues without bound. A peer that stays silent is reported lost, and its socket is closed with
its queue. Messages in both directions wait for `start`.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Callable
from functools import partial

import zmq

from kvrelay.curve import OVERHEAD_BYTES, CurveKeys, KeysDiffer, advertised, key_for, location
from kvrelay.logs import LimitedLog
from kvrelay.messaging.zmq_context import ZmqContext, connect, open_curve_gate, tcp_address, tcp_host
from kvrelay.protocol.codec import MAX_FRAME_BYTES
from kvrelay.protocol.link import LinkEvent, Links, LinkSettings, PeerLost
from kvrelay.protocol.messages import AnyBody, PeerRef

log = logging.getLogger(__name__)

TICK_S = 0.05
MAX_MESSAGES_PER_WAKEUP = 256
MAX_WAKEUP_S = 0.005
"""Messages and events are handled for about this time, then other callbacks run."""
PROBE_TIMEOUT_S = 2.0

EVENTS, NOBLOCK, POLLIN, SNDMORE = int(zmq.EVENTS), int(zmq.NOBLOCK), int(zmq.POLLIN), int(zmq.SNDMORE)
"""Plain integers: pyzmq takes them several times as fast as its enumerations."""
OUTBOX_LINGER_MS = 200
"""How long the last messages to a peer without a link (a refusal, mostly) may take to leave."""
COPIED_BYTES = 64 << 10
"""ZMQ copies frames up to this size."""
SPARE_SOCKETS = 512
"""Sockets besides one for each peer: the inbox, the gate, refusals, and outboxes that linger."""


def new_incarnation() -> str:
    """A unique name for this run of a process. Names sort by start time."""
    return f"{time.time_ns():016x}{secrets.token_hex(4)}"


class Messenger:
    """Control messages of one process. All methods and the callback run on one event loop's thread.

    Binds the inbox, so that peers can use the address in `me` before `start`. Raises zmq.ZMQError if the port is not
    free.
    """

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
        curve: CurveKeys | None = None,
    ) -> None:
        settings = settings or LinkSettings()
        sockets = MessengerSockets(host, port, curve, settings.max_peers)
        self._sockets: MessengerSockets | None = sockets  # None once closed
        address = advertised(tcp_address(advertise_host or host, sockets.port), curve)
        self.me = PeerRef(peer_id, new_incarnation(), address)
        self._on_event = on_event
        self._links = Links(self.me, fingerprint, settings, partial(_why_unreachable, curve))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._probes = ProcessProbes()
        self._events: deque[LinkEvent] = deque()  # not yet reported
        self._tick: asyncio.TimerHandle | None = None
        self._flush_due = False
        self._drain_due = False
        self._log = LimitedLog(log)
        self._logged_dropped = self.num_dropped

    def start(self) -> None:
        """Begins to receive. Must be called on the event loop's thread, once."""
        if self._loop is not None or self._sockets is None:
            raise RuntimeError("the messenger was started or closed before")
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._sockets.inbox_fd, self._drain_inbox)
        self._on_tick()
        self._drain_soon()  # the descriptor is edge-triggered, so messages that came before must be read now

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
        """Sends, or reports the peer lost. After `close` it does nothing. Raises MessageTooLarge."""
        if self._sockets is None:
            return
        self._links.send(peer, body, time.monotonic(), request=request, attempt=attempt, sequence=sequence, trace=trace)
        if self._loop is None:
            return  # `start` sends it
        self._send_out()
        if self._links.has_events:
            self._flush_soon()

    @property
    def num_dropped(self) -> dict[str, int]:
        """Messages that were dropped, by cause."""
        return {
            "malformed": self._links.num_malformed,
            "beyond_limit": self._links.num_beyond_limit,
            "unsent": self._sockets.num_unsent if self._sockets is not None else 0,
        }

    @property
    def alive_interval_s(self) -> float:
        """Time between life signs."""
        return self._links.settings.alive_interval_s

    def silent_s(self, peer: PeerRef) -> float:
        """Seconds since the last message or life sign of this incarnation of a peer. Infinite without a link."""
        return self._links.silent_s(peer, time.monotonic())

    def close(self, linger_s: float = 0.2) -> None:
        """Closes all sockets. Sent messages get `linger_s` to leave, for which this blocks. May be called twice."""
        sockets = self._sockets
        if sockets is None:
            return
        try:
            self._send_out()
            if self._tick is not None:
                self._tick.cancel()
            if self._loop is not None and not self._loop.is_closed():
                self._loop.remove_reader(sockets.inbox_fd)
        finally:
            self._sockets = None
            self._probes.close()
            sockets.close(linger_s)

    def _on_tick(self) -> None:
        if self._sockets is None:
            return
        assert self._loop is not None
        self._tick = self._loop.call_later(TICK_S, self._on_tick)
        now = time.monotonic()
        self._links.tick(now)
        for peer in self._links.silent_routers(now):
            self._probes.probe(peer.address, partial(self._links.process_ended, peer))
        self._flush()
        self._close_unused()
        self._log_dropped()

    def _drain_inbox(self) -> None:
        self._drain_due = False
        sockets = self._sockets
        if sockets is None:
            return
        now = time.monotonic()
        for _ in range(MAX_MESSAGES_PER_WAKEUP):
            try:
                frames = sockets.receive()
            except zmq.Again:
                break
            self._links.receive(frames, now)
            if not sockets.may_receive():
                break
            if time.monotonic() - now > MAX_WAKEUP_S:
                self._drain_soon()
                break
        else:
            self._drain_soon()  # the descriptor is edge-triggered: it does not report the messages that are left
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
        """Sends the queued messages, reports the events, and sends the messages that the callback queued."""
        # Events that the callback causes wait for the next turn of the event loop. Otherwise a callback that causes a
        # new event for each one would block the loop.
        self._flush_due = False
        self._send_out()
        events = self._links.take_events()
        if PeerLost in map(type, events):
            # Closed before the callbacks run: a callback that sends to the lost peer would otherwise reuse the old
            # socket, with the messages still queued in it.
            self._close_unused()
        self._events += events
        self._report_events()
        self._send_out()
        if self._events or self._links.has_events:
            self._flush_soon()

    def _report_events(self) -> None:
        until = time.monotonic() + MAX_WAKEUP_S
        while self._events and self._sockets is not None:
            event = self._events.popleft()
            try:
                self._on_event(event)
            except Exception:
                log.exception("handling %s failed", type(event).__name__)
            if self._events and time.monotonic() > until:
                return

    def _send_out(self) -> None:
        if self._sockets is not None:
            for address, frames in self._links.take_outgoing():
                self._sockets.send(address, frames)

    def _log_dropped(self) -> None:
        dropped = self.num_dropped
        if dropped == self._logged_dropped:
            return
        self._logged_dropped = dropped
        self._log.warning("dropped", "messages of peers were dropped, in total since the start: %s", dropped)

    def _close_unused(self) -> None:
        """Closes the sockets to addresses without a link."""
        if self._sockets is not None:
            self._sockets.keep_only(self._links.addresses())


INBOX_ADDRESS = re.compile(r"tcp://(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]*;#]+):[0-9]{1,5}", re.ASCII)


def _why_unreachable(curve: CurveKeys | None, address: str) -> str:
    try:
        key_for(address, curve)
    except KeysDiffer as error:
        return str(error)
    return ""


class MessengerSockets:
    """Binds the inbox to `port`, or to a free one if it is 0. Raises zmq.ZMQError if that is not possible."""

    def __init__(self, host: str, port: int, curve: CurveKeys | None, max_peers: int) -> None:
        self.num_unsent = 0
        """Messages that could not be given to a socket. The peer notices the gap."""
        self._log = LimitedLog(log)
        self._curve = curve
        self._context = ZmqContext(max_peers + SPARE_SOCKETS)
        self._outboxes: dict[str, zmq.Socket[bytes]] = {}
        try:
            self._inbox = self._context.socket(zmq.PULL)
            self.port = self._bind(host, port)
            self.inbox_fd = int(self._inbox.getsockopt(zmq.FD))
        except BaseException:
            self._context.close()
            raise

    def _bind(self, host: str, port: int) -> int:
        self._inbox.set_hwm(0)
        self._inbox.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + OVERHEAD_BYTES)
        self._inbox.setsockopt(zmq.IPV6, int(":" in host))
        if self._curve is not None:
            open_curve_gate(self._context, self._curve)
            self._curve.own.guard_server(self._inbox)
        if not port:
            return self._inbox.bind_to_random_port(tcp_host(host))
        self._inbox.bind(tcp_address(host, port))
        return port

    def receive(self) -> list[bytes]:
        """The frames of the next message. Raises zmq.Again if there is none."""
        # `more` of a frame saves a question to the socket after each.
        inbox = self._inbox
        frame = inbox.recv(NOBLOCK, copy=False)
        frames = [frame.bytes]
        while frame.more:
            frame = inbox.recv(NOBLOCK, copy=False)
            frames.append(frame.bytes)
        return frames

    def may_receive(self) -> bool:
        """Returns whether a message waits. Costs a quarter of the exception that `receive` raises if none does."""
        return bool(int(self._inbox.getsockopt(EVENTS)) & POLLIN)

    def send(self, address: str, frames: list[bytes]) -> None:
        """Queues a message. If that fails, it is counted and logged, and the link ends by the gap.

        An error concerns this peer alone: it must not keep messages for others from leaving.
        """
        outbox = self._outboxes.get(address)
        try:
            if outbox is None:
                outbox = self._outboxes[address] = self._connect(address)
            *before, last = frames
            # The methods of the backend skip the checks of flags and frames in those of `zmq.Socket`.
            for frame in before:
                zmq.backend.Socket.send(outbox, frame, SNDMORE | NOBLOCK)
            if len(last) < COPIED_BYTES:
                zmq.backend.Socket.send(outbox, last, NOBLOCK)
            else:  # tokens that several messages share stay one object until they leave
                zmq.backend.Socket.send(outbox, last, NOBLOCK, copy=False)
        except (zmq.ZMQError, ValueError) as error:
            self.num_unsent += 1
            self._log.warning("unsent", "cannot send to %r: %s", address, error)

    def _connect(self, address: str) -> zmq.Socket[bytes]:
        """Raises zmq.ZMQError, and ValueError for what is no inbox: addresses come from peers."""
        if INBOX_ADDRESS.fullmatch(location(address)) is None:
            raise ValueError("not tcp://HOST:PORT")
        outbox = self._context.socket(zmq.PUSH)
        outbox.set_hwm(0)
        outbox.setsockopt(zmq.IPV6, int("[" in address))
        outbox.setsockopt(zmq.RECONNECT_IVL, 50)
        outbox.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        try:
            connect(outbox, address, self._curve)
        except (zmq.ZMQError, KeysDiffer):
            self._context.close_socket(outbox)
            raise
        return outbox

    def keep_only(self, addresses: set[str]) -> None:
        """Closes the outboxes to other addresses, and with them their queues."""
        for address in set(self._outboxes) - addresses:
            self._context.close_socket(self._outboxes.pop(address), OUTBOX_LINGER_MS)

    def close(self, linger_s: float) -> None:
        """Blocks until all queued messages have left, for up to `linger_s`."""
        self._outboxes.clear()
        self._context.close(int(linger_s * 1000))


class ProcessProbes:
    """Asks the systems of peers whether they still run: at most one probe per address is in flight. A stopped or slow
    process still accepts connections."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def probe(self, address: str, on_ended: Callable[[], None]) -> None:
        """Calls `on_ended` if the system at `tcp://HOST:PORT` refuses a connection. Other failures prove nothing."""
        if address not in self._tasks:
            task = asyncio.get_running_loop().create_task(_probe(address, on_ended), name="process-probe")
            self._tasks[address] = task
            task.add_done_callback(lambda _: self._tasks.pop(address, None))

    def close(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()


async def _probe(address: str, on_ended: Callable[[], None]) -> None:
    host, _, port = location(address).removeprefix("tcp://").rpartition(":")
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except ConnectionRefusedError:
        on_ended()
    except (OSError, TimeoutError, ValueError):
        return
    else:
        writer.close()
