"""A running `kvrelay up` with services that are real in all but the model, and what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

from tests.fakes.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
FAKE_SERVICES = Path(__file__).parent / "services"
GREETING = "curl http"


class Up:
    """A running `kvrelay up` and what it said so far."""

    def __init__(self, flags: Sequence[str], state_dir: Path, environ: dict[str, str]) -> None:
        self.lines: list[str] = []
        self._told = threading.Condition()
        inherited = filter(None, [os.environ.get("PYTHONPATH")])
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvrelay", "up", f"--state-dir={state_dir}", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(FAKE_SERVICES), str(ROOT), *inherited]), **environ},
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.family: list[psutil.Process] = []

    @property
    def output(self) -> str:
        return "\n".join(self.lines)

    def wait_for(self, pattern: str, count: int = 1, timeout_s: float = PATIENCE_S) -> None:
        """Until so many lines match."""
        with self._told:
            found = self._told.wait_for(
                lambda: sum(bool(re.search(pattern, line)) for line in self.lines) >= count, timeout_s
            )
        assert found, f"{pattern!r} did not come {count} times in:\n{self.output}"

    def wait_ready(self) -> None:
        self.wait_for(GREETING)
        self.remember_children()

    def remember_children(self) -> None:
        self.family = psutil.Process(self.process.pid).children(recursive=True)

    def child(self, word: str) -> psutil.Process:
        """The one running child with `word` in its command line."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        (found,) = [child for child in children if word in " ".join(child.cmdline())]
        return found

    def wait_exit(self, timeout_s: float = PATIENCE_S) -> int:
        status = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return status

    def survivors(self, timeout_s: float = PATIENCE_S) -> list[psutil.Process]:
        _, alive = psutil.wait_procs(self.family, timeout_s)
        return list(alive)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.wait_exit()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._told:
                self.lines.append(line.rstrip("\n"))
                self._told.notify_all()
        self.process.stdout.close()
