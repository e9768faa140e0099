"""Ranks that only transfer blocks, each in a process of its own, with the calls and reports of a worker's ranks."""

from __future__ import annotations

import resource
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import Thread
from types import SimpleNamespace
from typing import cast

from kvrelay.handoff.transports.base import TransferReceiver, TransferSender
from kvrelay.ranks.local_ranks import LocalRanks
from kvrelay.ranks.messages import Meeting
from kvrelay.ranks.rank_group import RankGroup
from kvrelay.ranks.rank_member import RankMember
from kvrelay.ranks.ranked_runner import PartRunner

START_S = 60
MakeTransport = Callable[[int], TransferSender | TransferReceiver]
"""Makes a rank's transport, over a pool of its own, for the bytes of a rank's block. Must be importable by name."""


NO_MODEL = cast(PartRunner, SimpleNamespace(spec=SimpleNamespace(fingerprint="")))
"""The part of a rank that computes nothing."""


class RankProcesses:
    """The processes of one worker's ranks, 1 to `size` of the group."""

    def __init__(self, size: int, make: MakeTransport, block_bytes: int) -> None:
        """Returns when all ranks are connected. Raises RanksFailed if one does not come."""
        self.group = RankGroup(1 + size, LocalRanks([]))
        processes = get_context("forkserver")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(1, 1 + size):
            ours, theirs = processes.Pipe()
            given = (rank, make, block_bytes, self.group.meeting, theirs)
            process = processes.Process(target=serve, args=given, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self.group.await_ready("", START_S)

    def cpu_s(self) -> float:
        """CPU seconds of all ranks since their start."""
        for pipe in self._pipes:
            pipe.send("cpu")
        used: list[float] = [pipe.recv() for pipe in self._pipes]
        return sum(used)

    def close(self) -> None:
        self.group.close()
        for process in self._processes:
            process.join()


def serve(rank: int, make: MakeTransport, block_bytes: int, meeting: Meeting, pipe: Connection) -> None:
    """A rank's process: carries calls out until its group ends."""
    transport = make(block_bytes)
    Thread(target=answer, args=(pipe,), daemon=True).start()
    RankMember(rank, "127.0.0.1", meeting).run(NO_MODEL, {transport.name: transport})


def answer(pipe: Connection) -> None:
    """Tells the CPU seconds of this process as often as it is asked."""
    while pipe.recv():
        used = resource.getrusage(resource.RUSAGE_SELF)
        pipe.send(used.ru_utime + used.ru_stime)
