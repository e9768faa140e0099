"""The link under all control messages: pure state, no socket, no clock.

Sockets drop messages silently (reconnects). A link detects this and repairs nothing: messages are numbered, a message
that is out of order ends the link, and callers start over. Until the peer is reported lost, messages are delivered
once and in order.

A link joins one incarnation of this process with one incarnation of a peer. Each side numbers its links; a link is
paired once a message of the peer has shown the peer's number. A caller may name an incarnation that was never received:
its link exists beside the paired one, and replaces it only when a message of that incarnation comes. While a link
exists, it sends `Alive` every `alive_interval_s`, which carries the number of the last message before it. A link ends
in one of two ways, each reported once:

- `PeerLost`: messages were lost or malformed, the peer was silent for `peer_timeout_s` (a router for `router_timeout_s`
  unless its process has ended), was replaced by a newer incarnation, does not take what is sent to it, or has ended the
  link.
- `PeerRefused`: one side does not accept the other's protocol version or model. The event has the reason.

A message for a link that does not exist here is answered with `Reject`, which ends the link at its sender. `Reject` is
never answered.

Incarnations sort by age (they start with the process's start time), so a message of an older one is dropped. Clocks may
be set back, so of two incarnations that both sent messages, the newer is the one whose first message came later. Link
numbers of one incarnation sort too: a message with an older number is dropped, and a newer number means that the peer
has lost this link.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvrelay.protocol import codec
from kvrelay.protocol.messages import Alive, AnyBody, Header, PeerRef, Reject, RejectCode

REPLACED = "replaced by a newer incarnation"


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Times in seconds."""

    alive_interval_s: float = 0.5
    peer_timeout_s: float = 5.0
    router_timeout_s: float = 0.0
    """A silent router whose process has not ended keeps its link for this long, if it is longer than `peer_timeout_s`:
    no client waits for a worker's judgement, and a router that stood still goes on with its streams."""
    max_peers: int = 2048  # peers with a link at a time; further ones get no answer


class Delivered(msgspec.Struct, frozen=True):
    """A message from a peer, in order, exactly once."""

    peer: PeerRef
    header: Header
    body: AnyBody


@dataclass(frozen=True, slots=True)
class PeerLost:
    """This incarnation of the peer is gone, or has lost its state of this link.

    `replaced`: messages of a newer incarnation arrived, so this process has ended. Otherwise it may still exist,
    stopped or unreachable. `is_alive`: messages between the two were lost, or the peer has declared this process lost.
    """

    peer: PeerRef
    reason: str
    replaced: bool = False
    is_alive: bool = False


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """The peer and we cannot work together; the reason is for people."""

    peer: PeerRef
    reason: str


LinkEvent = Delivered | PeerLost | PeerRefused


@dataclass(slots=True)
class _Link:
    number: int
    peer: PeerRef
    last_received_at: float
    peer_number: int = 0  # 0: no message of this incarnation has come
    num_sent: int = 0
    num_received: int = 0
    sent_bytes: int = 0
    taken_bytes: int = 0  # `sent_bytes` that the peer has received, by its last `Alive`
    received_bytes: int = 0
    last_alive_at: float = -math.inf  # time of this side's last `Alive`
    is_router: bool = False  # its messages have no fingerprint
    has_ended: bool = False  # its process refuses connections


class Links:
    """All links of one process. Methods take `now` (monotonic seconds); `take_outgoing` and `take_events` empty the
    results."""

    MAX_UNTAKEN_BYTES = 256 << 20
    """A peer that has not taken so many bytes is lost. Tokens of prompts do not count: their requests hold them."""
    MAX_REFUSALS_KEPT = 1024
    """Incarnations whose refusal is remembered, so that it is reported once."""
    MAX_INCARNATIONS_KEPT = 8
    MAX_PEER_IDS_KEPT = 4096
    """Up to `MAX_PEER_IDS_KEPT` peers are kept, each with its last `MAX_INCARNATIONS_KEPT` incarnations in order of
    arrival."""

    def __init__(
        self,
        me: PeerRef,
        fingerprint: str = "",
        settings: LinkSettings | None = None,
        why_unreachable: Callable[[str], str] = lambda address: "",
    ) -> None:
        """`why_unreachable`: why nothing can be sent to an address, or ""; no link is opened to it then."""
        self.me = me
        self.fingerprint = fingerprint
        self.settings = settings or LinkSettings()
        self.num_malformed = 0
        self.num_beyond_limit = 0  # messages of peers beyond `max_peers`
        self._why_unreachable = why_unreachable
        self._links: dict[tuple[str, str], _Link] = {}  # keyed by peer id and incarnation
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
        """Queues a message. If a newer incarnation replaced the peer, its address is of no use, there are too many
        links, or the peer takes too little, it is reported lost instead. Raises MessageTooLarge.
        """
        frames = codec.encode_body(body)
        link = self._links.get((peer.peer_id, peer.incarnation)) or self._link_to(peer, now)
        if link is None:
            return
        link.num_sent += 1
        link.sent_bytes += len(frames[0])
        untaken_bytes = link.sent_bytes - link.taken_bytes
        if untaken_bytes > self.MAX_UNTAKEN_BYTES:
            self._lose(link, f"it has not taken {untaken_bytes} bytes")
            return
        about = {"request": request, "attempt": attempt, "sequence": sequence, "trace": trace}
        header = self._header(link.peer.incarnation, link.number, link.peer_number, link.num_sent, **about)
        self._outgoing.append((link.peer.address, [codec.encode_header(header), *frames]))

    def tick(self, now: float) -> None:
        """To be called every few ten milliseconds: life signs, and the detection of silence."""
        settings = self.settings
        if self._last_tick is not None:
            # If this process itself stood still, the peers' silence in that time proves nothing: what exceeds two life
            # signs does not count. Some of it must count, or a process that is always late would never notice a death.
            stalled = now - self._last_tick - 2 * settings.alive_interval_s
            if stalled > 0:
                for link in self._links.values():
                    link.last_received_at = min(now, link.last_received_at + stalled)
        self._last_tick = now
        for link in list(self._links.values()):
            timeout_s = self._timeout_s(link)
            if now - link.last_received_at > timeout_s:
                self._lose(link, f"silent for {timeout_s:g} s")
            elif now - link.last_alive_at >= settings.alive_interval_s:
                link.last_alive_at = now
                header = self._header(link.peer.incarnation, link.number, link.peer_number, link.num_sent)
                frames = codec.encode(header, Alive(received_bytes=link.received_bytes))
                self._outgoing.append((link.peer.address, frames))

    def _timeout_s(self, link: _Link) -> float:
        if not link.is_router or link.has_ended:
            return self.settings.peer_timeout_s
        return max(self.settings.peer_timeout_s, self.settings.router_timeout_s)

    def silent_routers(self, now: float) -> list[PeerRef]:
        """Routers that have been silent for longer than other peers may be."""
        timeout_s = self.settings.peer_timeout_s
        return [
            link.peer
            for link in self._links.values()
            if link.is_router and not link.has_ended and now - link.last_received_at > timeout_s
        ]

    def process_ended(self, peer: PeerRef) -> None:
        """The process of this peer is known to have ended."""
        link = self._links.get((peer.peer_id, peer.incarnation))
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

    def silent_s(self, peer: PeerRef, now: float) -> float:
        """Seconds since the last message of this incarnation, or since the link began. Infinite without a link."""
        link = self._links.get((peer.peer_id, peer.incarnation))
        return math.inf if link is None else now - link.last_received_at

    def addresses(self) -> set[str]:
        """Returns the addresses of all peers with a link."""
        return {link.peer.address for link in self._links.values()}

    # -- what comes in ------------------------------------------------------------------------------------------------

    def receive(self, frames: Sequence[codec.Frame], now: float) -> None:
        """Takes a message off the wire."""
        try:
            header = codec.decode_header(frames)
            reject = codec.decode_body(frames) if header.link == 0 else None
        except codec.MalformedMessage:
            self.num_malformed += 1
            return
        if reject is not None:
            if isinstance(reject, Reject):
                self._rejected(header, reject)
            return
        if (refusal := codec.refusal(header, self.fingerprint)) is not None:
            self._refuse(header, *refusal)
            return
        link = self._links.get((header.sender, header.incarnation))
        is_for_us = header.to_incarnation == self.me.incarnation
        if link is None or link.peer_number != header.link:
            if not self._end_older_links(header) or (is_for_us and link is not None and header.link < link.peer_number):
                return
            if is_for_us and link is not None and link.peer_number:
                self._lose(link, "the peer lost its link to us", is_alive=True)
                link = None
        if is_for_us and header.to_link in (0, link.number if link else 0):
            self._take(header, frames, link, now)
        else:
            self._reject(header, "lost", "the link has ended here")

    def _take(self, header: Header, frames: Sequence[codec.Frame], link: _Link | None, now: float) -> None:
        """Takes a message of this link, or of a new one."""
        try:
            body = codec.decode_body(frames)
        except codec.MalformedMessage as error:
            self.num_malformed += 1
            self._end(link, header, "malformed", f"a malformed message from {header.sender}: {error}")
            return
        num_before = header.seq if isinstance(body, Alive) else header.seq - 1
        num_received = link.num_received if link is not None else 0
        if num_before != num_received:
            self._end(link, header, "gap", f"{num_before} messages were sent before one, {num_received} have come")
            return
        if link is None:
            if len(self._links) >= self.settings.max_peers:
                self.num_beyond_limit += 1
                return
            link = self._open(PeerRef(header.sender, header.incarnation, header.reply_to), now)
            if link is None:
                return
        link.peer_number = header.link
        link.last_received_at = now
        link.is_router, link.has_ended = not header.fingerprint, False
        if isinstance(body, Alive):
            link.taken_bytes = max(link.taken_bytes, body.received_bytes)
            return
        link.num_received = header.seq
        link.received_bytes += len(frames[1])
        self._events.append(Delivered(link.peer, header, body))

    def _end_older_links(self, header: Header) -> bool:
        """Ends links to older incarnations of the sender. Returns False, and does nothing, if a newer one has a paired
        link."""
        peer_id, incarnation = header.sender, header.incarnation
        others = [
            link
            for link in self._links.values()
            if link.peer.peer_id == peer_id and link.peer.incarnation != incarnation
        ]
        older = [link for link in others if self._is_newer(peer_id, incarnation, link.peer.incarnation)]
        if any(link.peer_number and link not in older for link in others):
            return False
        known = self._known_incarnations.setdefault(peer_id, [])
        if incarnation not in known:
            known.append(incarnation)
            del known[: -self.MAX_INCARNATIONS_KEPT]
            if len(self._known_incarnations) > self.MAX_PEER_IDS_KEPT:
                del self._known_incarnations[next(iter(self._known_incarnations))]
        for link in older:
            # Only messages of both incarnations prove which one is newer; the word of a caller does not.
            self._lose(link, REPLACED, replaced=link.peer.incarnation in known)
        return True

    def _is_newer(self, peer_id: str, incarnation: str, other: str) -> bool:
        """Returns whether this incarnation of the peer began after the other one."""
        known = self._known_incarnations.get(peer_id, ())
        if incarnation in known and other in known:
            return known.index(incarnation) > known.index(other)
        return incarnation > other

    # -- the life of a link -------------------------------------------------------------------------------------------

    def _link_to(self, peer: PeerRef, now: float) -> _Link | None:
        """A new link to an incarnation that a caller named; None if it is reported lost instead."""
        for link in self._links.values():
            incarnation = link.peer.incarnation
            is_other = link.peer.peer_id == peer.peer_id and link.peer_number
            if is_other and self._is_newer(peer.peer_id, incarnation, peer.incarnation):
                was_known = peer.incarnation in self._known_incarnations.get(peer.peer_id, ())
                self._events.append(PeerLost(peer, REPLACED, replaced=was_known))
                return None
        if len(self._links) >= self.settings.max_peers:
            self._events.append(PeerLost(peer, f"this process has its {self.settings.max_peers} peers: max_peers"))
            return None
        return self._open(peer, now)

    def _open(self, peer: PeerRef, now: float) -> _Link | None:
        """None if the peer is reported lost instead."""
        if reason := self._why_unreachable(peer.address):
            self._events.append(PeerLost(peer, reason))
            return None
        self._last_number += 1
        link = _Link(number=self._last_number, peer=peer, last_received_at=now)
        self._links[peer.peer_id, peer.incarnation] = link
        return link

    def _lose(self, link: _Link, reason: str, *, replaced: bool = False, is_alive: bool = False) -> None:
        del self._links[link.peer.peer_id, link.peer.incarnation]
        self._events.append(PeerLost(link.peer, reason, replaced, is_alive))

    def _end(self, link: _Link | None, header: Header, code: RejectCode, reason: str) -> None:
        """The sender's link cannot go on after this message: both sides start over."""
        self._reject(header, code, reason)
        if link is not None:
            self._lose(link, reason, is_alive=code == "gap")

    def _rejected(self, header: Header, body: Reject) -> None:
        """The peer refuses us, or has ended a link."""
        numbers = [link.number for link in self._links.values() if link.peer.peer_id == header.sender]
        is_for_us = header.to_incarnation == self.me.incarnation and header.to_link in numbers
        if not is_for_us or not self._end_older_links(header):
            return
        link = self._links.get((header.sender, header.incarnation))
        if link is None or link.number != header.to_link:
            return
        if body.code in ("version", "fingerprint"):
            del self._links[header.sender, header.incarnation]
            self._report_refusal(link.peer, body.reason)
        else:
            self._lose(link, f"it ended the link: {body.reason}", is_alive=body.code != "malformed")

    def _refuse(self, header: Header, code: RejectCode, reason: str) -> None:
        """We refuse the peer. Each of its messages is answered, because an answer may get lost, but reported once."""
        self._reject(header, code, reason)
        if not self._end_older_links(header):
            return
        key = header.sender, header.incarnation
        if self._links.pop(key, None) is not None or key not in self._refusals:
            self._report_refusal(PeerRef(header.sender, header.incarnation, header.reply_to), reason)

    def _report_refusal(self, peer: PeerRef, reason: str) -> None:
        if len(self._refusals) >= self.MAX_REFUSALS_KEPT:
            self._refusals.clear()
        self._refusals.add((peer.peer_id, peer.incarnation))
        self._events.append(PeerRefused(peer, reason))

    def _reject(self, header: Header, code: RejectCode, reason: str) -> None:
        reply = self._header(header.incarnation, 0, header.link, 0)
        self._outgoing.append((header.reply_to, codec.encode(reply, Reject(code=code, reason=reason))))

    def _header(self, to_incarnation: str, link: int, to_link: int, seq: int, **about: Any) -> Header:
        return Header(
            fingerprint=self.fingerprint,
            sender=self.me.peer_id,
            incarnation=self.me.incarnation,
            reply_to=self.me.address,
            to_incarnation=to_incarnation,
            link=link,
            to_link=to_link,
            seq=seq,
            **about,
        )
