"""The receiving end over NIXL: senders write into the pool by themselves; here their notifications are read.

A write carries no identity and cannot be refused: whoever was told the endpoint may write at any moment, also after
`release`. What can be refused is its notification: a block counts as landed only if its reservation is admitted here,
and once. So slots stay in quarantine until the sender said that it drained, or its process is gone.

NIXL has no descriptor to wait for, so a thread asks: every 0.2 ms while blocks come, every 0.5 ms while a reservation
is open, and every 50 ms otherwise, unless `admit` wakes it. Transports that copy on this side do so while it asks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from threading import Event, Lock, Thread

from kvrelay.transfer.admission import AdmissionBook, Dropped
from kvrelay.transfer.base import Landed
from kvrelay.transfer.counters import ReceiverCounters
from kvrelay.transfer.endpoints import Endpoint
from kvrelay.transfer.loop_port import LoopPort
from kvrelay.transfer.nixl_agent import NixlAgent, Region
from kvrelay.transfer.nixl_endpoint import NixlEndpoint
from kvrelay.transfer.wire import Bytes, MalformedBlocks, decode_header

log = logging.getLogger(__name__)

BUSY_POLL_S = 0.0002
BUSY_FOR_S = 0.02
OPEN_POLL_S = 0.0005
IDLE_POLL_S = 0.05


class NixlReceiver:
    """Takes blocks into `pool_bytes`, uint8 of shape [num_blocks, block_bytes], C-contiguous and writable.

    Reachable at once, so that `endpoint` can be told to others before `start`. Raises ValueError for a pool of another
    kind, TransportUnavailable where NIXL or UCX does not work.
    """

    name = "nixl"
    needs_quarantine = True

    def __init__(self, pool_bytes: Bytes, *, ucx_transports: str = "") -> None:
        if not pool_bytes.flags.writeable:
            raise ValueError("the pool of a receiver is writable")
        self._pool = pool_bytes  # kept alive: others write there
        region = Region.of(pool_bytes)
        self._book = AdmissionBook(region.num_blocks, region.block_bytes)
        self._lock = Lock()
        self.counters = ReceiverCounters()
        self._agent = NixlAgent(region, ucx_transports=ucx_transports)
        self._endpoint = NixlEndpoint(self._agent.name, self._agent.metadata(), region).encode()
        self._thread: Thread | None = None
        self._wake = Event()
        self._closed = False

    @property
    def endpoint(self) -> Endpoint:
        """See `nixl_endpoint`."""
        return dict(self._endpoint)

    def start(self, on_landed: Callable[[Landed], None]) -> None:
        """Must be called once, on the event loop's thread, which then gets the events."""
        port = LoopPort(on_landed)
        self._thread = Thread(target=self._run, args=(port,), name="kv-receiver-nixl", daemon=True)
        self._thread.start()

    def admit(self, reservation: str, first_block: int, slots: Sequence[int]) -> None:
        """From now on block `first_block + i` of this reservation counts as landed when it is in `slots[i]`.

        Raises ValueError, changing nothing, for a reservation or slot in use and for a slot outside the pool.
        """
        with self._lock:
            self._book.admit(reservation, first_block, slots)
        self._wake.set()

    def release(self, reservation: str) -> None:
        """Ends a reservation; nothing of it is reported any more, but it may still be written."""
        with self._lock:
            self._book.release(reservation)

    def close(self) -> None:
        """Stops the thread and leaves UCX. Senders that do not know yet may still write until then. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
        self._agent.close()

    def _run(self, port: LoopPort[Landed]) -> None:
        try:
            busy_until = 0.0
            while not self._closed:
                notes = self._agent.notifications()
                for note in notes:
                    landed = self._take(note)
                    if landed is not None:
                        port.emit(landed)
                now = time.monotonic()
                busy_until = now + BUSY_FOR_S if notes else busy_until
                self._pause(is_busy=now < busy_until)
        except Exception as error:
            port.report_crash("kv-receiver-nixl", error)

    def _pause(self, *, is_busy: bool) -> None:
        if is_busy:
            time.sleep(BUSY_POLL_S)
        elif len(self._book):
            time.sleep(OPEN_POLL_S)
        else:
            self._wake.wait(IDLE_POLL_S)
            self._wake.clear()

    def _take(self, note: bytes) -> Landed | None:
        self.counters.num_messages += 1
        try:
            header = decode_header(note)
            with self._lock:
                writes = self._book.check(header, header.indices.size * header.block_bytes)
                self._book.land(header.reservation, writes.blocks)
        except MalformedBlocks as error:
            self.counters.dropped["malformed"] += 1
            log.warning("dropped a malformed notification: %s", error)
            return None
        except Dropped as dropped:
            self.counters.dropped[dropped.cause] += 1
            return None
        self.counters.num_duplicate_blocks += header.indices.size - len(writes.blocks)
        self.counters.num_blocks += len(writes.blocks)
        self.counters.num_bytes += len(writes.blocks) * header.block_bytes
        return Landed(header.reservation, writes.blocks)
