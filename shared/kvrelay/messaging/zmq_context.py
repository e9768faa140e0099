"""A ZMQ context that knows its sockets, so that it can be closed at any time, also by the garbage collector.

pyzmq keeps a context's sockets in weak references. If a context and its sockets become garbage together, the collector
clears these references first, `Context.__del__` then finds no socket to close, and `term` waits for ever.
"""

from __future__ import annotations

import _thread
import logging
import weakref
from dataclasses import dataclass, field
from threading import Thread

import zmq
from zmq.utils import z85

from kvrelay.curve import CurveKeys, key_for, location
from kvrelay.logs import LimitedLog

log = logging.getLogger(__name__)

Socket = zmq.Socket[bytes]
DEFAULT_MAX_SOCKETS = 1023
"""The default of libzmq."""
_ZAP_ADDRESS = "inproc://zeromq.zap.01"
_ZAP_FRAMES = 7
REFUSED_INTERVAL_S = 600.0
"""Between two lines about connections from one host that are refused."""


@dataclass(slots=True)
class _Sockets:
    """`term` returns when all of these are closed."""

    own: set[Socket] = field(default_factory=set)
    num_handed_over: int = 0


def tcp_host(host: str) -> str:
    """An address without its port. ZMQ expects IPv6 addresses in brackets."""
    return f"tcp://[{host}]" if ":" in host else f"tcp://{host}"


def tcp_address(host: str, port: int | str) -> str:
    return f"{tcp_host(host)}:{port}"


class ZmqContext:
    """Closes its sockets and itself in `close`, or when it is dropped. No socket delays a close: their linger is 0.

    All methods run on one thread at a time. A socket that another thread reads from belongs to that thread after
    `hand_over`: it must close the socket as soon as a call to it raises zmq.ContextTerminated.
    """

    def __init__(self, max_sockets: int = DEFAULT_MAX_SOCKETS) -> None:
        context: zmq.Context[Socket] = zmq.Context()
        context.set(zmq.MAX_SOCKETS, max_sockets)
        self._context = context
        self._sockets = _Sockets()
        # The finalizer holds the context and its sockets, so neither can become garbage before it has run. When the
        # process exits it does not run: the operating system closes the sockets, and nothing waits.
        self._finalizer = weakref.finalize(self, _close_dropped, context, self._sockets)
        self._finalizer.atexit = False

    @property
    def is_closed(self) -> bool:
        """True once `close` has returned."""
        return not self._finalizer.alive

    def socket(self, kind: int) -> Socket:
        """A new socket. Raises zmq.ZMQError after `close`, at `max_sockets`, and without a free file descriptor."""
        socket = self._context.socket(kind)
        socket.linger = 0
        self._sockets.own.add(socket)
        return socket

    def adopt(self, socket: Socket) -> None:
        """Closes this socket of the context with its own."""
        socket.linger = 0
        self._sockets.own.add(socket)

    def hand_over(self, socket: Socket) -> None:
        """The thread that reads from `socket` closes it from now on."""
        self._sockets.own.discard(socket)
        self._sockets.num_handed_over += 1

    def close_socket(self, socket: Socket, linger_ms: int = 0) -> None:
        """Closes one socket. Its queued messages get `linger_ms` to leave, in the background."""
        self._sockets.own.discard(socket)
        socket.close(linger=linger_ms)

    def close(self, linger_ms: int = 0) -> None:
        """Closes all sockets. Blocks until their queued messages have left, for up to `linger_ms`, and until other
        threads have closed the sockets that were handed over to them. May be called twice."""
        if self.is_closed:
            return
        _close_all(self._sockets, linger_ms)
        self._context.term()
        self._finalizer.detach()  # last: an exception above leaves the rest to the finalizer


def _close_all(sockets: _Sockets, linger_ms: int) -> None:
    while sockets.own:
        sockets.own.pop().close(linger=linger_ms)


def _close_dropped(context: zmq.Context[Socket], sockets: _Sockets) -> None:
    """May run inside any allocation of any thread, also of a thread that has to close a socket that was handed over to
    it. So the wait in `term` gets a thread of its own. `threading` is avoided: the interrupted code may hold the locks
    that `Thread.start` needs."""
    _close_all(sockets, 0)
    _thread.start_new_thread(context.term, ())


def connect(socket: Socket, address: str, curve: CurveKeys | None) -> None:
    """Connects to an address as its process advertises it, with its key. Raises KeysDiffer and zmq.ZMQError."""
    if (key := key_for(address, curve)) is not None:
        key.guard_client(socket)
    socket.connect(location(address))


def open_curve_gate(context: ZmqContext, curve: CurveKeys) -> None:
    """Starts a thread that admits only its own key to the context's guarded sockets. It ends with the context."""
    gate = context.socket(zmq.REP)
    gate.bind(_ZAP_ADDRESS)  # bind before any connection: without a gate, connections are refused for good
    thread = Thread(target=_keep_gate, args=(gate, z85.decode(curve.own.public)), name="curve-gate", daemon=True)
    thread.start()
    context.hand_over(gate)


def _keep_gate(gate: Socket, public: bytes) -> None:
    limited = LimitedLog(log, REFUSED_INTERVAL_S)
    try:
        while True:
            frames = gate.recv_multipart()
            # version, request, domain, address, identity, mechanism, the peer's public key (32 bytes)
            is_ours = len(frames) == _ZAP_FRAMES and frames[5] == b"CURVE" and frames[6] == public
            if not is_ours:
                peer = repr(frames[3:4])  # it tries again and again
                limited.warning(peer, "refused connections from %s: they prove another key", peer)
            status = (b"200", b"OK") if is_ours else (b"400", b"another key")
            gate.send_multipart([b"1.0", frames[1], *status, b"", b""])
    except zmq.ContextTerminated:
        pass
    finally:
        gate.close(linger=0)  # always: the context's end waits for it
