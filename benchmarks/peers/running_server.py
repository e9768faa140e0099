"""Starts a server's processes, waits until they serve, and ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.peers.servers import Server, ServerProcess

POLL_S = 0.2
ANSWER_TIMEOUT_S = 5.0
STOP_TIMEOUT_S = 30.0
LOG_LINES = 4


class ServerFailed(Exception):
    """A process ended or did not become ready. The message has the end of its log."""


class RunningServer:
    """A context in which the server serves. Entering raises ServerFailed.

    Each process has a session of its own: Ctrl-C ends the benchmark, which then ends the process and its children.
    """

    def __init__(self, server: Server, log_dir: Path, start_timeout_s: float) -> None:
        self._server = server
        self._log_dir = log_dir
        self._start_timeout_s = start_timeout_s
        self._started: list[tuple[ServerProcess, subprocess.Popen[bytes], Path]] = []

    def __enter__(self) -> Self:
        deadline = time.monotonic() + self._start_timeout_s
        try:
            for number, process in enumerate(self._server.processes):
                self._start(process, self._log_dir / f"{self._server.name}-{number}.log")
            for started in self._started:
                self._wait(*started, deadline)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stop()

    def _start(self, process: ServerProcess, log_path: Path) -> None:
        environ = os.environ | dict(process.environ)
        with log_path.open("wb") as log:
            try:
                popen = subprocess.Popen(
                    process.argv, stdout=log, stderr=subprocess.STDOUT, env=environ, start_new_session=True
                )
            except OSError as error:
                raise ServerFailed(f"cannot start {process.argv[0]}: {error}") from error
        self._started.append((process, popen, log_path))

    def _wait(self, process: ServerProcess, popen: subprocess.Popen[bytes], log_path: Path, deadline: float) -> None:
        while not _is_ready(process):
            if popen.poll() is not None:
                raise ServerFailed(f"ended with status {popen.returncode} at the start: {_last_lines(log_path)}")
            if time.monotonic() > deadline:
                raise ServerFailed(f"not ready within {self._start_timeout_s:.0f} s: {_last_lines(log_path)}")
            time.sleep(POLL_S)

    def _stop(self) -> None:
        for _, popen, _ in self._started:
            if popen.poll() is None:
                popen.terminate()
        for _, popen, _ in self._started:
            with suppress(subprocess.TimeoutExpired):
                popen.wait(STOP_TIMEOUT_S)
            # The process's children are of its group, and may have outlived it.
            with suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)
            popen.wait()
        self._started.clear()


def _is_ready(process: ServerProcess) -> bool:
    try:
        with urllib.request.urlopen(process.ready_url, timeout=ANSWER_TIMEOUT_S) as answer:
            return bool(answer.status == 200) and process.is_ready(answer.read())
    except (urllib.error.URLError, OSError):
        return False


def _last_lines(log_path: Path) -> str:
    lines = [line.strip() for line in log_path.read_text(encoding="utf-8", errors="replace").splitlines()]
    return " / ".join([line for line in lines if line][-LOG_LINES:]) or "its log is empty"
