"""A rank other than 0: has loaded its part, and computes every step that rank 0 sends.

The main thread computes. A second one, with an event loop, takes all messages, carries out the calls to transports at
once, also while a step is computed, and ends the process when the connection ends, also while the main thread waits in
a collective. Calls beside steps are safe because rank 0 pushes blocks when the step that computed them has ended on all
ranks, and admits blocks that no step in flight uses. A step waits for the calls that were sent before it, so a released
slot is not written any more when a step uses it. Transports with one-sided writes cannot promise that: rank 0 keeps
their slots until the sender has stopped.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from queue import SimpleQueue

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvrelay.curve import CurveKeys, KeysDiffer
from kvrelay.handoff.transports.base import ReceiverEvent, SenderEvent, TransferReceiver, TransferSender
from kvrelay.messaging.zmq_context import ZmqContext, connect, tcp_host
from kvrelay.process_identity import own_identity
from kvrelay.ranks.messages import (
    Done,
    End,
    Failed,
    FromLeader,
    Meeting,
    Ready,
    Step,
    ToLeader,
    TransferReport,
    decoder_of_members,
    encode,
)
from kvrelay.ranks.rank_group import LINGER_MS, beat, name_of
from kvrelay.ranks.ranked_runner import PartRunner
from kvrelay.ranks.transfers import carry_out
from kvrelay.step.batch import WorkerBatch

log = logging.getLogger(__name__)

LAST_MESSAGES_S = 0.1
"""Time for the messages that came before the end of the connection, which ZMQ reports first."""
Transport = TransferSender | TransferReceiver


class RankEnds(Exception):
    """The rank cannot go on. The message is for the user."""


class RankMember:
    """One rank's connection to rank 0. `host`: rank 0's, at which it meets the others. Raises RankEnds if their keys
    differ."""

    def __init__(self, rank: int, host: str, meeting: Meeting, curve: CurveKeys | None = None) -> None:
        self._rank = rank
        self._context = ZmqContext()
        self._steps, self._reports = self._context.socket(zmq.DEALER), self._context.socket(zmq.PUSH)
        self._steps.setsockopt(zmq.IDENTITY, name_of(rank))
        self._events = self._steps.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        beat(self._steps, meeting.silence_s)
        for each, port in ((self._steps, meeting.steps_port), (self._reports, meeting.reports_port)):
            each.set_hwm(0)
            each.setsockopt(zmq.IPV6, int(":" in host))
            try:
                connect(each, f"{tcp_host(host)}:{port}{meeting.key}", curve)
            except KeysDiffer as error:
                self.close()
                raise RankEnds(f"rank 0: {error}") from error
        self._reporting = threading.Lock()  # guards the socket of reports
        self._batches: SimpleQueue[WorkerBatch | None] = SimpleQueue()  # None: the group ends
        self._decoder = decoder_of_members()
        self._transports: Mapping[str, Transport] = {}
        self._has_ended = False

    def run(self, runner: PartRunner, transports: Mapping[str, Transport]) -> None:
        """Computes steps until the group ends. Takes over the transports. Raises RankEnds."""
        self._transports = transports
        started, loop = threading.Event(), asyncio.new_event_loop()
        thread = threading.Thread(target=self._communicate, args=(loop, started), name="rank", daemon=True)
        thread.start()
        started.wait()
        endpoints = {
            name: dict(each.endpoint) if isinstance(each, TransferReceiver) else {} for name, each in transports.items()
        }
        where = f"process {os.getpid()} on {socket.gethostname()}"
        self._say(Ready(self._rank, where, runner.spec.fingerprint, own_identity(), endpoints))
        try:
            while (batch := self._batches.get()) is not None:
                self._run_step(runner, batch)
        except Exception as error:
            log.debug("the rank ends", exc_info=error)
            self._say(Failed(self._rank, f"{type(error).__name__}: {error}"))
            raise RankEnds(str(error) or type(error).__name__) from error
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            for transport in transports.values():
                transport.close()
            self.close()

    def close(self) -> None:
        """Closes the connections. Idempotent."""
        if not self._context.is_closed:
            self._steps.disable_monitor()
            self._events.close(linger=0)  # the context does not know this socket
            self._context.close(LINGER_MS)

    def _run_step(self, runner: PartRunner, batch: WorkerBatch) -> None:
        began, error, waited_s = time.perf_counter(), "", runner.waited_s
        try:
            runner.follow(batch)
        except IndexError as wrong:
            error = str(wrong)
        self._say(Done(self._rank, time.perf_counter() - began - (runner.waited_s - waited_s), error))

    def _say(self, message: ToLeader) -> None:
        with self._reporting:
            self._reports.send(encode(message))

    # -- the second thread --------------------------------------------------------------------------------------------

    def _communicate(self, loop: asyncio.AbstractEventLoop, started: threading.Event) -> None:
        async def start() -> None:
            for name, transport in self._transports.items():
                transport.start(partial(self._report, name, transport))
            for each, take in ((self._steps, self._take_messages), (self._events, self._take_events)):
                loop.add_reader(int(each.getsockopt(zmq.FD)), take)
                loop.call_soon(take)  # the descriptor tells of changes alone

        try:
            loop.set_exception_handler(lambda _, context: _end(str(context.get("exception", context["message"]))))
            loop.run_until_complete(start())
            started.set()
            loop.run_forever()
        except Exception as error:
            _end(f"its transports did not start: {error}")
        finally:
            loop.close()

    def _take_messages(self) -> None:
        with suppress(zmq.Again):
            while True:
                if raw := self._steps.recv(zmq.NOBLOCK):  # empty: rank 0 looks whether this rank is connected
                    self._handle(self._decoder.decode(raw))

    def _handle(self, message: FromLeader) -> None:
        match message:
            case Step(batch):
                self._batches.put(batch)
            case End(reason):
                log.info("the worker ends%s", f": {reason}" if reason else "")
                self._has_ended = True
                self._batches.put(None)
            case call:
                carry_out(call, self._transports[call.transport])

    def _take_events(self) -> None:
        with suppress(zmq.Again):
            recv_monitor_message(self._events, zmq.NOBLOCK)
            asyncio.get_running_loop().call_later(LAST_MESSAGES_S, self._end_without_connection)

    def _end_without_connection(self) -> None:
        """A connection that ended is of no use, although ZMQ makes another one: messages may be lost between them."""
        self._take_messages()
        if not self._has_ended:
            _end("the connection to rank 0 has ended")

    def _report(self, name: str, transport: Transport, event: SenderEvent | ReceiverEvent) -> None:
        counters = transport.counters if isinstance(transport, TransferSender) else None
        self._say(TransferReport(self._rank, name, event, counters))


def _end(reason: str) -> None:
    """Ends the process at once: its main thread may wait for another rank for ever."""
    log.error("the rank ends: %s", reason)
    logging.shutdown()
    os._exit(1)
