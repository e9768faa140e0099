"""The messages to one peer that it has not acknowledged, and the order in which they are sent.

At most about `WINDOW_BYTES` are in flight. Later messages wait for acknowledgements, so that a burst of prompts (128
samples of one long prompt) does not fill the sockets' queues. A prompt that waits is not encoded: all samples of a
request refer to the same token bytes, so they hold one copy of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvrelay.protocol import codec
from kvrelay.protocol.messages import AnyBody, Generate, Header, Prefill, Reserve

WINDOW_BYTES = 8 << 20
"""Encoding and sending so much takes about 5 ms of the event loop."""


@dataclass(slots=True)
class UnackedMessage:
    """`body` is a struct while a message with a prompt waits, else its encoding."""

    header: Header
    body: bytes | AnyBody
    sent_at: float
    wait_s: float  # until it is sent again

    @property
    def seq(self) -> int:
        return self.header.seq

    @property
    def held_bytes(self) -> int:
        return len(self.body) if isinstance(self.body, bytes) else 0

    def encoded(self) -> bytes:
        if not isinstance(self.body, bytes):
            self.body = codec.encode_body(self.body)
        return self.body


@dataclass(slots=True)
class SendWindow:
    """`held_bytes`: of the encoded messages. `last_acked_at`: when the peer last acknowledged a message, or when the
    oldest one in flight was sent if that was later."""

    in_flight: deque[UnackedMessage] = field(default_factory=deque)
    waiting: deque[UnackedMessage] = field(default_factory=deque)
    held_bytes: int = 0
    in_flight_bytes: int = 0
    last_acked_at: float = 0.0

    def __len__(self) -> int:
        return len(self.in_flight) + len(self.waiting)

    def __iter__(self) -> Iterator[UnackedMessage]:
        yield from self.in_flight
        yield from self.waiting

    def add(self, header: Header, body: AnyBody, encoded: bytes, now: float, wait_s: float) -> bool:
        """Returns whether the message may be sent now; else it waits."""
        message = UnackedMessage(header, encoded, now, wait_s)
        if self._is_open and not self.waiting:
            self._put_in_flight(message, now)
            self.held_bytes += len(encoded)
            return True
        if isinstance(body, Prefill | Generate | Reserve):
            message.body = body
        self.held_bytes += message.held_bytes
        self.waiting.append(message)
        return False

    def take_acked(self, ack: int, now: float) -> None:
        """Drops the messages in flight up to number `ack`."""
        in_flight = self.in_flight
        while in_flight and in_flight[0].seq <= ack:
            num_bytes = in_flight.popleft().held_bytes
            self.in_flight_bytes -= num_bytes
            self.held_bytes -= num_bytes
            self.last_acked_at = now

    def next_to_send(self, now: float) -> UnackedMessage | None:
        """Returns the next waiting message if there is room for it. It is in flight from now on."""
        if not self.waiting or not self._is_open:
            return None
        message = self.waiting.popleft()
        self.held_bytes -= message.held_bytes
        self.held_bytes += len(message.encoded())
        message.sent_at = now
        self._put_in_flight(message, now)
        return message

    @property
    def _is_open(self) -> bool:
        return self.in_flight_bytes < WINDOW_BYTES

    def _put_in_flight(self, message: UnackedMessage, now: float) -> None:
        if not self.in_flight:
            self.last_acked_at = now
        self.in_flight.append(message)
        self.in_flight_bytes += message.held_bytes
