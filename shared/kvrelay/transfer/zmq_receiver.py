"""The receiving end over ZMQ: one PULL socket for all senders, and a thread that copies frames into the pool.

Every message is checked and copied under one lock, which `admit` and `release` take too. So once `release` returned,
nothing of that reservation is written, and its slots need no quarantine; the price is that `release` may wait for the
copy of one frame.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from threading import Lock, Thread

import numpy as np
import zmq

from kvrelay.transfer.admission import AdmissionBook, Dropped, Writes
from kvrelay.transfer.base import Landed
from kvrelay.transfer.counters import ReceiverCounters
from kvrelay.transfer.endpoints import Endpoint, local_address, machine_id, tcp_address
from kvrelay.transfer.loop_port import LoopPort
from kvrelay.transfer.wire import Bytes, MalformedBlocks, checksum_of, decode_header

log = logging.getLogger(__name__)

QUEUED_MESSAGES_PER_SENDER = 8
"""What waits in this process per sender; beyond it the connection's flow control stops the sender."""
MIN_MESSAGE_LIMIT_BYTES = 64 << 20


class ZmqReceiver:
    """Takes blocks into `pool_bytes`, uint8 of shape [num_blocks, block_bytes], C-contiguous and writable.

    Binds at once, so that `endpoint` can be told to others before `start`. Loopback only unless `host` says otherwise;
    `advertise_host` is what senders are told, and is needed where `host` is a wildcard. With `local`, senders on this
    machine are offered a Unix socket. Raises ValueError for a pool or host of another kind, OSError if it cannot bind.
    """

    name = "zmq"
    needs_quarantine = False

    def __init__(
        self,
        pool_bytes: Bytes,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise_host: str | None = None,
        local: bool = True,
    ) -> None:
        if pool_bytes.ndim != 2 or not pool_bytes.flags.c_contiguous or not pool_bytes.flags.writeable:
            raise ValueError("a pool is a writable C-contiguous array of shape [num_blocks, block_bytes]")
        if advertise_host is None and host in {"*", "0.0.0.0", "::"}:
            raise ValueError(f"senders cannot connect to {host!r}: advertise_host must be given")
        self._pool = pool_bytes
        self._book = AdmissionBook(*pool_bytes.shape)
        self._lock = Lock()
        self.counters = ReceiverCounters()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.PULL)
        try:
            self._endpoint = self._bind(host, port, advertise_host or host, local)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, f"cannot listen on {host}:{port}: {error}") from error
        self._thread: Thread | None = None
        self._closed = False

    @property
    def endpoint(self) -> Endpoint:
        """`address`, and with a local socket also `local` and `machine`."""
        return dict(self._endpoint)

    def start(self, on_landed: Callable[[Landed], None]) -> None:
        """Must be called once, on the event loop's thread, which then gets the events."""
        port = LoopPort(on_landed)
        self._thread = Thread(target=self._run, args=(port,), name="kv-receiver", daemon=True)
        self._thread.start()

    def admit(self, reservation: str, first_block: int, slots: Sequence[int]) -> None:
        """From now on block `first_block + i` may land in `slots[i]`.

        Raises ValueError for a reservation that is admitted already, and for slots outside the pool, named twice, or
        still claimed by another reservation (a slot is free again once its block landed).
        """
        with self._lock:
            self._book.admit(reservation, first_block, slots)

    def release(self, reservation: str) -> None:
        """Ends a reservation, known or not; nothing of it is written after this returns."""
        with self._lock:
            self._book.release(reservation)

    def close(self) -> None:
        """Stops the thread and closes the socket; nothing is written after this returns. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._thread is None:
            self._socket.close(linger=0)
        self._context.term()  # ends the thread's wait; returns once it closed the socket
        if self._thread is not None:
            self._thread.join()

    def _bind(self, host: str, port: int, advertise_host: str, local: bool) -> Endpoint:
        self._socket.set_hwm(QUEUED_MESSAGES_PER_SENDER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max(MIN_MESSAGE_LIMIT_BYTES, 2 * self._pool.shape[1]))
        self._socket.setsockopt(zmq.IPV6, ":" in host)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._socket.bind(tcp_address(host, port or "*"))
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        endpoint = {"address": tcp_address(advertise_host, bound.rpartition(":")[2])}
        machine = machine_id()
        if local and machine is not None:
            endpoint |= {"local": local_address(), "machine": machine}
            self._socket.bind(endpoint["local"])
        return endpoint

    def _run(self, port: LoopPort[Landed]) -> None:
        try:
            while True:
                landed = self._take(self._socket.recv_multipart(copy=False))
                if landed is not None:
                    port.emit(landed)
        except zmq.ContextTerminated:
            pass
        except Exception as error:
            port.report_crash("kv-receiver", error)
        finally:
            self._socket.close(linger=0)

    def _take(self, frames: list[zmq.Frame]) -> Landed | None:
        self.counters.num_messages += 1
        try:
            if len(frames) != 2:
                raise MalformedBlocks(f"{len(frames)} frames")
            header = decode_header(frames[0].buffer)
            data = frames[1].buffer
            if header.checksum is not None and header.checksum != checksum_of(data):
                raise Dropped("checksum")
            with self._lock:
                writes = self._book.check(header, data.nbytes)
                self._write(np.frombuffer(data, np.uint8).reshape(-1, header.block_bytes), writes)
                self._book.land(header.reservation, writes.blocks)
        except MalformedBlocks as error:
            self.counters.dropped["malformed"] += 1
            log.warning("dropped a malformed message: %s", error)
            return None
        except Dropped as dropped:
            self.counters.dropped[dropped.cause] += 1
            return None
        self.counters.num_duplicate_blocks += header.indices.size - len(writes.blocks)
        return Landed(header.reservation, writes.blocks)

    def _write(self, data: Bytes, writes: Writes) -> None:
        began = time.perf_counter()
        rows = data if writes.rows.size == len(data) else data[writes.rows]
        first, last = int(writes.slots[0]), int(writes.slots[-1])
        if last - first + 1 == writes.slots.size and (np.diff(writes.slots) == 1).all():
            self._pool[first : last + 1] = rows
        else:
            self._pool[writes.slots] = rows
        self.counters.copy_s += time.perf_counter() - began
        self.counters.num_blocks += len(rows)
        self.counters.num_bytes += rows.nbytes
