"""The reliable link under all control messages: pure state, no socket, no clock.

Sockets drop silently (reconnects, high-water marks), so every message that changes state is numbered, acknowledged,
repeated until it is acknowledged, and delivered once and in order. What lies above may rely on that for as long as the
peer is not reported lost, and starts afresh after it was.

A link joins one incarnation of this process with one incarnation of a peer. Its states:

1. OPEN     numbers run; `Alive` goes out every `alive_interval_s` and carries the acknowledgement.
2. LOST     the peer was silent for `peer_timeout_s`, came back under a newer incarnation, or says (by a new link
            number) that it lost us. Reported once; the link object is gone, its unsent and unacknowledged messages too.
3. REFUSED  the peer, or we, found the other's protocol version or model unfit. Reported once with the reason.

Incarnations sort by age (they start with the process's start time), so a message of an older one is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from kvrelay.protocol import codec
from kvrelay.protocol.messages import Alive, AnyBody, Header, PeerRef, Reject, RejectCode


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Times in seconds."""

    alive_interval_s: float = 0.5
    peer_timeout_s: float = 5.0
    resend_after_s: float = 0.6
    resend_at_most_s: float = 2.0
    ack_within_s: float = 0.05


@dataclass(frozen=True, slots=True)
class Delivered:
    """A message from a peer, in order, exactly once."""

    peer: PeerRef
    header: Header
    body: AnyBody


@dataclass(frozen=True, slots=True)
class PeerLost:
    """This incarnation of the peer is gone, or has forgotten everything about us."""

    peer: PeerRef
    reason: str


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """The peer and we cannot work together; the reason is for people."""

    peer: PeerRef
    reason: str


LinkEvent = Delivered | PeerLost | PeerRefused


@dataclass(slots=True)
class _Unacked:
    seq: int
    header: Header
    body: bytes
    sent_at: float
    wait_s: float


@dataclass(slots=True)
class _Link:
    number: int
    peer: PeerRef
    last_heard: float
    peer_number: int = 0
    next_seq: int = 1
    received: int = 0  # highest seq received in order
    early: dict[int, tuple[Header, Sequence[codec.Frame]]] = field(default_factory=dict)
    unacked: deque[_Unacked] = field(default_factory=deque)
    last_sent: float = 0.0
    ack_owed_since: float | None = None

    @property
    def is_fresh(self) -> bool:
        """Nothing was received, nothing sent was acknowledged: a new link of the peer can join where the old was."""
        return self.received == 0 and self.next_seq - 1 == len(self.unacked)


class Links:
    """All links of one process. Methods take `now` (monotonic seconds); `take_outgoing` and `take_events` empty the
    results."""

    MAX_EARLY = 4096
    """Messages that may wait for a gap before them; more are dropped and come again."""

    def __init__(self, me: PeerRef, fingerprint: str = "", settings: LinkSettings | None = None) -> None:
        self.me = me
        self.fingerprint = fingerprint
        self.settings = settings or LinkSettings()
        self.num_malformed = 0
        self._links: dict[str, _Link] = {}
        self._last_number = 0
        self._last_tick: float | None = None
        self._outgoing: list[tuple[str, list[bytes]]] = []
        self._events: list[LinkEvent] = []

    # -- what goes out ------------------------------------------------------------------------------------------------

    def send(
        self,
        peer: PeerRef,
        body: AnyBody,
        now: float,
        *,
        request: str = "",
        attempt: int = 0,
        sequence: int = 0,
        trace: str = "",
    ) -> None:
        """Queues a message. If the peer has been replaced by a newer incarnation, it is reported lost instead."""
        link = self._links.get(peer.peer_id)
        if link is not None and link.peer.incarnation != peer.incarnation:
            if link.peer.incarnation > peer.incarnation:
                self._events.append(PeerLost(peer, "replaced by a newer incarnation"))
                return
            self._lose(link, "replaced by a newer incarnation")
            link = None
        if link is None:
            link = self._open(peer, now)
        header = Header(
            fingerprint=self.fingerprint,
            sender=self.me.peer_id,
            incarnation=self.me.incarnation,
            reply_to=self.me.address,
            to_incarnation=link.peer.incarnation,
            link=link.number,
            to_link=link.peer_number,
            seq=link.next_seq,
            ack=link.received,
            request=request,
            attempt=attempt,
            sequence=sequence,
            trace=trace,
        )
        link.next_seq += 1
        message = _Unacked(header.seq, header, codec.encode_body(body), now, self.settings.resend_after_s)
        link.unacked.append(message)
        self._transmit(link, header, message.body, now)

    def is_open(self, peer: PeerRef) -> bool:
        """Whether this incarnation of the peer has a link that was not lost."""
        link = self._links.get(peer.peer_id)
        return link is not None and link.peer.incarnation == peer.incarnation

    def tick(self, now: float) -> None:
        """To be called every few ten milliseconds: repeats, life signs, and the detection of silence."""
        settings = self.settings
        if self._last_tick is not None and now - self._last_tick > settings.alive_interval_s * 2:
            # This process itself stood still; the peers' silence in that time proves nothing.
            stalled = now - self._last_tick
            for link in self._links.values():
                link.last_heard += stalled
        self._last_tick = now
        for link in list(self._links.values()):
            if now - link.last_heard > settings.peer_timeout_s:
                self._lose(link, f"silent for {settings.peer_timeout_s:g} s")
                continue
            self._resend(link, now)
            ack_due = link.ack_owed_since is not None and now - link.ack_owed_since >= settings.ack_within_s
            if ack_due or now - link.last_sent >= settings.alive_interval_s:
                self._send_alive(link, now)

    def take_outgoing(self) -> list[tuple[str, list[bytes]]]:
        """(address, frames) of everything to be sent."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def take_events(self) -> list[LinkEvent]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    @property
    def num_unacked(self) -> int:
        """Messages sent and not yet acknowledged, over all peers."""
        return sum(len(link.unacked) for link in self._links.values())

    def addresses(self) -> set[str]:
        """Of all peers with an open link."""
        return {link.peer.address for link in self._links.values()}

    # -- what comes in ------------------------------------------------------------------------------------------------

    def receive(self, frames: Sequence[codec.Frame], now: float) -> None:
        """Takes a message off the wire."""
        try:
            header = codec.decode_header(frames)
            if header.seq == 0 and isinstance(body := codec.decode_body(frames), Reject):
                self._refused(header, body)
                return
        except codec.MalformedMessage:
            self.num_malformed += 1
            return
        refusal = codec.refusal(header, self.fingerprint)
        if refusal is not None:
            self._reject(header, *refusal)
            return
        link = self._link_of(header, now)
        if link is None:
            return
        link.last_heard = now
        self._take_ack(link, header.ack)
        if header.seq == 0:
            return
        if link.ack_owed_since is None:
            link.ack_owed_since = now
        if header.seq > link.received and len(link.early) < self.MAX_EARLY:
            link.early[header.seq] = (header, frames)
            self._deliver(link)

    def _link_of(self, header: Header, now: float) -> _Link | None:
        """The link a message belongs to, opened or replaced where it must be; None if the message is void."""
        peer = PeerRef(header.sender, header.incarnation, header.reply_to)
        link = self._links.get(header.sender)
        if link is not None and header.incarnation < link.peer.incarnation:
            return None
        if link is not None and header.incarnation > link.peer.incarnation:
            self._lose(link, "replaced by a newer incarnation")
            link = None
        if link is not None and link.peer_number and header.link != link.peer_number:
            if header.link < link.peer_number:
                return None
            if header.to_link != link.number or not link.is_fresh:
                self._lose(link, "the peer lost its link to us")
                link = None
        if link is None:
            link = self._open(peer, now)
        link.peer_number = header.link
        addressed_to_us = header.to_incarnation == self.me.incarnation and header.to_link in (0, link.number)
        if not addressed_to_us:
            # The peer means an earlier life of ours, or a link that we lost: our numbers tell it so.
            self._send_alive(link, now)
            return None
        return link

    def _deliver(self, link: _Link) -> None:
        while (early := link.early.pop(link.received + 1, None)) is not None:
            header, frames = early
            link.received += 1
            try:
                body = codec.decode_body(frames)
            except codec.MalformedMessage as error:
                self.num_malformed += 1
                self._reject(header, "malformed", str(error))
                self._drop(link)
                self._events.append(PeerRefused(link.peer, f"sent a malformed message: {error}"))
                return
            self._events.append(Delivered(link.peer, header, body))

    def _take_ack(self, link: _Link, ack: int) -> None:
        while link.unacked and link.unacked[0].seq <= ack:
            link.unacked.popleft()

    # -- the life of a link -------------------------------------------------------------------------------------------

    def _open(self, peer: PeerRef, now: float) -> _Link:
        self._last_number += 1
        link = _Link(number=self._last_number, peer=peer, last_heard=now)
        self._links[peer.peer_id] = link
        return link

    def _drop(self, link: _Link) -> None:
        if self._links.get(link.peer.peer_id) is link:
            del self._links[link.peer.peer_id]

    def _lose(self, link: _Link, reason: str) -> None:
        self._drop(link)
        self._events.append(PeerLost(link.peer, reason))

    def _refused(self, header: Header, body: Reject) -> None:
        link = self._links.get(header.sender)
        if link is None or link.peer.incarnation != header.incarnation:
            return
        self._drop(link)
        self._events.append(PeerRefused(link.peer, body.reason))

    def _reject(self, header: Header, code: RejectCode, reason: str) -> None:
        body = Reject(code=code, reason=reason)
        reply = Header(
            fingerprint=self.fingerprint,
            sender=self.me.peer_id,
            incarnation=self.me.incarnation,
            reply_to=self.me.address,
            to_incarnation=header.incarnation,
            link=0,
        )
        self._outgoing.append((header.reply_to, codec.encode(reply, body)))

    def _resend(self, link: _Link, now: float) -> None:
        # Go-back-N: the oldest decides; what the peer got early it drops as known.
        if not link.unacked or now - link.unacked[0].sent_at < link.unacked[0].wait_s:
            return
        for message in link.unacked:
            message.sent_at = now
            message.wait_s = min(message.wait_s * 2, self.settings.resend_at_most_s)
            header = msgspec.structs.replace(message.header, ack=link.received, to_link=link.peer_number)
            self._transmit(link, header, message.body, now)

    def _send_alive(self, link: _Link, now: float) -> None:
        header = Header(
            fingerprint=self.fingerprint,
            sender=self.me.peer_id,
            incarnation=self.me.incarnation,
            reply_to=self.me.address,
            to_incarnation=link.peer.incarnation,
            link=link.number,
            to_link=link.peer_number,
            ack=link.received,
        )
        self._transmit(link, header, codec.encode_body(Alive()), now)

    def _transmit(self, link: _Link, header: Header, body: bytes, now: float) -> None:
        link.last_sent = now
        link.ack_owed_since = None
        self._outgoing.append((link.peer.address, [codec.encode_header(header), body]))
