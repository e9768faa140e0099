"""The processes of the ranks on the engine's machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress

RANK_COMMAND = (sys.executable, "-m", "kvrelay.cli.main", "rank")
KILLED_WITHIN_S = 5.0
PARENT_VARIABLE = "KVRELAY_RANK_PARENT"
"""Has the process id of the worker that started the rank, which ends with it."""


class RankProcess:
    """A process of a rank. Start it on a thread that lives as long as the group: the kernel kills the rank when the
    thread that started it ends, so none outlives an engine that was killed."""

    def __init__(self, rank: int, command: Sequence[str], environ: Mapping[str, str]) -> None:
        """Starts the process. Raises OSError if the command cannot be run."""
        self.rank = rank
        self._process = subprocess.Popen(command, env={**os.environ, **environ}, stdin=subprocess.DEVNULL)
        self.fd = os.pidfd_open(self._process.pid)
        """Readable once the process has ended."""

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_status(self) -> int | None:
        """None while it runs; negative for a signal."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> bool:
        """Waits for its end. Returns False if that takes longer."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self._process.returncode is not None

    def kill(self) -> None:
        """Kills it if it runs."""
        self._process.kill()

    def close(self) -> None:
        """Kills it, and waits for its end."""
        self.kill()
        self.wait(KILLED_WITHIN_S)
        os.close(self.fd)
