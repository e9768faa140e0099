"""The processes of a group's other ranks on this machine."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import suppress

from kvrelay.process import describe_exit
from kvrelay.ranks.rank_group import RankCommand, RanksFailed
from kvrelay.ranks.rank_process import RankProcess

END_SOON_S = 2.0
"""Time between the end of a process's connections and its own."""
END_WITHIN_S = 5.0
"""Time for the processes to end by themselves before they are killed."""


class GroupWorkers:
    """Starts the processes and watches them, on a thread that lives as long as they may: the kernel kills them when the
    thread that started them ends."""

    def __init__(self, commands: Seq[RankCommand]) -> None:
        """Raises RanksFailed if a command cannot be run."""
        self.first_end: Future[str] = Future()
        """Has the reason once a process has ended."""
        self.on_end: Callable[[str], None] = lambda reason: None
        self._commands = commands
        self._processes: list[RankProcess] = []
        self._closing, self._to_close = os.pipe()
        self._closes_at = 0.0
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="group-workers", daemon=True)
        self._thread.start()
        started.result()

    @property
    def ended(self) -> str:
        """Text on how the first process ended; "" while all run."""
        return self.first_end.result() if self.first_end.done() else ""

    def why_lost(self, error: Exception) -> str:
        """Why the group is lost to this rank: how a process has ended, or the error if none ends soon."""
        with suppress(TimeoutError):
            return self.first_end.result(END_SOON_S)
        return str(error)

    def check(self) -> None:
        """Raises RanksFailed if a process has ended."""
        if self.ended:
            raise RanksFailed(self.ended)

    def terminate(self) -> None:
        """Has the processes drain and end."""
        for process in self._processes:
            if process.exit_status() is None:
                os.kill(process.pid, signal.SIGTERM)

    def close(self, *, within_s: float = END_WITHIN_S) -> None:
        """Ends the processes, and kills those that take longer. Idempotent."""
        if self._thread.is_alive():
            self._closes_at = time.monotonic() + within_s
            with suppress(OSError):
                os.write(self._to_close, b"x")
            self._thread.join()

    def _run(self, started: Future[None]) -> None:
        try:
            for command in self._commands:
                self._processes.append(RankProcess(command.rank, command.command, command.environ))
        except OSError as error:
            self._end_all(0.0)
            started.set_exception(RanksFailed(f"cannot start a rank: {error}"))
            return
        started.set_result(None)
        self._watch()
        self._end_all(max(0.0, self._closes_at - time.monotonic()))

    def _watch(self) -> None:
        """Returns when the processes are to be ended."""
        poller, by_fd = select.poll(), {process.fd: process for process in self._processes}
        for fd in (self._closing, *by_fd):
            poller.register(fd, select.POLLIN)
        while True:
            for fd, _ in poller.poll():
                if fd == self._closing:
                    return
                process = by_fd[fd]
                poller.unregister(fd)
                process.wait(END_WITHIN_S)
                if not self.first_end.done():
                    reason = f"rank {process.rank} {describe_exit(process.exit_status() or 0)}"
                    self.first_end.set_result(reason)
                    self.on_end(reason)

    def _end_all(self, within_s: float) -> None:
        until = time.monotonic() + within_s
        for process in self._processes:
            process.wait(max(0.0, until - time.monotonic()))
        for process in self._processes:
            process.close()
        os.close(self._closing)
        os.close(self._to_close)
