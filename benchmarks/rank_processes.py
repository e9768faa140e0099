"""Ranks that only transfer blocks, each in a process of its own, with the calls and reports of a worker's ranks."""

from __future__ import annotations

import resource
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import Thread
from typing import Literal

import msgspec
import zmq

from kvrelay.messaging.zmq_context import ZmqContext
from kvrelay.ranks.messages import Pushed, encode
from kvrelay.ranks.rank_transfers import RankTransfers
from kvrelay.ranks.transfer_messages import CALL_TOPIC, TransferCall, TransferReport
from kvrelay.transfer.base import PartReceiver, PartSender
from kvrelay.transfer.endpoints import Endpoint

HOST = "tcp://127.0.0.1"
START_MS = 60_000
MakeTransport = Callable[[int], PartSender | PartReceiver]
"""Makes a rank's transport, over a pool of its own, for the bytes of a rank's block. Must be importable by name."""


class RankProcesses:
    """The processes of one worker's ranks, as `RankCalls`. Used on one thread."""

    def __init__(self, size: int, make: MakeTransport, block_bytes: int) -> None:
        """Returns when all ranks listen. Raises RuntimeError if one does not come."""
        self._context = ZmqContext()
        self._publisher = self._context.socket(zmq.XPUB)
        self._reports = self._context.socket(zmq.PULL)
        ports = [each.bind_to_random_port(HOST) for each in (self._publisher, self._reports)]
        self._num_calls = [0] * size
        self._handlers: dict[tuple[int, str], Callable[[TransferReport], None]] = {}
        processes = get_context("forkserver")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = processes.Pipe()
            process = processes.Process(target=serve, args=(rank, make, block_bytes, ports, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        for _ in range(size):
            if not self._publisher.poll(START_MS):
                raise RuntimeError("a rank did not start")
            self._publisher.recv()  # its subscription
        self._endpoints: list[dict[str, Endpoint]] = [pipe.recv() for pipe in self._pipes]
        self._context.hand_over(self._reports)
        Thread(target=self._take_reports, name="reports", daemon=True).start()

    def publish_call(self, rank: int, call: TransferCall) -> None:
        self._num_calls[rank] += 1
        topic, number = CALL_TOPIC + bytes([rank]), self._num_calls[rank].to_bytes(8, "little")
        self._publisher.send_multipart([topic, number, encode(call)])

    def on_report(self, rank: int, transport: str, handle: Callable[[TransferReport], None]) -> None:
        self._handlers[rank, transport] = handle

    def endpoints_of(self, rank: int) -> Mapping[str, Endpoint]:
        return self._endpoints[rank]

    @property
    def identities(self) -> Sequence[str]:
        return ()

    def cpu_s(self) -> float:
        """CPU seconds of all ranks since their start."""
        return sum(self._ask(pipe, "cpu") for pipe in self._pipes)

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            self._ask(pipe, "end")
            process.join()
        self._context.close()

    @staticmethod
    def _ask(pipe: Connection, question: Literal["cpu", "end"]) -> float:
        pipe.send(question)
        answer: float = pipe.recv()
        return answer

    def _take_reports(self) -> None:
        decoder = msgspec.msgpack.Decoder(Pushed)
        try:
            while True:
                report = decoder.decode(self._reports.recv())
                if not isinstance(report, TransferReport):
                    raise TypeError(f"a rank reported {report}")
                self._handlers[report.rank, report.transport](report)
        except zmq.ContextTerminated:
            pass
        finally:
            self._reports.close(linger=0)


def serve(rank: int, make: MakeTransport, block_bytes: int, ports: Sequence[int], pipe: Connection) -> None:
    """A rank's process: carries calls out until it is asked to end."""
    transport = make(block_bytes)
    transfers = RankTransfers("rank", rank, {transport.name: transport})
    context = ZmqContext()
    calls, results = context.socket(zmq.SUB), context.socket(zmq.PUSH)
    for socket, port in zip((calls, results), ports, strict=True):
        socket.connect(f"{HOST}:{port}")
    failures: list[str] = []
    transfers.start(context, calls_of(calls, rank), results, failures.append)
    pipe.send(transfers.endpoints)
    while pipe.recv() == "cpu":
        if failures:
            raise RuntimeError(failures[0])
        pipe.send(cpu_s())
    transfers.close()
    context.close()
    pipe.send(cpu_s())


def calls_of(socket: zmq.Socket[bytes], rank: int) -> zmq.Socket[bytes]:
    """The socket, with the calls to this rank alone."""
    socket.subscribe(CALL_TOPIC + bytes([rank]))
    return socket


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
