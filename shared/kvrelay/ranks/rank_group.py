"""The other ranks of a worker, as rank 0 has them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future

import msgspec
import zmq

from kvrelay.curve import CurveKeys, advertised
from kvrelay.handoff.transports.base import Endpoint
from kvrelay.messaging.zmq_context import ZmqContext, open_curve_gate, tcp_host
from kvrelay.ranks.local_ranks import LocalRanks, RanksFailed
from kvrelay.ranks.messages import (
    Done,
    End,
    Failed,
    FromLeader,
    Meeting,
    Ready,
    Step,
    ToLeader,
    TransferCall,
    TransferReport,
    encode,
)
from kvrelay.step.batch import DeviceLost, WorkerBatch

log = logging.getLogger(__name__)

BEATS_A_SILENCE = 6
CONNECT_INTERVAL_S = 0.05
MAX_REPORT_BYTES = 1 << 20
END_S = 3.0
"""Time for ranks to end by themselves."""
REASON_S = 1.0
"""How long the first error of a failed group may take to be known. A collective may fail before the exit is noticed."""
LINGER_MS = 500


def name_of(rank: int) -> bytes:
    """The ZMQ identity of another rank's connection to rank 0."""
    return b"rank %d" % rank


def beat(socket: zmq.Socket[bytes], silence_s: float) -> None:
    """Ends a socket's connections whose other end is silent, also while its process computes: ZMQ's thread answers."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * silence_s / BEATS_A_SILENCE))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(1000 * silence_s))


class RankGroup:
    """The ranks 1 to `size` - 1. `close` ends them.

    One thread receives their reports and checks that all are connected. Steps and calls are sent by the threads that
    make them. The thread that first notices a lost rank fails the group, which is final.
    """

    def __init__(
        self,
        size: int,
        local: LocalRanks,
        host: str = "127.0.0.1",
        silence_s: float = 15.0,
        curve: CurveKeys | None = None,
    ) -> None:
        """`local`: the processes of this machine, which end with the group. Raises zmq.ZMQError if `host` is not this
        machine's."""
        self.lost: Future[None] = Future()
        """Gets a DeviceLost when the group fails."""
        self.on_close: Callable[[], None] = lambda: None
        self._local = local
        self._failure = ""
        self._silence_s = silence_s
        self._others = range(1, size)
        self._members: dict[int, Ready] = {}
        self._connected: set[int] = set()
        self._done: dict[int, deque[Done]] = {rank: deque() for rank in self._others}
        self._changed = threading.Condition()  # guards the four above
        self._sending = threading.Lock()  # guards the socket of steps
        self._report_handlers: dict[tuple[int, str], Callable[[TransferReport], None]] = {}
        self._is_closed = False
        self._context = ZmqContext()
        sockets = self._steps, self._reports = self._context.socket(zmq.ROUTER), self._context.socket(zmq.PULL)
        if curve is not None:
            open_curve_gate(self._context, curve)
        for socket in sockets:
            socket.set_hwm(0)  # without a limit ZMQ drops no message for a slow rank
            socket.setsockopt(zmq.IPV6, int(":" in host))
            if curve is not None:
                curve.own.guard_server(socket)
        self._steps.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an error tells that a rank is not connected
        self._reports.setsockopt(zmq.MAXMSGSIZE, MAX_REPORT_BYTES)
        beat(self._steps, silence_s)
        try:
            steps_port, reports_port = (
                each.bind_to_random_port(tcp_host(host)) for each in (self._steps, self._reports)
            )
        except BaseException:
            self._context.close()
            raise
        self.meeting = Meeting(steps_port, reports_port, silence_s, advertised("", curve))
        self._context.hand_over(self._reports)
        threading.Thread(target=self._run, name="ranks", daemon=True).start()
        local.first_end.add_done_callback(lambda ended: self._fail(ended.result()))

    def await_ready(self, fingerprint: str, timeout_s: float) -> None:
        """Waits until all ranks have loaded their parts, of a model with this fingerprint. Raises RanksFailed."""

        def are_ready() -> bool:
            return len(self._members) == len(self._connected) == len(self._others)

        with self._changed:
            in_time = self._changed.wait_for(lambda: self._failure or are_ready(), timeout_s)
        if not in_time:
            missing = [str(rank) for rank in self._others if rank not in self._members or rank not in self._connected]
            self._fail(f"rank {', '.join(missing)} did not connect within {timeout_s:g} s: compare curve_key_file")
        for rank, member in self._members.items():
            if member.fingerprint != fingerprint:
                self._fail(f"rank {rank} ({member.where}) has other weights than rank 0, or another tokenizer")
        if self._failure:
            raise RanksFailed(self._failure)

    # -- steps --------------------------------------------------------------------------------------------------------

    def publish_step(self, batch: WorkerBatch) -> None:
        """Sends a step to all ranks. Raises DeviceLost if the group has failed."""
        for rank in self._send(Step(batch), self._others):
            self._lose(rank)
        if self._failure:
            raise DeviceLost(self._failure)

    def await_done(self) -> tuple[float, str]:
        """Waits until all ranks have ended the oldest step that was not awaited yet. Returns the longest time that one
        computed it, and an error that left the ranks in step, or "".

        Raises DeviceLost if the group has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._failure or all(self._done.values()))
            if self._failure:
                raise DeviceLost(self._failure)
            done = [each.popleft() for each in self._done.values()]
        errors = [f"rank {each.rank}: {each.error}" for each in done if each.error]
        return max((each.seconds for each in done), default=0.0), errors[0] if errors else ""

    # -- transfers ----------------------------------------------------------------------------------------------------

    def call(self, rank: int, call: TransferCall) -> None:
        """Has a rank carry out a call, before all steps that are published later. Calls to a failed group are lost."""
        for unreachable in self._send(call, [rank]):
            self._lose(unreachable)

    def on_report(self, rank: int, transport: str, handle: Callable[[TransferReport], None]) -> None:
        """From now on `handle` gets what this transport of the rank reports, on the group's thread."""
        self._report_handlers[rank, transport] = handle

    def endpoints_of(self, rank: int) -> Mapping[str, Endpoint]:
        """The addresses of a rank's transports by name. That of a sender is empty."""
        return self._members[rank].endpoints

    @property
    def identities(self) -> list[str]:
        """The processes of the other ranks. See `kvrelay.process_identity`."""
        return [self._members[rank].identity for rank in self._others]

    # -- the end ------------------------------------------------------------------------------------------------------

    def fail(self, reason: str) -> str:
        """Ends the group because of an error of rank 0. Returns the first reason, which may be another: if a rank is
        lost, rank 0 has an error too."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure, REASON_S)
        self._fail(reason)
        return self._failure

    def close(self) -> None:
        """Ends the ranks. Waits for those of this machine, and kills them if that takes long. Idempotent."""
        if self._is_closed:
            return
        self._send(End(self._failure), self._others)
        with self._sending:
            self._is_closed = True
        self._local.close(END_S)
        self._context.close(LINGER_MS)
        self.on_close()

    def _fail(self, reason: str) -> None:
        """Ends all ranks, so that rank 0 leaves a collective in which it waits for them."""
        with self._changed:
            if self._failure or self._is_closed:
                return
            self._failure = reason
            self._changed.notify_all()
        log.error("the worker's ranks failed: %s", reason)
        self._local.kill()
        self._send(End(reason), self._others)
        self.lost.set_exception(DeviceLost(reason))

    def _lose(self, rank: int) -> None:
        """The connection of a rank has ended."""
        where = self._members[rank].where if rank in self._members else "not ready yet"
        lost = f"rank {rank} ({where}) is lost, or was silent for {self._silence_s:g} s"
        self._fail(self._local.why_lost(lost))

    def _send(self, message: FromLeader | None, ranks: Iterable[int]) -> list[int]:
        """Sends a message, or nothing but a probe. Returns the ranks that are not connected."""
        raw, unreachable = b"" if message is None else encode(message), []
        with self._sending:
            for rank in ranks if not self._is_closed else ():
                try:
                    self._steps.send_multipart([name_of(rank), raw])
                except zmq.ZMQError:
                    unreachable.append(rank)
        return unreachable

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        decoder = msgspec.msgpack.Decoder(ToLeader)
        beat_s, probe_at = self._silence_s / BEATS_A_SILENCE, 0.0
        try:
            while True:
                wait_s = beat_s if len(self._connected) == len(self._others) else CONNECT_INTERVAL_S
                if self._reports.poll(int(1000 * wait_s)):
                    self._take_report(decoder, self._reports.recv())
                if (now := time.monotonic()) >= probe_at and not self._failure:
                    self._probe()
                    probe_at = now + wait_s
        except zmq.ContextTerminated:
            pass
        except Exception as error:
            log.exception("the thread of the ranks failed")
            self._fail(f"the thread of the ranks failed: {error}")
        finally:
            self._reports.close(linger=0)

    def _probe(self) -> None:
        """Looks whether all ranks that were connected still are."""
        unreachable = self._send(None, self._others)
        with self._changed:
            self._connected |= set(self._others) - set(unreachable)
            self._changed.notify_all()
        for rank in self._connected & set(unreachable):
            self._lose(rank)

    def _take_report(self, decoder: msgspec.msgpack.Decoder[ToLeader], raw: bytes) -> None:
        try:
            message: ToLeader = decoder.decode(raw)
        except msgspec.DecodeError as error:
            log.warning("ignored a message that is none of a rank's: %s", error)
            return
        if isinstance(message, TransferReport):
            if (handle := self._report_handlers.get((message.rank, message.transport))) is not None:
                handle(message)
            return
        if isinstance(message, Failed):
            member = self._members.get(message.rank)
            self._fail(f"rank {message.rank} ({member.where if member else 'not ready yet'}) failed: {message.reason}")
            return
        with self._changed:
            if isinstance(message, Done):
                self._done[message.rank].append(message)
            else:
                self._members[message.rank] = message
            self._changed.notify_all()
