"""The ZMQ sockets of a messenger: a PULL inbox, and a PUSH outbox per peer address."""

from __future__ import annotations

import logging
import re

import zmq

from kvrelay.curve import OVERHEAD_BYTES, CurveKey
from kvrelay.logs import LimitedLog
from kvrelay.messaging.zmq_context import ZmqContext, open_curve_gate
from kvrelay.protocol.codec import MAX_FRAME_BYTES

log = logging.getLogger(__name__)

EVENTS, NOBLOCK, POLLIN, SNDMORE = int(zmq.EVENTS), int(zmq.NOBLOCK), int(zmq.POLLIN), int(zmq.SNDMORE)
"""Plain integers: pyzmq takes them several times as fast as its enumerations."""
OUTBOX_LINGER_MS = 200
"""How long the last messages to a peer without a link (a refusal, mostly) may take to leave."""
COPIED_BYTES = 64 << 10
"""ZMQ copies frames up to this size."""
SPARE_SOCKETS = 512
"""Sockets besides one for each peer: the inbox, the gate, refusals, and outboxes that linger."""


INBOX_ADDRESS = re.compile(r"tcp://(\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]*;]+):[0-9]{1,5}", re.ASCII)


def tcp_host(host: str) -> str:
    """An address without its port. ZMQ expects IPv6 addresses in brackets."""
    return f"tcp://[{host}]" if ":" in host else f"tcp://{host}"


class MessengerSockets:
    """Binds the inbox to `port`, or to a free one if it is 0. Raises zmq.ZMQError if that is not possible."""

    def __init__(self, host: str, port: int, curve: CurveKey | None, max_peers: int) -> None:
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
            self._curve.guard_server(self._inbox)
        if not port:
            return self._inbox.bind_to_random_port(tcp_host(host))
        self._inbox.bind(f"{tcp_host(host)}:{port}")
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
        if INBOX_ADDRESS.fullmatch(address) is None:
            raise ValueError("not tcp://HOST:PORT")
        outbox = self._context.socket(zmq.PUSH)
        outbox.set_hwm(0)
        outbox.setsockopt(zmq.IPV6, int("[" in address))
        outbox.setsockopt(zmq.RECONNECT_IVL, 50)
        outbox.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if self._curve is not None:
            self._curve.guard_client(outbox)
        try:
            outbox.connect(address)
        except zmq.ZMQError:
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
