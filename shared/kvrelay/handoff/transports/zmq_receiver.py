"""The receiving end over ZMQ: one PULL socket for all senders, and a thread that copies frames into the pool.

`release` waits where a frame of that very reservation is being copied, and for nothing else. So once it returned
nothing of the reservation is written; the price is a wait for the copy of one frame.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread

import zmq

from kvrelay.curve import CurveKeys, advertised
from kvrelay.handoff.transports.base import Endpoint, MalformedEndpoint, ReceiverEvent, ended_in_time
from kvrelay.handoff.transports.pool_memory import PoolLike
from kvrelay.handoff.transports.receiver_thread import ReceiverThread
from kvrelay.handoff.transports.wire import MalformedBlocks
from kvrelay.messaging.zmq_context import ZmqContext, open_curve_gate, tcp_address

QUEUED_MESSAGES_PER_SENDER = 8
"""Messages queued in this process per sender. With more, the connection's flow control stops the sender."""
MIN_MESSAGE_LIMIT_BYTES = 64 << 20


class ZmqReceiver(ReceiverThread):
    """Takes blocks into `pool`, or into a writable array as `as_pool` takes it.

    Binds at once, so `endpoint` is valid before `start`. `advertise_host` is the host that senders connect to; it is
    required if `host` is a wildcard. With `local`, senders on this machine get a Unix socket. With `curve`, only
    senders with the same key are accepted. Raises ValueError for an invalid pool or host, OSError if it cannot bind.
    """

    name = "zmq"
    is_one_sided = False

    def __init__(
        self,
        pool: PoolLike,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        advertise_host: str | None = None,
        local: bool = True,
        curve: CurveKeys | None = None,
        admission_wait_s: float = 0.0,
    ) -> None:
        super().__init__("kv-receiver", pool, admission_wait_s=admission_wait_s)
        if advertise_host is None and host in {"*", "0.0.0.0", "::"}:
            raise ValueError(f"senders cannot connect to {host!r}: advertise_host must be given")
        self._context = ZmqContext()
        try:
            self._socket = self._context.socket(zmq.PULL)
            if curve is not None:
                open_curve_gate(self._context, curve)
                curve.own.guard_server(self._socket)
            self._endpoint = self._bind(host, port, advertise_host or host, local, curve)
        except zmq.ZMQError as error:
            self._context.close()
            raise OSError(error.errno, f"cannot listen on {host}:{port}: {error}") from error

    @property
    def endpoint(self) -> Endpoint:
        """`address`, and with a local socket also `local` and `machine`."""
        return dict(self._endpoint)

    def start(self, on_event: Callable[[ReceiverEvent], None]) -> None:
        super().start(on_event)
        self._context.hand_over(self._socket)

    def close(self) -> None:
        """Stops the thread and closes the socket; nothing is written once it ended. Idempotent."""
        if self._closed:
            return
        with self._changed:  # the thread may wait for an admission
            self._closed = True
            self._changed.notify_all()
        ending = Thread(target=self._context.close, name="kv-receiver-end", daemon=True)
        ending.start()  # ends the thread's wait; over once that closed the socket
        if ended_in_time(ending) and self._thread is not None:
            ended_in_time(self._thread)

    def _bind(self, host: str, port: int, advertise_host: str, local: bool, curve: CurveKeys | None) -> Endpoint:
        self._socket.set_hwm(QUEUED_MESSAGES_PER_SENDER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max(MIN_MESSAGE_LIMIT_BYTES, 2 * self._pool.block_bytes))
        self._socket.setsockopt(zmq.IPV6, ":" in host)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._socket.bind(tcp_address(host, port or "*"))
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        endpoint = {"address": advertised(tcp_address(advertise_host, bound.rpartition(":")[2]), curve)}
        machine = machine_id()
        if local and machine is not None:
            own = local_address()
            self._socket.bind(own)
            endpoint |= {"local": advertised(own, curve), "machine": machine}
        return endpoint

    def _serve(self, emit: Callable[[ReceiverEvent], None]) -> None:
        try:
            while True:
                for event in self._take_frames(self._socket.recv_multipart(copy=False)):
                    emit(event)
        except zmq.ContextTerminated:
            pass

    def _leave_thread(self) -> None:
        self._socket.close(linger=0)  # always: the context's end waits for it

    def _take_frames(self, frames: list[zmq.Frame]) -> list[ReceiverEvent]:
        if len(frames) == 2:
            return self._take(frames[0].buffer, frames[1].buffer)
        self.counters.num_messages += 1
        self._malformed(MalformedBlocks(f"{len(frames)} frames"))
        return []


_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK_NAMESPACE = Path("/proc/self/ns/net")


def machine_id() -> str | None:
    """The same for all processes that can reach each other's abstract sockets; None where there are none."""
    try:
        parts = _BOOT_ID.read_text().strip() + str(_NETWORK_NAMESPACE.readlink())
    except OSError:
        return None
    return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()


def local_address() -> str:
    """A fresh address in the abstract namespace: it needs no file and is gone with its process."""
    return f"ipc://@kvrelay-{secrets.token_hex(12)}"


def choose_address(endpoint: Mapping[str, str], own_machine: str | None) -> str:
    """The address to connect to: the local one if the receiver is on this machine. Raises MalformedEndpoint."""
    is_local = own_machine is not None and endpoint.get("machine") == own_machine
    try:
        return endpoint["local" if is_local else "address"]
    except KeyError as error:
        raise MalformedEndpoint(f"the endpoint {dict(endpoint)} has no {error}") from None
