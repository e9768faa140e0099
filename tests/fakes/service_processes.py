"""Services of kvrelay, each in a process of its own, for tests that start and end them one by one."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import httpx

from kvrelay.process import HeldPort, die_with_parent
from tests.fakes.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
START_S = 200.0
"""In which processes start on a slow machine, torch and all."""


class ServiceProcesses:
    """Each service has a log in `directory`. They end with the context, at the latest with the test's process."""

    def __init__(self, directory: Path, redis_url: str, environ: Mapping[str, str] = MappingProxyType({})) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self.stack = ExitStack()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVRELAY_")}
        self._environment = {**inherited, "KVRELAY_REDIS_URL": redis_url, **environ}

    def hold_port(self) -> int:
        """A port that nobody else gets while no service listens there."""
        return self.stack.enter_context(HeldPort()).port

    def client(self, port: int) -> httpx.Client:
        return self.stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=2 * PATIENCE_S))

    def start(self, name: str, module: str, *arguments: str) -> None:
        with (self._directory / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdout=log,
                stderr=log,
                env=self._environment,
                cwd=ROOT,
                preexec_fn=die_with_parent(),
            )

    def log(self, name: str) -> str:
        path = self._directory / f"{name}.log"
        return path.read_text() if path.exists() else ""  # a test may rename a process

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait(PATIENCE_S)

    def get(self, http: httpx.Client, path: str) -> dict[str, Any]:
        """What the router answers; empty until it serves. Raises AssertionError if a service has ended."""
        for name, process in self.processes.items():
            assert process.poll() is None, f"{name} ended:\n{self.log(name)[-3000:]}"
        try:
            answer: dict[str, Any] = http.get(path).json()
        except httpx.TransportError:
            return {}
        return answer

    def ready_workers(self, http: httpx.Client) -> list[dict[str, Any]]:
        """As the router sees them; none until it serves."""
        workers = self.get(http, "/fleet").get("workers", [])
        return [worker for worker in workers if worker["state"] == "ready"]

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        """For as long as starts may take."""
        deadline = time.monotonic() + START_S
        while not is_true():
            assert time.monotonic() < deadline, [f"{name}:\n{self.log(name)[-1500:]}" for name in self.processes]
            time.sleep(0.1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(PATIENCE_S)
            finally:
                process.kill()
                process.wait()
        self.stack.close()
