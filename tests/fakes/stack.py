"""The whole system as a user starts it: `kvrelay up` in a process of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import httpx
import psutil

from tests.fakes.waiting import PATIENCE_S, wait_until

START_TIMEOUT_S = 120.0
IDLE_STATES = ("free", "cached", "total")


class StackFailed(AssertionError):
    """The stack did not start, or ended by itself."""


class Stack:
    """`kvrelay up` with a model, on a free port. Its logs go to `state_dir`. `api_key` is what its requests present."""

    def __init__(
        self,
        model: Path | None,
        state_dir: Path,
        *flags: str,
        api_key: str = "",
        environ: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._log_path = state_dir / "up.log"
        state_dir.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "kvrelay.cli.main", "up", "--port", "0", "--state-dir", str(state_dir)]
        command += ["--model", str(model)] if model is not None else []
        command += flags
        self.state_dir = state_dir
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVRELAY_")}
        # Most tests are about handoffs of short prompts, which would otherwise stay on decode once speeds are measured.
        environment["KVRELAY_LOCAL_PREFILL_TOKENS"] = "0"
        if not {"simulated", "cuda"} & set(flags):
            # A worker takes its pool from the system as it starts, 1 GiB by default: a second of CPU time.
            environment["KVRELAY_KV_MEMORY_BYTES"] = "256MiB"
        environment |= environ
        with self._log_path.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        self.base_url = self._wait_until_ready()
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self.http = httpx.Client(base_url=self.base_url, timeout=2 * PATIENCE_S, headers=headers)
        self.model: str = self.http.get("/v1/models").json()["data"][0]["id"]

    def fleet(self) -> dict[str, Any]:
        """The router's answer to `/fleet`."""
        answer: dict[str, Any] = self.http.get("/fleet").raise_for_status().json()
        return answer

    def workers(self, *roles: str) -> list[dict[str, Any]]:
        """The fleet's workers, of these roles if any are given, as they are now: of a worker that answers late, the
        router shows what it heard before."""
        found: list[dict[str, Any]] = []

        def are_current() -> bool:
            found[:] = [worker for worker in self.fleet()["workers"] if not roles or worker["role"] in roles]
            return all(worker["live"] for worker in found if worker["state"] in ("ready", "silent"))

        wait_until(are_current)
        return found

    def busy_blocks(self) -> dict[str, dict[str, int]]:
        """Blocks that are neither free nor cached, by worker and state."""
        busy = {}
        for worker in self.workers():
            held = {state: n for state, n in worker["blocks"].items() if n and state not in IDLE_STATES}
            if held:
                busy[worker["worker_id"]] = held
        return busy

    def wait_until_clean(self) -> None:
        """Until nothing of any request is left on any worker."""
        deadline = time.monotonic() + PATIENCE_S
        while busy := self.busy_blocks():
            if time.monotonic() > deadline:
                raise AssertionError(f"blocks are held although nothing runs: {busy}")
            time.sleep(0.05)

    def complete(self, prompt: list[int] | str, max_tokens: int, **parameters: object) -> dict[str, Any]:
        """A greedy completion's only choice, with token ids."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "return_token_ids": True}
        answer = self.http.post("/v1/completions", json=body | {"temperature": 0} | parameters)
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    def children(self) -> dict[str, int]:
        """Process ids of router and workers, by worker id as in the log directory."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                arguments = " ".join(child.cmdline())
                if "kvrelay_" in arguments:
                    name = re.search(r"--worker-id[ =](\S+)", arguments)
                    found[name.group(1) if name else "router"] = child.pid
        return found

    def log(self) -> str:
        """What `kvrelay up` has printed."""
        return self._log_path.read_text()

    def stop(self) -> int:
        """Ctrl-C; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.stop()

    def _wait_until_ready(self) -> str:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            text = self._log_path.read_text()
            if match := re.search(r"Serving \S+ at (http://\S+)/v1", text):
                return match.group(1)
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        self.process.kill()
        raise StackFailed(f"kvrelay up did not become ready:\n{self._log_path.read_text()[-4000:]}")
