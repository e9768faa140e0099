"""The thread that all senders share the code of: it takes commands, reports completed sends and submits pieces.

The event loop only puts commands into a queue. The thread carries them out, reports completed sends, and submits the
next piece of the outbox to the transport. It looks at the queue between two pieces, so that an abort does not wait for
a long push. It waits for nothing but a command.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, Thread

from kvrelay.handoff.transports.base import (
    BlockPush,
    Endpoint,
    LoopPort,
    SenderCounters,
    SenderEvent,
    TransferFailed,
    Unreachable,
    ended_in_time,
)
from kvrelay.handoff.transports.outbox import Copies, InFlightSend, Outbox, Piece
from kvrelay.handoff.transports.pool_memory import PartCopy, PoolChecksums, PoolMemory
from kvrelay.handoff.transports.wire import encode_header


@dataclass(frozen=True, slots=True)
class QueuedPush:
    """Blocks to be sent to a receiver."""

    reservation: str
    endpoint: Endpoint
    copies: Copies
    part: PartCopy | None = None


@dataclass(frozen=True, slots=True)
class _Abort:
    reservation: str


@dataclass(frozen=True, slots=True)
class _Wake:
    pass


@dataclass(frozen=True, slots=True)
class _Close:
    pass


_Command = QueuedPush | _Abort | _Wake | _Close


class SenderThread:
    """Pushes blocks out of `pool` on a thread of its own. The methods that subclasses define run on that thread.

    With `checksums`, each block goes with its own.
    """

    def __init__(self, thread_name: str, pool: PoolMemory, outbox: Outbox, checksums: PoolChecksums | None) -> None:
        self.counters = SenderCounters()
        self.outbox = outbox
        self._thread_name = thread_name
        self._pool = pool
        self._checksums = checksums
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._has_commands = Event()
        self._thread: Thread | None = None

    # -- on the sender's thread ---------------------------------------------------------------------------------------

    def _enter_thread(self) -> None:
        """Opens what only this thread uses."""

    def _enqueue(self, push: QueuedPush) -> None:
        """Cuts a push and puts it into the outbox. Raises Unreachable."""
        raise NotImplementedError

    def _collect(self) -> list[SenderEvent]:
        """Returns the events of sends that have completed since the last call."""
        raise NotImplementedError

    def _expire(self) -> list[SenderEvent]:
        """Closes connections whose time is over."""
        raise NotImplementedError

    def _send(self, in_flight: InFlightSend) -> list[SenderEvent]:
        """Begins to send a piece."""
        raise NotImplementedError

    def _patience_s(self) -> float | None:
        """Seconds to wait for a command if there is nothing to submit. None: until one comes."""
        raise NotImplementedError

    def _leave_thread(self) -> None:
        """Releases all resources. The pool is not read after this returns."""

    def _header_of(self, piece: Piece) -> bytes:
        copies, part = piece.copies, piece.part
        checksums = None
        if self._checksums is not None:
            checksums = self._checksums.of(copies.sources, None if part is None else part.source)
        block_bytes, number = piece.bytes_per_block(self._pool.block_bytes), 0 if part is None else part.number
        return encode_header(piece.reservation, block_bytes, copies.indices, copies.slots, checksums, number)

    def _count(self, piece: Piece) -> None:
        self.counters.num_messages += 1
        self.counters.num_blocks += len(piece.copies)
        self.counters.num_runs += piece.copies.num_runs
        self.counters.num_bytes += len(piece.copies) * piece.bytes_per_block(self._pool.block_bytes)

    # -- on any thread ------------------------------------------------------------------------------------------------

    def start(self, on_event: Callable[[SenderEvent], None]) -> None:
        port = LoopPort(on_event)
        thread = Thread(target=self._run, args=(port,), name=self._thread_name, daemon=True)
        thread.start()
        self._thread = thread

    def push(
        self, reservation: str, endpoint: Endpoint, copies: Sequence[BlockPush], part: PartCopy | None = None
    ) -> None:
        """A `Pushed` follows for each piece, or `TransferFailed` if the receiver cannot be reached. Raises ValueError
        for a source outside the pool."""
        if copies:
            self._put(QueuedPush(reservation, dict(endpoint), Copies.of(copies, self._pool.num_blocks), part))

    def abort(self, reservation: str) -> None:
        self._put(_Abort(reservation))

    def close(self) -> None:
        """Stops the thread and waits for it, not for ever; once it `has_ended` the pool is not read. Idempotent."""
        if self._thread is not None:
            self._put(_Close())
            ended_in_time(self._thread)

    @property
    def has_ended(self) -> bool:
        """True if the thread has not started or has ended."""
        return self._thread is None or not self._thread.is_alive()

    def _wake(self) -> None:
        self._put(_Wake())

    def _put(self, command: _Command) -> None:
        self._commands.put(command)
        self._has_commands.set()

    def _run(self, port: LoopPort[SenderEvent]) -> None:
        try:
            self._pool.enter_thread()
            self._enter_thread()
            try:
                self._serve(port.emit)
            finally:
                self._leave_thread()
        except Exception as error:
            port.report_crash(self._thread_name, error)

    def _serve(self, emit: Callable[[SenderEvent], None]) -> None:
        wait_s = self._patience_s()
        while True:
            for command in self._take_commands(wait_s):
                if isinstance(command, _Close):
                    return
                _emit_all(self._carry_out(command), emit)
            _emit_all(self._collect(), emit)
            _emit_all(self._expire(), emit)
            send = self.outbox.submit()
            if send is not None:
                _emit_all(self._send(send), emit)
            wait_s = self._patience_s() if send is None else 0.0

    def _take_commands(self, wait_s: float | None) -> list[_Command]:
        """Returns the commands that are queued now and no later ones, so that many commands do not delay the pieces."""
        # Not by `SimpleQueue.get` with a timeout: if the thread is preempted while that computes the time that is left,
        # the result is negative, and it waits for ever (CPython 3.11). Sends must be collected and expired in time.
        if wait_s is None or wait_s > 0:
            self._has_commands.wait(wait_s)
        self._has_commands.clear()  # before the queue is read: a command that comes now sets it again
        return [self._commands.get_nowait() for _ in range(self._commands.qsize())]

    def _carry_out(self, command: QueuedPush | _Abort | _Wake) -> list[SenderEvent]:
        match command:
            case _Wake():
                return []
            case _Abort(reservation):
                return self.outbox.abort(reservation, time.monotonic())
            case QueuedPush(reservation) if self.outbox.is_aborting(reservation):
                return [TransferFailed(reservation, "the reservation is being aborted")]
            case QueuedPush(reservation):
                try:
                    self._enqueue(command)
                except Unreachable as error:
                    return [TransferFailed(reservation, str(error))]
                return []


def _emit_all(events: list[SenderEvent], emit: Callable[[SenderEvent], None]) -> None:
    for event in events:
        emit(event)
