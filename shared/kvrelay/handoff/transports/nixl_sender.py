"""The sending end over NIXL: one agent, whose writes the sender's thread posts (see `sender_thread`).

`outbox` decides which piece is written next; this module has the agent and the clock. A push is cut into pieces of at
most 64 MiB. Each piece is one posted write with its own notification: posting may block for the copy, and commands
(above all an abort) are carried out between two pieces. A piece's blocks are sorted by source, so that neighbours
become one write.

A part of a block, some heads of each row, has short runs. If the peer is a process on this machine, all runs of a
piece but the last are written with `process_memory`; UCX would make a system call for each. The last run is posted with
the notification, so a peer that does not answer is found as for other pieces. If `process_memory` fails, NIXL writes
all runs.

A peer is known by its agent's name, which changes with each start. Its states:

1. OPEN    its metadata is loaded and its pool's descriptors are prepared.
2. BROKEN  a write failed or hung, and with it all waiting pieces. No more writes are posted, and pushes fail at once
           for `retry_after_s`. A later push connects again. If the writes were only slow, as those to a process that
           was stopped, the connection is OPEN again when the last of them is complete.

UCX 1.23 sometimes never finishes a write and reports nothing, while it connects or later. So a write that is not
complete after `stall_timeout_s`, and the time its bytes take at `slow_bytes_per_s`, breaks the connection: its pieces
are reported as failed at once. If no write over the connection was ever complete, closing it ends its writes. Otherwise
it stays open: once its peer is removed, NIXL reports an error for each write without asking UCX, which may still carry
the write out.

A write that is in flight cannot be taken back: an aborted reservation has drained when the last of its writes is
complete or failed, however long a stopped peer makes that last. A write that UCX never ends keeps its reservation from
draining for ever.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvrelay.awake_clock import AwakeClock
from kvrelay.handoff.transports.base import MalformedEndpoint, SenderEvent
from kvrelay.handoff.transports.nixl_agent import NixlAgent, NixlEndpoint, NixlError, Region, Write
from kvrelay.handoff.transports.outbox import Copies, InFlightSend, Outbox, Piece
from kvrelay.handoff.transports.pool_memory import BlockPart, PartCopy, PoolChecksums, PoolLike, as_pool
from kvrelay.handoff.transports.process_memory import ProcessMemory
from kvrelay.handoff.transports.sender_thread import QueuedPush, SenderThread
from kvrelay.handoff.transports.wire import Indices
from kvrelay.process_identity import can_be_seen

log = logging.getLogger(__name__)

POLL_S = 0.0001
SLOW_POLL_S = 0.005
SLOW_AFTER_S = 1.0
"""Writes that have made no progress for this long are polled less often."""
PROGRESS_INTERVAL_S = 1.0
"""UCX accepts connections in a thread of its own, but closes those that their peers have ended, such as a port scan's,
only while it is called."""


@dataclass(frozen=True, slots=True)
class NixlSettings:
    """`piece_bytes` and `piece_blocks` bound one write, and thereby how long posting may delay an abort (10 to
    20 ms for 64 MiB by memory copy); `window` of them per receiver may be in flight at once. `slow_bytes_per_s`: a
    connection that is slower may be taken for a broken one. A receiver that was not used for `idle_forget_s` is
    disconnected. `close` waits `close_timeout_s` for writes in flight.
    """

    ucx_transports: str = ""
    ucx_devices: str = ""
    piece_bytes: int = 64 << 20
    piece_blocks: int = 4096
    window: int = 2
    stall_timeout_s: float = 3.0
    slow_bytes_per_s: float = 20e6
    retry_after_s: float = 10.0
    idle_forget_s: float = 300.0
    close_timeout_s: float = 1.0


@dataclass(slots=True, eq=False)
class NixlPeer:
    region: Region
    blocks: Any
    parts: dict[BlockPart, Any] = field(default_factory=dict)
    memory: ProcessMemory | None = None  # may be written without NIXL
    is_connected: bool = False  # a write was complete


@dataclass(slots=True)
class _Broken:
    error: str
    until: float
    has_failed: bool  # NIXL reported an error; else a write was only slow


@dataclass(frozen=True, slots=True)
class _PostedWrite:
    send: InFlightSend
    write: Write
    stalled_at: float  # time of the sender's AwakeClock


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
        self._settings = settings = settings or NixlSettings()
        memory = as_pool(pool)  # kept alive: UCX reads there
        memory.enter_thread()
        self._region = Region.of(memory)
        self._agent = NixlAgent(self._region, ucx_transports=settings.ucx_transports, ucx_devices=settings.ucx_devices)
        outbox = Outbox(
            memory.block_bytes,
            window=settings.window,
            drain_timeout_s=math.inf,
            idle_close_s=settings.idle_forget_s,
            is_acknowledged=True,
        )
        super().__init__("kv-sender-nixl", memory, outbox, checksums)
        self._parts: dict[BlockPart, Any] = {}
        self._peers: dict[str, NixlPeer] = {}
        self._broken: dict[str, _Broken] = {}  # also in `_peers` while writes are in flight
        self._in_flight: list[_PostedWrite] = []
        self._clock = AwakeClock()
        self._moved_at = 0.0
        self._progress_at = 0.0

    def close(self) -> None:
        """Stops the thread, and leaves UCX if the thread has ended. Idempotent."""
        super().close()
        if self.has_ended:
            self._agent.close()

    def _enter_thread(self) -> None:
        self._blocks = self._agent.prepare(self._region)

    def _enqueue(self, push: QueuedPush) -> None:
        """Connects to the peer first if it is new."""
        endpoint = NixlEndpoint.decode(push.endpoint)
        peer = self._peer_at(endpoint)
        self._check(push, peer)
        if push.part is not None:
            self._prepare_part(push.part, endpoint.agent, peer)
        self.outbox.push(endpoint.agent, push.reservation, self._cut(push))

    def _leave_thread(self) -> None:
        """Waits up to `close_timeout_s` for writes in flight, then releases all descriptors."""
        deadline = time.monotonic() + self._settings.close_timeout_s
        while self._in_flight and time.monotonic() < deadline:
            self._collect()
            time.sleep(POLL_S)
        for name in list(self._peers):
            self._forget(name)
        for prepared in (self._blocks, *self._parts.values()):
            self._agent.discard(prepared)

    def _patience_s(self) -> float:
        """NIXL offers no event to wait for, so writes in flight are polled."""
        now = time.monotonic()
        if self._in_flight:
            return POLL_S if now - self._moved_at < SLOW_AFTER_S else SLOW_POLL_S
        deadline = self.outbox.next_deadline()
        return PROGRESS_INTERVAL_S if deadline is None else min(PROGRESS_INTERVAL_S, max(POLL_S, deadline - now))

    def _peer_at(self, endpoint: NixlEndpoint) -> NixlPeer:
        if (broken := self._broken.get(endpoint.agent)) is not None:
            if endpoint.agent in self._peers or time.monotonic() < broken.until:
                raise NixlError(broken.error)
            del self._broken[endpoint.agent]  # the thread may have slept since: `expire` comes after a push
        peer = self._peers.get(endpoint.agent)
        if peer is None:
            name = self._agent.add_peer(endpoint.metadata)
            if name != endpoint.agent:
                raise MalformedEndpoint(f"the metadata is that of {name}, not of {endpoint.agent}")
            blocks = self._agent.prepare(endpoint.region, name)
            peer = self._peers[name] = NixlPeer(endpoint.region, blocks, memory=self._memory_of(endpoint))
        return peer

    def _memory_of(self, endpoint: NixlEndpoint) -> ProcessMemory | None:
        """None if the peer's memory cannot or must not be written without NIXL: a list of UCX transports holds for all
        bytes."""
        is_restricted = self._settings.ucx_transports or "UCX_TLS" in os.environ
        on_host = self._region.segment == endpoint.region.segment == "DRAM"
        if not on_host or is_restricted or not can_be_seen(endpoint.process):
            return None
        try:
            return ProcessMemory(endpoint.process)
        except OSError as error:
            log.info("%s: NIXL writes each run of bytes for itself: %s", endpoint.agent, error)
            return None

    def _check(self, push: QueuedPush, peer: NixlPeer) -> None:
        """Raises MalformedEndpoint. NIXL does not check at the other end where a write goes."""
        here, there = self._region.block_bytes, peer.region.block_bytes
        wanted = (here, here) if push.part is None else (push.part.source.block_bytes, push.part.target.block_bytes)
        if (here, there) != wanted:
            raise MalformedEndpoint(f"blocks of {there} bytes there, {here} here; {wanted[1]} and {wanted[0]} expected")
        if push.copies.slots.max() >= peer.region.num_blocks:
            raise MalformedEndpoint(f"slot {push.copies.slots.max()} in a pool of {peer.region.num_blocks} blocks")

    def _prepare_part(self, part: PartCopy, name: str, peer: NixlPeer) -> None:
        """Descriptors of a part are prepared at its first push."""
        source, target = part.runs()
        if source not in self._parts:
            self._parts[source] = self._agent.prepare(self._region, part=source)
        if target not in peer.parts:
            peer.parts[target] = self._agent.prepare(peer.region, name, target)

    def _cut(self, push: QueuedPush) -> Iterator[Piece]:
        settings, part = self._settings, push.part
        num_bytes, num_rows = (
            (self._region.block_bytes, 1) if part is None else (part.source.size, part.runs()[0].num_rows)
        )
        step = max(1, min(settings.piece_bytes // num_bytes, settings.piece_blocks // num_rows))
        ordered = push.copies.take(np.argsort(push.copies.sources, kind="stable"))
        for first in range(0, len(ordered), step):
            yield Piece(push.reservation, ordered.take(slice(first, first + step)), direct=True, part=part)

    def _post(self, piece: Piece, peer: NixlPeer, header: bytes) -> Write:
        sources, slots, part = piece.copies.sources, piece.copies.slots, piece.part
        if part is None:
            return self._agent.post(self._blocks, sources, peer.blocks, slots, header)
        source, target = runs = part.runs()
        rows, target_rows = _rows_of(sources, source.num_rows), _rows_of(slots, target.num_rows)
        if source.num_rows > 1 and self._write_all_but_last(piece.copies, runs, peer):
            rows, target_rows = rows[-1:], target_rows[-1:]
        return self._agent.post(self._parts[source], rows, peer.parts[target], target_rows, header)

    def _write_all_but_last(self, copies: Copies, runs: tuple[BlockPart, BlockPart], peer: NixlPeer) -> bool:
        """Returns whether all runs of a piece but the last are at the peer."""
        if peer.memory is None:
            return False
        source, target = runs
        sources = self._region.addresses(copies.sources, source)
        targets = peer.region.addresses(copies.slots, target)
        try:
            peer.memory.write(sources[:-1], targets[:-1], source.num_bytes)
        except OSError as error:
            log.info("NIXL writes each run of bytes for itself: %s", error)
            peer.memory.close()
            peer.memory = None
            return False
        return True

    def _send(self, in_flight: InFlightSend) -> list[SenderEvent]:
        """Posts a write, which may take as long as the copy itself."""
        piece, peer = in_flight.piece, self._peers[in_flight.peer]
        header = self._header_of(piece)
        began = time.perf_counter()
        try:
            write = self._post(piece, peer, header)
        except NixlError as error:
            return self._failed(in_flight, error)
        finally:
            self.counters.post_s += time.perf_counter() - began
        self._moved_at = time.monotonic()
        self._count(piece)
        stalled_at = self._clock.read(self._moved_at) + self._allowed_s(in_flight)
        self._in_flight.append(_PostedWrite(in_flight, write, stalled_at))
        return []

    def _allowed_s(self, in_flight: InFlightSend) -> float:
        """How long a write may take that is posted now, behind those in flight, which may use the same network card."""
        pieces = [in_flight.piece, *(flight.send.piece for flight in self._in_flight)]
        num_bytes = sum(len(piece.copies) * piece.bytes_per_block(self._region.block_bytes) for piece in pieces)
        return self._settings.stall_timeout_s + num_bytes / self._settings.slow_bytes_per_s

    def _collect(self) -> list[SenderEvent]:
        """Returns the events of writes that have ended or hang."""
        events: list[SenderEvent] = []
        now = self._clock.read(time.monotonic())
        for flight in list(self._in_flight):
            try:
                if not self._agent.poll(flight.write):
                    if now >= flight.stalled_at and flight.send.peer not in self._broken:
                        events += self._stalled(flight.send.peer)
                    continue
            except NixlError as error:
                self._end(flight)
                events += self._failed(flight.send, error)
            else:
                self._end(flight)
                self._peers[flight.send.peer].is_connected = True
                events += self.outbox.complete(flight.send.number, time.monotonic())[1]
                self._settle(flight.send.peer)
        return events

    def _writes_to(self, name: str) -> list[_PostedWrite]:
        return [flight for flight in self._in_flight if flight.send.peer == name]

    def _stalled(self, name: str) -> list[SenderEvent]:
        error = f"a write made no progress for {self._settings.stall_timeout_s:g} s"
        self._break(name, error, has_failed=False)
        events = self.outbox.fail_peer(name, f"NIXL: {error}", time.monotonic())
        if not self._peers[name].is_connected:
            self._disconnect(name)
        return events

    def _break(self, name: str, error: str, *, has_failed: bool) -> None:
        if name not in self._broken:
            log.warning("the connection to %s is not used for %g s: %s", name, self._settings.retry_after_s, error)
            self._broken[name] = _Broken(error, time.monotonic() + self._settings.retry_after_s, has_failed)
            self.counters.num_resets += 1
        self._broken[name].has_failed |= has_failed

    def _end(self, flight: _PostedWrite) -> None:
        self._in_flight.remove(flight)
        self._moved_at = time.monotonic()
        self._agent.end(flight.write)

    def _failed(self, in_flight: InFlightSend, error: NixlError) -> list[SenderEvent]:
        self._break(in_flight.peer, str(error), has_failed=True)
        events = self.outbox.fail(in_flight.number, f"NIXL: {error}", time.monotonic())
        self._settle(in_flight.peer)
        return events

    def _expire(self) -> list[SenderEvent]:
        """Forgets peers that were not used for `idle_forget_s`, allows new connections to broken ones in time, and lets
        UCX close the connections of strangers."""
        now = time.monotonic()
        if now >= self._progress_at:
            self._progress_at = now + PROGRESS_INTERVAL_S
            with suppress(NixlError):
                self._agent.notifications()  # a sender awaits none
        for name in self.outbox.expire(now).idle:
            if name in self._peers:
                self._forget(name)
        for name in [name for name, broken in self._broken.items() if broken.until <= now]:
            if name not in self._peers:
                del self._broken[name]
        return []

    def _settle(self, name: str) -> None:
        """Once nothing is in flight over a broken connection, it is closed, or open again if no write failed."""
        if name not in self._broken or name not in self._peers or self._writes_to(name):
            return
        if self._broken[name].has_failed:
            self._forget(name)
        else:
            log.info("the connection to %s is used again: its writes were slow, and are complete", name)
            del self._broken[name]

    def _forget(self, name: str) -> None:
        peer = self._peers.pop(name)
        if peer.memory is not None:
            peer.memory.close()
        for prepared in (peer.blocks, *peer.parts.values()):
            self._agent.discard(prepared)
        self._disconnect(name)

    def _disconnect(self, name: str) -> None:
        try:
            self._agent.forget_peer(name)
        except NixlError as error:
            log.warning("%s: %s", name, error)


def _rows_of(blocks: Indices, num_rows: int) -> Indices:
    """The numbers of the descriptors of all rows of blocks."""
    rows: Indices = (blocks[:, None] * num_rows + np.arange(num_rows)).reshape(-1)
    return rows
