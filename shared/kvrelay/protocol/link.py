"""The reliable link under all control messages: pure state, no socket, no clock.

Sockets drop silently (reconnects, high-water marks), so every message that changes state is numbered, acknowledged,
repeated until it is acknowledged, and delivered once and in order. Callers may rely on this until the
peer is reported lost, and must start over afterwards.

A link joins one incarnation of this process with one incarnation of a peer. The first message of that incarnation
proves the link; a peer has one proven link at most. A caller may name an incarnation that was never received: its link
exists beside the proven one, and replaces it only when it is proven itself. While it exists, it sends `Alive` every
`alive_interval_s`, which carries the acknowledgement. The first message that the peer addresses to this link, or to no
link, pairs it with the peer's link number. A link ends in one of two ways, each reported once, and its unacknowledged
messages are dropped:

- `PeerLost`: the peer was silent for `peer_timeout_s` (a router for `router_timeout_s` unless its process has ended),
  was replaced by a newer incarnation, left too much unacknowledged, or has lost this link, as its new number shows.
- `PeerRefused`: one side does not accept the other's protocol version or model. The event has the reason.

A body of a known kind with invalid fields is reported as `Invalid`, and the link goes on.

Incarnations sort by age (they start with the process's start time), so a message of an older one is dropped. Clocks may
be set back, so of two incarnations that both sent messages, the newer is the one whose first message came later. Link
numbers of one incarnation sort too: once paired, a message with an older number is dropped, and a newer number means
that the peer has lost this link. A message for an earlier incarnation or link of this process is dropped. The next
`Alive` (sent at once if the message opened the link) shows the peer the current numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from kvrelay.protocol import codec
from kvrelay.protocol.messages import PROTOCOL_VERSION, Alive, AnyBody, Header, PeerRef, Reject, RejectCode
from kvrelay.protocol.send_window import SendWindow

REPLACED = "replaced by a newer incarnation"


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Times in seconds."""

    alive_interval_s: float = 0.5
    peer_timeout_s: float = 5.0
    router_timeout_s: float = 0.0
    """A silent router whose process has not ended keeps its link for this long, if it is longer than `peer_timeout_s`:
    no client waits for a worker's judgement, and a router that stood still goes on with its streams."""
    resend_after_s: float = 0.6
    resend_at_most_s: float = 2.0
    ack_within_s: float = 0.05
    max_peers: int = 2048  # peers with a link at a time; further ones get no answer


class Delivered(msgspec.Struct, frozen=True):
    """A message from a peer, in order, exactly once."""

    peer: PeerRef
    header: Header
    body: AnyBody


@dataclass(frozen=True, slots=True)
class Invalid:
    """A message from a peer, in its place among those delivered, whose fields break the limits of its kind. The link
    goes on: one request with a bad value must not end all others of its peer."""

    peer: PeerRef
    header: Header
    kind: type[msgspec.Struct]
    reason: str


@dataclass(frozen=True, slots=True)
class PeerLost:
    """This incarnation of the peer is gone, or has lost its state of this link.

    `replaced`: messages of a newer incarnation arrived, so this process has ended. Otherwise it may still exist,
    stopped or unreachable. `by_peer`: the peer is alive and has declared this process lost.
    """

    peer: PeerRef
    reason: str
    replaced: bool = False
    by_peer: bool = False


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """The peer and we cannot work together; the reason is for people."""

    peer: PeerRef
    reason: str


LinkEvent = Delivered | Invalid | PeerLost | PeerRefused


@dataclass(slots=True)
class _Link:
    number: int
    peer: PeerRef
    last_received_at: float
    peer_number: int = 0
    next_seq: int = 1
    received: int = 0  # highest seq received in order
    early: dict[int, tuple[Header, Sequence[codec.Frame]]] = field(default_factory=dict)
    unacked: SendWindow = field(default_factory=SendWindow)
    last_sent: float = -math.inf
    ack_owed_since: float | None = None
    is_router: bool = False  # its messages have no fingerprint
    has_ended: bool = False  # its process refuses connections
    is_proven: bool = False  # a message of this incarnation has come
    reply_to: str = ""  # the address in that message
    early_bytes: int = 0
    unconfirmed_bytes: int = 0  # received since this side last sent an acknowledgement


class Links:
    """All links of one process. Methods take `now` (monotonic seconds); `take_outgoing` and `take_events` empty the
    results."""

    MAX_EARLY = 4096
    MAX_EARLY_BYTES = 64 << 20
    """Maximum number and bytes of messages of a peer kept ahead of a gap. Others are dropped, and the peer resends
    them."""
    MAX_ALL_EARLY_BYTES = 256 << 20
    """The same for all peers together."""
    MAX_UNACKED_BYTES = 256 << 20
    """A peer is lost if so much is kept for it and it has acknowledged nothing for `peer_timeout_s`. Prompts that wait
    to be sent do not count: their requests hold them."""
    MAX_HELD_BYTES = 1 << 30
    """A peer for which more is kept is lost, however recent its last acknowledgement."""
    ACK_BYTES = 1 << 20
    """So many received bytes are acknowledged at once: the peer may wait for that to send more."""
    MAX_RESENT_PER_TICK = 64
    MAX_RESENT_BYTES_PER_TICK = 256 * 1024
    """Limit per peer. The oldest messages are resent first, and at least one is resent."""
    MAX_REFUSALS_KEPT = 1024
    """Peers without a link whose refusal is remembered, so that it is reported once."""
    MAX_INCARNATIONS_KEPT = 8
    MAX_PEER_IDS_KEPT = 4096
    """Up to `MAX_PEER_IDS_KEPT` peers are kept, each with its last `MAX_INCARNATIONS_KEPT` incarnations in order of
    arrival."""
    MAX_LINKS_PER_PEER = 4
    """At most one link of a peer is proven."""

    def __init__(self, me: PeerRef, fingerprint: str = "", settings: LinkSettings | None = None) -> None:
        self.me = me
        self.fingerprint = fingerprint
        self.settings = settings or LinkSettings()
        self.num_malformed = 0
        self.num_invalid = 0
        self.num_beyond_limit = 0  # messages of peers beyond `max_peers`
        self.early_bytes = 0  # bytes of messages ahead of gaps, of all peers
        self._links: dict[str, dict[str, _Link]] = {}  # keyed by peer id, then incarnation
        self._last_number = 0
        self._last_tick: float | None = None
        self._refusals: set[tuple[str, str]] = set()  # (peer id, incarnation)
        self._known_incarnations: dict[str, list[str]] = {}  # peer id: incarnations, ordered by their first message
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
        """Queues a message. If a newer incarnation replaced the peer, or there are too many links, it is reported lost
        instead. Raises MessageTooLarge.
        """
        encoded = codec.encode_body(body)
        link = self._find(peer.peer_id, peer.incarnation) or self._link_to(peer, now)
        if link is None:
            return
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
        is_sent_now = link.unacked.add(header, body, encoded, now, self.settings.resend_after_s)
        link.next_seq += 1
        if self._takes_too_little(link, now):
            self._lose(link, f"it has not acknowledged {link.unacked.held_bytes} bytes")
        elif is_sent_now:
            self._transmit(link, header, encoded, now)

    def _takes_too_little(self, link: _Link, now: float) -> bool:
        unacked = link.unacked
        if unacked.held_bytes <= self.MAX_UNACKED_BYTES or len(unacked) == 1:
            return False
        is_stuck = now - unacked.last_acked_at > self.settings.peer_timeout_s
        return is_stuck or unacked.held_bytes > self.MAX_HELD_BYTES

    def tick(self, now: float) -> None:
        """To be called every few ten milliseconds: repeats, life signs, and the detection of silence."""
        settings = self.settings
        if self._last_tick is not None:
            # If this process itself stood still, the peers' silence in that time proves nothing: what exceeds two life
            # signs does not count. Some of it must count, or a process that is always late would never notice a death.
            stalled = now - self._last_tick - 2 * settings.alive_interval_s
            if stalled > 0:
                for link in self._all():
                    link.last_received_at = min(now, link.last_received_at + stalled)
        self._last_tick = now
        for link in self._all():
            silent_s = now - link.last_received_at
            if silent_s > settings.peer_timeout_s:
                timeout_s = self._timeout_s(link)
                if silent_s > timeout_s:
                    self._lose(link, f"silent for {timeout_s:g} s")
                    continue
            else:  # repeats to a silent peer would only fill its queue
                self._resend(link, now)
            ack_due = link.ack_owed_since is not None and now - link.ack_owed_since >= settings.ack_within_s
            if ack_due or now - link.last_sent >= settings.alive_interval_s:
                self._send_alive(link, now)

    def _timeout_s(self, link: _Link) -> float:
        if not link.is_router or link.has_ended:
            return self.settings.peer_timeout_s
        return max(self.settings.peer_timeout_s, self.settings.router_timeout_s)

    def silent_routers(self, now: float) -> list[PeerRef]:
        """Routers that have been silent for longer than other peers may be."""
        timeout_s = self.settings.peer_timeout_s
        return [
            link.peer
            for link in self._all()
            if link.is_router and not link.has_ended and now - link.last_received_at > timeout_s
        ]

    def process_ended(self, peer: PeerRef) -> None:
        """The process of this peer is known to have ended."""
        link = self._find(peer.peer_id, peer.incarnation)
        if link is not None and link.peer == peer:
            link.has_ended = True

    def take_outgoing(self) -> list[tuple[str, list[bytes]]]:
        """(address, frames) of everything to be sent."""
        outgoing, self._outgoing = self._outgoing, []
        return outgoing

    def take_events(self) -> list[LinkEvent]:
        """Returns the events since the last call, in order."""
        events, self._events = self._events, []
        return events

    @property
    def has_events(self) -> bool:
        """True if `take_events` would return any."""
        return bool(self._events)

    @property
    def num_unacked(self) -> int:
        """Messages sent and not yet acknowledged, over all peers."""
        return sum(len(link.unacked) for link in self._all())

    def is_backed_up(self, peer: PeerRef) -> bool:
        """Returns whether messages to this incarnation wait until it acknowledges others."""
        link = self._find(peer.peer_id, peer.incarnation)
        return link is not None and bool(link.unacked.waiting)

    def silent_s(self, peer: PeerRef, now: float) -> float:
        """Seconds since the last message of this incarnation, or since the link began. Infinite without a link."""
        link = self._find(peer.peer_id, peer.incarnation)
        return math.inf if link is None else now - link.last_received_at

    def addresses(self) -> set[str]:
        """Returns the addresses of all peers with a link."""
        return {link.peer.address for link in self._all()}

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
            self._refuse(header, *refusal)
            return
        link = self._link_of(header, now)
        if link is None:
            return
        if header.to_incarnation != self.me.incarnation or header.to_link not in (0, link.number):
            return  # the next Alive shows it the current numbers
        link.peer_number = header.link
        link.last_received_at = now
        link.is_router, link.has_ended = not header.fingerprint, False
        if link.unacked.in_flight:
            self._take_ack(link, header.ack, now)
        if header.seq == 0:
            return
        if link.ack_owed_since is None:
            link.ack_owed_since = now
        if link.received < header.seq <= link.received + self.MAX_EARLY and header.seq not in link.early:
            num_bytes = len(frames[1])
            if header.seq > link.received + 1 and not self._has_room(link, num_bytes):
                return
            link.early[header.seq] = (header, frames)
            link.early_bytes += num_bytes
            self.early_bytes += num_bytes
            self._deliver(link)
            if link.unconfirmed_bytes >= self.ACK_BYTES and self._find(header.sender, header.incarnation) is link:
                self._send_alive(link, now)

    def _has_room(self, link: _Link, num_bytes: int) -> bool:
        """Returns whether a message ahead of a gap can be kept."""
        is_within = link.early_bytes + num_bytes <= self.MAX_EARLY_BYTES
        return is_within and self.early_bytes + num_bytes <= self.MAX_ALL_EARLY_BYTES

    def _link_of(self, header: Header, now: float) -> _Link | None:
        """Our link to the sender, opened or replaced where it must be; None if the sender's own is out of date."""
        link = self._find(header.sender, header.incarnation)
        if link is not None and link.is_proven and header.link == link.peer_number:
            return link  # the usual case
        if link is not None and link.is_proven and header.reply_to != link.reply_to:
            # A process has one address for its life, so this message is forged. A new link would take its address.
            self.num_malformed += 1
            return None
        proven = self._proven(header.sender)
        if proven is not None and proven is not link:
            if not self._is_newer(proven, header.incarnation):
                return None
            self._lose(proven, REPLACED, replaced=True)
        if link is not None and link.peer_number and header.link < link.peer_number:
            return None
        if link is not None and link.peer_number and header.link > link.peer_number:
            self._lose(link, "the peer lost its link to us", by_peer=True)
            link = None
        if link is None and header.sender not in self._links and self._is_full:
            self.num_beyond_limit += 1
            return None
        self._remember(header.sender, header.incarnation)
        link = link or self._open(_sender_of(header), now)
        self._prove(link, header.reply_to)
        return link

    def _link_to(self, peer: PeerRef, now: float) -> _Link | None:
        """A new link to an incarnation that a caller named; None if it is reported lost instead."""
        proven = self._proven(peer.peer_id)
        if proven is not None:
            # Only messages of both incarnations prove which one is newer; the word of a caller does not.
            both_known = self._are_known(peer.peer_id, peer.incarnation, proven.peer.incarnation)
            if not self._is_newer(proven, peer.incarnation):
                self._events.append(PeerLost(peer, REPLACED, replaced=both_known))
                return None
            if both_known:
                self._lose(proven, REPLACED, replaced=True)
        links = self._links.get(peer.peer_id, {})
        if not links and self._is_full:
            self._events.append(PeerLost(peer, f"this process has its {self.settings.max_peers} peers: max_peers"))
            return None
        if len(links) >= self.MAX_LINKS_PER_PEER:
            # The latest name is the likeliest to live: a peer may restart again and again within the timeout.
            first_named = next(link for link in links.values() if not link.is_proven)
            self._lose(first_named, f"{len(links) - 1} other incarnations of it were named since")
        return self._open(peer, now)

    def _prove(self, link: _Link, reply_to: str) -> None:
        """A message of this incarnation has come. Older ones that were only named do not exist any more."""
        if not link.is_proven:
            link.is_proven, link.reply_to = True, reply_to
        peer = link.peer
        for other in list(self._links[peer.peer_id].values()):
            if other is not link and not self._is_newer(link, other.peer.incarnation):
                both_known = self._are_known(peer.peer_id, peer.incarnation, other.peer.incarnation)
                self._lose(other, REPLACED, replaced=both_known)

    def _replace_proven(self, header: Header, reason: str) -> None:
        """This sender's process has come after the one with the proven link, if that is an older one."""
        proven = self._proven(header.sender)
        if (
            proven is not None
            and proven.peer.incarnation != header.incarnation
            and self._is_newer(proven, header.incarnation)
        ):
            self._lose(proven, reason, replaced=True)

    def _are_known(self, peer_id: str, *incarnations: str) -> bool:
        """Returns whether messages of all these incarnations have come."""
        return set(incarnations) <= set(self._known_incarnations.get(peer_id, ()))

    def _is_newer(self, link: _Link, incarnation: str) -> bool:
        """Returns whether this incarnation of the link's peer, another one than the link's, began after it."""
        known = self._known_incarnations.get(link.peer.peer_id, [])
        if incarnation in known and link.peer.incarnation in known:
            return known.index(incarnation) > known.index(link.peer.incarnation)
        return incarnation > link.peer.incarnation

    def _remember(self, peer_id: str, incarnation: str) -> None:
        known = self._known_incarnations.setdefault(peer_id, [])
        if incarnation not in known:
            known.append(incarnation)
            del known[: -self.MAX_INCARNATIONS_KEPT]
            if len(self._known_incarnations) > self.MAX_PEER_IDS_KEPT:
                oldest = next((name for name in self._known_incarnations if name not in self._links), peer_id)
                del self._known_incarnations[oldest]

    def _deliver(self, link: _Link) -> None:
        while (early := link.early.pop(link.received + 1, None)) is not None:
            header, frames = early
            link.received += 1
            link.early_bytes -= len(frames[1])
            self.early_bytes -= len(frames[1])
            link.unconfirmed_bytes += len(frames[1])
            try:
                body = codec.decode_body(frames)
            except codec.MalformedMessage as error:
                if isinstance(error, codec.InvalidBody) and header.version == PROTOCOL_VERSION:
                    self.num_invalid += 1
                    self._events.append(Invalid(link.peer, header, error.kind, str(error)))
                    continue
                self.num_malformed += 1
                self._unreadable(link, header, error)
                return
            self._events.append(Delivered(link.peer, header, body))

    def _unreadable(self, link: _Link, header: Header, error: codec.MalformedMessage) -> None:
        # A peer of another version will send such messages again, so it is refused. For one of this version only the
        # link is lost with what it carried, and the next message in either direction opens a new one.
        if header.version == PROTOCOL_VERSION:
            self._lose(link, f"{header.sender} sent a malformed message: {error}")
        else:
            reason = f"{header.sender} sent a message of protocol version {header.version} that this side cannot read"
            self._refuse(header, "malformed", f"{reason}: {error}")

    def _take_ack(self, link: _Link, ack: int, now: float) -> None:
        unacked = link.unacked
        unacked.take_acked(ack, now)
        while (message := unacked.next_to_send(now)) is not None:
            self._transmit(link, _renewed(message.header, link), message.encoded(), now)

    # -- the life of a link -------------------------------------------------------------------------------------------

    @property
    def _is_full(self) -> bool:
        return len(self._links) >= self.settings.max_peers

    def _all(self) -> list[_Link]:
        return [link for links in self._links.values() for link in links.values()]

    def _find(self, peer_id: str, incarnation: str) -> _Link | None:
        links = self._links.get(peer_id)
        return None if links is None else links.get(incarnation)

    def _proven(self, peer_id: str) -> _Link | None:
        return next((link for link in self._links.get(peer_id, {}).values() if link.is_proven), None)

    def _open(self, peer: PeerRef, now: float) -> _Link:
        self._last_number += 1
        link = _Link(number=self._last_number, peer=peer, last_received_at=now)
        self._links.setdefault(peer.peer_id, {})[peer.incarnation] = link
        return link

    def _drop(self, link: _Link) -> None:
        peer = link.peer
        if self._find(peer.peer_id, peer.incarnation) is link:
            self.early_bytes -= link.early_bytes
            del self._links[peer.peer_id][peer.incarnation]
            if not self._links[peer.peer_id]:
                del self._links[peer.peer_id]

    def _lose(self, link: _Link, reason: str, *, replaced: bool = False, by_peer: bool = False) -> None:
        self._drop(link)
        self._events.append(PeerLost(link.peer, reason, replaced, by_peer))

    def _refused(self, header: Header, body: Reject) -> None:
        """The peer refuses us."""
        if header.to_incarnation != self.me.incarnation:
            return
        link, proven = self._find(header.sender, header.incarnation), self._proven(header.sender)
        if header.to_link not in [each.number for each in (link, proven) if each is not None]:
            return
        self._replace_proven(header, f"{REPLACED}, which refuses us: {body.reason}")
        if link is not None and header.to_link == link.number:
            self._drop(link)
            self._report_refusal(link.peer, body.reason)

    def _refuse(self, header: Header, code: RejectCode, reason: str) -> None:
        """We refuse the peer. Its repeats are answered too, because the answer may get lost, but reported once."""
        self._reject(header, code, reason)
        peer = _sender_of(header)
        link = self._find(header.sender, header.incarnation)
        if link is not None:
            self._drop(link)
            self._refusals.discard((peer.peer_id, peer.incarnation))
        self._replace_proven(header, REPLACED)
        if (peer.peer_id, peer.incarnation) not in self._refusals:
            self._report_refusal(peer, reason)

    def _report_refusal(self, peer: PeerRef, reason: str) -> None:
        if len(self._refusals) >= self.MAX_REFUSALS_KEPT:
            self._refusals.clear()
        self._refusals.add((peer.peer_id, peer.incarnation))
        self._events.append(PeerRefused(peer, reason))

    def _reject(self, header: Header, code: RejectCode, reason: str) -> None:
        reply = Header(
            fingerprint=self.fingerprint,
            sender=self.me.peer_id,
            incarnation=self.me.incarnation,
            reply_to=self.me.address,
            to_incarnation=header.incarnation,
            link=0,
            to_link=header.link,
        )
        self._outgoing.append((header.reply_to, codec.encode(reply, Reject(code=code, reason=reason))))

    def _resend(self, link: _Link, now: float) -> None:
        """Repeats what is overdue, bounded, because a slow peer must not be buried in repeats."""
        num_left, bytes_left = self.MAX_RESENT_PER_TICK, self.MAX_RESENT_BYTES_PER_TICK
        for message in link.unacked.in_flight:
            if now - message.sent_at < message.wait_s:
                continue
            message.sent_at = now
            message.wait_s = min(message.wait_s * 2, self.settings.resend_at_most_s)
            self._transmit(link, _renewed(message.header, link), message.encoded(), now)
            num_left -= 1
            bytes_left -= message.held_bytes
            if num_left <= 0 or bytes_left <= 0:
                return

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
        link.unconfirmed_bytes = 0
        self._outgoing.append((link.peer.address, [codec.encode_header(header), body]))


def _renewed(header: Header, link: _Link) -> Header:
    """The header of a message that was not sent at once, or is sent again."""
    return msgspec.structs.replace(header, ack=link.received, to_link=link.peer_number)


def _sender_of(header: Header) -> PeerRef:
    return PeerRef(header.sender, header.incarnation, header.reply_to)
