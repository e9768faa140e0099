"""The thread that all receivers share the code of: it checks messages against the write permits and lands blocks.

A slot has a permit from `admit` until its block has landed or the reservation is released. So a block lands once, and a
repeated push cannot change a slot that decode already reads. With checksums a block lands only if its bytes are those
that were sent; other blocks are reported as `Corrupted`.

A lock guards the permits. The event loop takes it too, so it is not held while bytes are copied or summed. Instead the
reservation that is being copied is noted, and only the release of that reservation waits.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Condition, Thread
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvrelay.handoff.transports.base import Corrupted, Landed, LoopPort, ReceiverEvent
from kvrelay.handoff.transports.pool_memory import BlockPart, PoolLike, as_pool, checksums_of
from kvrelay.handoff.transports.wire import BlocksHeader, Bytes, Checksums, Indices, MalformedBlocks, decode_header

log = logging.getLogger(__name__)

MAX_NOT_AWAITED = 4096
"""Reservations that are remembered. Late messages come within seconds of a release."""


DropCause = Literal[
    "malformed",
    "unknown_reservation",
    "block_bytes",
    "part",
    "size",
    "index",
    "slot",
    "repeated_index",
    "duplicate",
    "checksum",
]


@dataclass(slots=True)
class ReceiverCounters:
    """Totals since start; `num_blocks` and `num_bytes` are those written, without what was dropped."""

    num_messages: int = 0
    num_blocks: int = 0
    num_bytes: int = 0
    dropped: Counter[DropCause] = field(default_factory=Counter)
    """Messages by cause."""
    num_duplicate_blocks: int = 0
    """Blocks of accepted messages that had landed before, and were skipped."""


class Dropped(Exception):
    """The message must not be written. `cause` is for the counters."""

    def __init__(self, cause: DropCause) -> None:
        super().__init__(cause)
        self.cause: DropCause = cause


@dataclass(slots=True, eq=False)
class _Admitted:
    first_block: int
    slots: Indices
    parts: tuple[BlockPart | None, ...]  # that make up each block; None: the whole block
    landed: NDArray[np.bool_]  # [parts, blocks]

    @property
    def is_whole(self) -> NDArray[np.bool_]:
        """[blocks]: whether all parts of a block have landed."""
        whole: NDArray[np.bool_] = np.logical_and.reduce(self.landed, axis=0)
        return whole


@dataclass(frozen=True, slots=True, eq=False)
class Writes:
    """Rows of a data frame and the slots they go to, int64 of equal shape [num_blocks]; blocks by prompt index."""

    rows: Indices
    slots: Indices
    blocks: tuple[int, ...]
    part: BlockPart | None = None  # the part of each slot that is written; None: all of it

    def take(self, which: NDArray[np.bool_]) -> Writes:
        """Those for which `which`, of shape [num_blocks], holds."""
        if which.all():
            return self
        chosen = np.flatnonzero(which)
        return Writes(self.rows[chosen], self.slots[chosen], tuple(self.blocks[i] for i in chosen.tolist()), self.part)


class WritePermits:
    """Permits to write into the slots of a pool of `num_blocks` blocks of `block_bytes` bytes. Not thread-safe."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self._num_blocks = num_blocks
        self._block_bytes = block_bytes
        self._admitted: dict[str, _Admitted] = {}
        self._permitted = np.zeros(num_blocks, np.bool_)

    def __len__(self) -> int:
        return len(self._admitted)

    def __contains__(self, reservation: str) -> bool:
        return reservation in self._admitted

    def admit(self, reservation: str, first_block: int, slots: Sequence[int], parts: Sequence[BlockPart] = ()) -> None:
        """Without `parts` blocks come whole, otherwise in these parts, which may not overlap.

        Raises ValueError, changing nothing, for a reservation or slot in use, for a slot outside the pool and for parts
        of other blocks.
        """
        wanted = np.array(slots, np.int64)
        if reservation in self._admitted:
            raise ValueError(f"reservation {reservation} is admitted already")
        if wanted.size and (wanted.min() < 0 or wanted.max() >= self._num_blocks):
            raise ValueError(f"slots {wanted.min()}..{wanted.max()} in a pool of {self._num_blocks} blocks")
        if np.unique(wanted).size != wanted.size or self._permitted[wanted].any():
            raise ValueError(f"a slot of reservation {reservation} is named twice, or another reservation's")
        if any(part.block_bytes != self._block_bytes for part in parts):
            raise ValueError(f"parts of blocks that do not have {self._block_bytes} bytes: {list(parts)}")
        self._permitted[wanted] = True
        ways = tuple(parts) or (None,)
        self._admitted[reservation] = _Admitted(first_block, wanted, ways, np.zeros((len(ways), wanted.size), np.bool_))

    def release(self, reservation: str) -> None:
        """Forgets a reservation; an unknown one is no error."""
        admitted = self._admitted.pop(reservation, None)
        if admitted is not None:
            self._permitted[admitted.slots[~admitted.is_whole]] = False

    def check(self, header: BlocksHeader, data_bytes: int) -> Writes:
        """Returns the rows of this message that must be written. Changes nothing. Raises Dropped."""
        admitted = self._admitted.get(header.reservation)
        if admitted is None:
            raise Dropped("unknown_reservation")
        if not 0 <= header.part < len(admitted.parts):
            raise Dropped("part")
        part = admitted.parts[header.part]
        if header.block_bytes != (self._block_bytes if part is None else part.size):
            raise Dropped("block_bytes")
        indices = header.indices
        if data_bytes != indices.size * header.block_bytes:
            raise Dropped("size")
        offsets = indices - admitted.first_block
        if offsets.min() < 0 or offsets.max() >= admitted.slots.size:
            raise Dropped("index")
        if np.unique(offsets).size != offsets.size:
            raise Dropped("repeated_index")
        slots = admitted.slots[offsets]
        if not np.array_equal(slots, header.slots):
            raise Dropped("slot")
        rows = np.flatnonzero(~admitted.landed[header.part, offsets])
        if not rows.size:
            raise Dropped("duplicate")
        return Writes(rows, slots[rows], tuple(indices[rows].tolist()), part)

    def land(self, reservation: str, blocks: Sequence[int], part: int = 0) -> tuple[int, ...]:
        """This part of blocks that `check` returned has been written into their slots.

        Returns the blocks of which all parts have landed now.
        """
        admitted = self._admitted[reservation]
        offsets = np.array(blocks, np.int64) - admitted.first_block
        admitted.landed[part, offsets] = True
        if len(admitted.parts) > 1:
            offsets = offsets[admitted.is_whole[offsets]]
        self._permitted[admitted.slots[offsets]] = False
        return tuple((offsets + admitted.first_block).tolist())


class ReceiverThread:
    """A receiver into a pool. Subclasses say in `_serve` how messages come, and pass each to `_take`.

    A message of a reservation that was never admitted waits for that for up to `admission_wait_s`, once for each
    reservation: with several ranks, the sender may learn of a reservation before this rank has admitted it.

    Raises ValueError for an array that is no pool, or not writable.
    """

    def __init__(self, thread_name: str, pool: PoolLike, *, admission_wait_s: float = 0.0) -> None:
        self._thread_name = thread_name
        self._pool = as_pool(pool, writable=True)
        self._pool.enter_thread()  # a subclass may make objects of its library on this thread
        self._permits = WritePermits(self._pool.num_blocks, self._pool.block_bytes)
        self._changed = Condition()  # guards the permits and `_copying`
        self._admission_wait_s = admission_wait_s
        self._not_awaited: dict[str, None] = {}  # reservations that were released or did not come in time
        self._copying: str | None = None  # the reservation into whose slots a message is copied
        self.counters = ReceiverCounters()
        self._thread: Thread | None = None
        self._closed = False

    def start(self, on_event: Callable[[ReceiverEvent], None]) -> None:
        self._port = port = LoopPort(on_event)
        thread = Thread(target=self._run, args=(port,), name=self._thread_name, daemon=True)
        thread.start()
        self._thread = thread

    def admit(self, reservation: str, first_block: int, slots: Sequence[int], parts: Sequence[BlockPart] = ()) -> None:
        """Raises ValueError as `WritePermits.admit` does."""
        with self._changed:
            self._permits.admit(reservation, first_block, slots, parts)
            self._changed.notify_all()

    def release(self, reservation: str) -> None:
        """If a message is being copied into the slots, waits for that copy."""
        with self._changed:
            # Released before the wait: afterwards no further message of the reservation starts to be copied.
            self._permits.release(reservation)
            self._await_no_more(reservation)
            while self._copying == reservation:
                self._changed.wait()

    def _run(self, port: LoopPort[ReceiverEvent]) -> None:
        try:
            self._pool.enter_thread()
            self._serve(port.emit)
        except Exception as error:
            port.report_crash(self._thread_name, error)
        finally:
            self._leave_thread()

    def _leave_thread(self) -> None:
        """Runs last on the thread, whatever ended it."""

    def _serve(self, emit: Callable[[ReceiverEvent], None]) -> None:
        """Takes messages until closed."""
        raise NotImplementedError

    def _take(self, header_bytes: bytes | memoryview, data: memoryview | None) -> list[ReceiverEvent]:
        """One message, on the thread that takes all of them. `data`: its blocks back to back, to be copied; None: they
        are in their slots already."""
        self.counters.num_messages += 1
        try:
            header = decode_header(header_bytes)
            return self._check_and_land(header, data)
        except MalformedBlocks as error:
            self._malformed(error)
        except Dropped as dropped:
            self.counters.dropped[dropped.cause] += 1
        return []

    def _malformed(self, error: MalformedBlocks) -> None:
        self.counters.dropped["malformed"] += 1
        log.warning("dropped a malformed message: %s", error)

    def _check_and_land(self, header: BlocksHeader, data: memoryview | None) -> list[ReceiverEvent]:
        rows = None if data is None else np.frombuffer(data, np.uint8)
        size = header.num_blocks * header.block_bytes if rows is None else rows.size
        with self._changed:
            self._await_admission(header.reservation)
            writes = self._permits.check(header, size)
            self.counters.num_duplicate_blocks += header.num_blocks - len(writes.blocks)
            if header.packed_checksums is None:
                self._copying = header.reservation
        events: list[ReceiverEvent] = []
        if (checksums := header.checksums) is not None:
            is_whole = self._verify(writes, checksums, rows)
            if not is_whole.all():
                events.append(self._corrupted(header, writes.take(~is_whole)))
            with self._changed:
                writes = self._permits.check(header, size).take(is_whole)  # it may have been released meanwhile
                self._copying = header.reservation
        try:
            return self._copy_and_land(header, writes, rows) + events
        finally:
            with self._changed:
                self._copying = None
                self._changed.notify_all()

    def _await_admission(self, reservation: str) -> None:
        """Needs the lock, which it releases while it waits."""
        if not self._admission_wait_s or reservation in self._permits:
            return

        def is_decided() -> bool:
            return self._closed or reservation in self._permits or reservation in self._not_awaited

        if not self._changed.wait_for(is_decided, self._admission_wait_s):
            self._await_no_more(reservation)

    def _await_no_more(self, reservation: str) -> None:
        """Needs the lock."""
        if not self._admission_wait_s:
            return
        self._not_awaited[reservation] = None
        if len(self._not_awaited) > MAX_NOT_AWAITED:
            del self._not_awaited[next(iter(self._not_awaited))]

    def _copy_and_land(self, header: BlocksHeader, writes: Writes, rows: Bytes | None) -> list[ReceiverEvent]:
        if not writes.blocks:
            return []
        if rows is not None:
            self._write(rows.reshape(-1, header.block_bytes), writes)
        with self._changed:
            if header.reservation not in self._permits:
                raise Dropped("unknown_reservation")  # released meanwhile, which waits for this
            whole = self._permits.land(header.reservation, writes.blocks, header.part)
        self.counters.num_blocks += len(writes.blocks)
        self.counters.num_bytes += len(writes.blocks) * header.block_bytes
        return [Landed(header.reservation, whole)] if whole else []

    def _verify(self, writes: Writes, checksums: Checksums, rows: Bytes | None) -> NDArray[np.bool_]:
        """Which of the blocks to be written, or that lie in their slots already, are as they were sent."""
        if rows is None:
            found = checksums_of(self._pool.rows(writes.slots, writes.part))
        else:
            num_bytes = self._pool.block_bytes if writes.part is None else writes.part.size
            blocks = rows.reshape(-1, num_bytes)
            found = checksums_of(blocks[row] for row in writes.rows.tolist())
        is_same: NDArray[np.bool_] = found == checksums[writes.rows]
        return is_same

    def _corrupted(self, header: BlocksHeader, writes: Writes) -> Corrupted:
        self.counters.dropped["checksum"] += 1
        log.warning("%s: %d blocks came with other bytes than were sent", header.reservation, len(writes.blocks))
        return Corrupted(header.reservation, writes.blocks)

    def _write(self, rows: Bytes, writes: Writes) -> None:
        wanted = rows if writes.rows.size == len(rows) else rows[writes.rows]
        self._pool.scatter(writes.slots, wanted, writes.part)
