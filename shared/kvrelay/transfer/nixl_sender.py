"""The sending end over NIXL: one agent, whose writes the sender's thread posts (see `sender_thread`).

`outbox` decides which piece is written next; this module has the agent and the clock. A push is cut into pieces of at
most 64 MiB. Each piece is one posted write with its own notification: posting may block for the copy, and commands
(above all an abort) are carried out between two pieces. A piece's blocks are sorted by source, so that neighbours
become one write.

A peer is known by its agent's name, which changes with each start. Its states:

1. CONNECTING  its metadata is loaded and its pool's descriptors are prepared; no write has completed. UCX 1.23
               sometimes never finishes connecting and reports nothing (over TCP with several network devices, about
               once in some hundred connections), so after `connect_timeout_s` the connection is closed, which ends its
               writes.
2. CONNECTED   a write has completed.
3. BROKEN      a write failed, and with it all waiting pieces. No more writes are posted. The peer is forgotten when its
               last write has ended, and a later push connects again.

A write that is in flight cannot be taken back: an aborted reservation has drained when the last of its writes is
complete or failed, however long a stopped peer makes that last.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np

from kvrelay.transfer.base import SenderEvent
from kvrelay.transfer.checksums import PoolChecksums
from kvrelay.transfer.counters import SenderCounters
from kvrelay.transfer.endpoints import MalformedEndpoint
from kvrelay.transfer.nixl_agent import NixlAgent, NixlError, Region, Write
from kvrelay.transfer.nixl_endpoint import NixlEndpoint
from kvrelay.transfer.outbox import InFlightSend, Outbox
from kvrelay.transfer.plan import Copies, Piece
from kvrelay.transfer.pool_memory import PoolLike, as_pool
from kvrelay.transfer.sender_thread import Push, SenderThread, TransportDriver
from kvrelay.transfer.wire import encode_header

log = logging.getLogger(__name__)

POLL_S = 0.0001
SLOW_POLL_S = 0.005
SLOW_AFTER_S = 1.0
"""Writes that have made no progress for this long are polled less often."""
IDLE_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class NixlSettings:
    """`piece_bytes` and `piece_blocks` bound one write, and thereby how long posting may delay an abort (10 to
    20 ms for 64 MiB by memory copy); `window` of them per receiver may be in flight at once. A receiver that was not
    used for `idle_forget_s` is disconnected. `close` waits `close_timeout_s` for writes in flight.
    """

    ucx_transports: str = ""
    piece_bytes: int = 64 << 20
    piece_blocks: int = 4096
    window: int = 2
    connect_timeout_s: float = 3.0
    idle_forget_s: float = 300.0
    close_timeout_s: float = 1.0


class NixlPeerState(Enum):
    """The module's docstring describes each state."""

    CONNECTING = auto()
    CONNECTED = auto()
    BROKEN = auto()


@dataclass(slots=True, eq=False)
class _Peer:
    region: Region
    blocks: Any
    state: NixlPeerState = NixlPeerState.CONNECTING
    error: str = ""  # set in BROKEN


@dataclass(frozen=True, slots=True)
class _PostedWrite:
    send: InFlightSend
    write: Write
    posted_at: float


class NixlSender(SenderThread):
    """Pushes blocks out of `pool`, or of an array as `as_pool` takes it.

    `SenderDrained` comes when nothing is in flight any more. With `checksums`, the notification of a write carries
    those of its blocks. Raises ValueError for a pool of another kind, TransportUnavailable where NIXL or UCX does not
    work.
    """

    name = "nixl"

    def __init__(
        self, pool: PoolLike, *, settings: NixlSettings | None = None, checksums: PoolChecksums | None = None
    ) -> None:
        self._settings = settings or NixlSettings()
        self._checksums = checksums
        self._pool = as_pool(pool)  # kept alive: UCX reads there
        self._pool.enter_thread()
        self._region = Region.of(self._pool)
        self._agent = NixlAgent(self._region, ucx_transports=self._settings.ucx_transports)
        super().__init__("kv-sender-nixl", self._region.num_blocks, self._driver)

    def close(self) -> None:
        """Stops the thread, and leaves UCX if the thread has ended. Idempotent."""
        super().close()
        if self.has_ended:
            self._agent.close()

    def _driver(self, wake: Callable[[], None]) -> TransportDriver:
        self._pool.enter_thread()
        return _NixlDriver(self._agent, self._region, self._settings, self._checksums, self.counters)


class _NixlDriver:
    """Owns the agent, the peers and the writes in flight."""

    def __init__(
        self,
        agent: NixlAgent,
        region: Region,
        settings: NixlSettings,
        checksums: PoolChecksums | None,
        counters: SenderCounters,
    ) -> None:
        self._agent = agent
        self._region = region
        self._settings = settings
        self._checksums = checksums
        self._counters = counters
        self._blocks = agent.prepare(region)
        self.outbox = Outbox(
            region.block_bytes, window=settings.window, drain_timeout_s=math.inf, idle_close_s=settings.idle_forget_s
        )
        self._peers: dict[str, _Peer] = {}
        self._in_flight: list[_PostedWrite] = []
        self._moved_at = 0.0

    def enqueue(self, push: Push) -> None:
        """Connects to the peer first if it is new."""
        endpoint = NixlEndpoint.decode(push.endpoint)
        self._check(push.copies, self._peer_at(endpoint))
        self.outbox.push(endpoint.agent, self._cut(push.reservation, push.copies))

    def close(self) -> None:
        """Waits up to `close_timeout_s` for writes in flight, then releases all descriptors."""
        deadline = time.monotonic() + self._settings.close_timeout_s
        while self._in_flight and time.monotonic() < deadline:
            self.collect()
            time.sleep(POLL_S)
        for name in list(self._peers):
            self._forget(name)
        self._agent.discard(self._blocks)

    def patience_s(self) -> float:
        """NIXL offers no event to wait for, so writes in flight are polled."""
        now = time.monotonic()
        if self._in_flight:
            return POLL_S if now - self._moved_at < SLOW_AFTER_S else SLOW_POLL_S
        deadline = self.outbox.next_deadline()
        return IDLE_WAIT_S if deadline is None else min(IDLE_WAIT_S, max(POLL_S, deadline - now))

    def _peer_at(self, endpoint: NixlEndpoint) -> _Peer:
        peer = self._peers.get(endpoint.agent)
        if peer is None:
            name = self._agent.add_peer(endpoint.metadata)
            if name != endpoint.agent:
                raise MalformedEndpoint(f"the metadata is that of {name}, not of {endpoint.agent}")
            peer = self._peers[name] = _Peer(endpoint.region, self._agent.prepare(endpoint.region, name))
        if peer.state is NixlPeerState.BROKEN:
            raise NixlError(peer.error)
        return peer

    def _check(self, copies: Copies, peer: _Peer) -> None:
        """Raises MalformedEndpoint. NIXL does not check at the other end where a write goes."""
        if peer.region.block_bytes != self._region.block_bytes:
            raise MalformedEndpoint(f"blocks of {peer.region.block_bytes} bytes there, {self._region.block_bytes} here")
        if copies.slots.max() >= peer.region.num_blocks:
            raise MalformedEndpoint(f"slot {copies.slots.max()} in a pool of {peer.region.num_blocks} blocks")

    def _cut(self, reservation: str, copies: Copies) -> Iterator[Piece]:
        settings = self._settings
        step = max(1, min(settings.piece_bytes // self._region.block_bytes, settings.piece_blocks))
        ordered = copies.take(np.argsort(copies.sources, kind="stable"))
        for first in range(0, len(ordered), step):
            yield Piece(reservation, ordered.take(slice(first, first + step)), direct=True)

    def send(self, in_flight: InFlightSend) -> list[SenderEvent]:
        """Posts a write, which may take as long as the copy itself."""
        copies, peer = in_flight.piece.copies, self._peers[in_flight.peer]
        checksums = None if self._checksums is None else self._checksums.of(copies.sources)
        header = encode_header(
            in_flight.piece.reservation, self._region.block_bytes, copies.indices, copies.slots, checksums
        )
        began = time.perf_counter()
        try:
            write = self._agent.post(self._blocks, copies.sources, peer.blocks, copies.slots, header)
        except NixlError as error:
            return self._failed(in_flight, error)
        finally:
            self._counters.post_s += time.perf_counter() - began
        self._moved_at = time.monotonic()
        self._counters.num_messages += 1
        self._counters.num_blocks += len(copies)
        self._counters.num_runs += copies.num_runs
        self._counters.num_bytes += len(copies) * self._region.block_bytes
        self._in_flight.append(_PostedWrite(in_flight, write, self._moved_at))
        return []

    def collect(self) -> list[SenderEvent]:
        """Returns the events of writes that have ended."""
        events: list[SenderEvent] = []
        for flight in list(self._in_flight):
            try:
                if not self._agent.poll(flight.write):
                    self._check_connect_timeout(flight)
                    continue
            except NixlError as error:
                self._end(flight)
                events += self._failed(flight.send, error)
            else:
                self._note_connected(self._peers[flight.send.peer])
                self._end(flight)
                events += self.outbox.complete(flight.send.number, time.monotonic()).events
        return events

    @staticmethod
    def _note_connected(peer: _Peer) -> None:
        if peer.state is NixlPeerState.CONNECTING:  # a write may still complete after another one failed
            peer.state = NixlPeerState.CONNECTED

    def _check_connect_timeout(self, flight: _PostedWrite) -> None:
        peer, settings = self._peers[flight.send.peer], self._settings
        is_due = time.monotonic() - flight.posted_at >= settings.connect_timeout_s
        if peer.state is not NixlPeerState.CONNECTING or not is_due:
            return
        peer.state, peer.error = NixlPeerState.BROKEN, f"no connection within {settings.connect_timeout_s:g} s"
        log.warning("%s: %s", flight.send.peer, peer.error)
        self._disconnect(flight.send.peer)

    def _end(self, flight: _PostedWrite) -> None:
        self._in_flight.remove(flight)
        self._moved_at = time.monotonic()
        self._agent.end(flight.write)

    def _failed(self, in_flight: InFlightSend, error: NixlError) -> list[SenderEvent]:
        peer = self._peers[in_flight.peer]
        if peer.state is not NixlPeerState.BROKEN:
            log.warning("the connection to %s broke: %s", in_flight.peer, error)
            peer.state, peer.error = NixlPeerState.BROKEN, str(error)
        self._counters.num_resets += 1
        events = self.outbox.fail(in_flight.number, f"NIXL: {error}", time.monotonic())
        if not any(flight.send.peer == in_flight.peer for flight in self._in_flight):
            self._forget(in_flight.peer)
        return events

    def expire(self) -> None:
        """Forgets peers that were not used for `idle_forget_s`."""
        for name in self.outbox.expire(time.monotonic()).idle:
            if name in self._peers:
                self._forget(name)

    def _forget(self, name: str) -> None:
        peer = self._peers.pop(name)
        self._agent.discard(peer.blocks)
        self._disconnect(name)

    def _disconnect(self, name: str) -> None:
        try:
            self._agent.forget_peer(name)
        except NixlError as error:
            log.warning("%s: %s", name, error)
