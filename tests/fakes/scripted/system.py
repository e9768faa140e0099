"""A router, a prefill worker and decode workers of a scripted model, each in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.process import HeldPort
from tests.fakes.scripted.model import write_model
from tests.fakes.waiting import PATIENCE_S

MODEL = "scripted"
ROOT = Path(__file__).parents[3]
BLOCK_SIZE = 16
POOL_BLOCKS = 1 << 14


class ScriptedSystem:
    """`rules`: see `script.Rule`. A step takes `step_s`. Use it as a context."""

    def __init__(
        self, directory: Path, rules: Sequence[Mapping[str, Any]], *, num_decode: int = 1, step_s: float = 0.0
    ) -> None:
        self._directory, self._stack = directory, ExitStack()
        self.model = MODEL
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        script = directory / "script.json"
        directory.mkdir(parents=True, exist_ok=True)
        script.write_text(json.dumps(list(rules)), encoding="utf-8")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVRELAY_")}
        self._environment = environment | {"KVRELAY_TEST_SCRIPT": str(script)}
        try:
            self._redis = self._stack.enter_context(EmbeddedRedis())
            self.base_url = self._start_all(num_decode, step_s)
            self.http = self._stack.enter_context(httpx.Client(base_url=self.base_url, timeout=2 * PATIENCE_S))
            self._wait_until_ready({f"decode-{number}" for number in range(num_decode)} | {"prefill-0"})
        except BaseException:
            self._stack.close()
            raise

    def kill(self, worker_id: str) -> None:
        self._processes[worker_id].send_signal(signal.SIGKILL)
        self._processes[worker_id].wait(PATIENCE_S)

    def attempts(self, request_id: str) -> list[dict[str, Any]]:
        """The attempts of a request's only sequence, with their workers."""
        record = self.http.get(f"/requests/{request_id}").raise_for_status().json()
        (sequence,) = record["sequences"]
        attempts: list[dict[str, Any]] = sequence["attempts"]
        return attempts

    def requests(self) -> list[dict[str, Any]]:
        """Records of the requests that ended."""
        records: list[dict[str, Any]] = self.http.get("/requests").raise_for_status().json()["requests"]
        return records

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._stack.close()

    def _start_all(self, num_decode: int, step_s: float) -> str:
        model = write_model(self._directory / "model")
        profile = self._directory / "profile.json"
        costs = {"fixed_s": step_s, "token_s": 0, "pair_s": 0, "kv_bytes_per_token": 8}
        sizes = {"kv_tokens": BLOCK_SIZE * POOL_BLOCKS, "transfer_bytes_s": 1e9}
        profile.write_text(json.dumps({"name": "scripted", **costs, **sizes}), encoding="utf-8")
        named = ["--model", str(model), "--served-model-name", MODEL]
        worker = [*named, "--backend", "simulated", "--profile", str(profile), "--overlap", "off"]
        worker += ["--block-size", str(BLOCK_SIZE), "--token-budget", "8192"]
        for name in ["prefill-0", *(f"decode-{number}" for number in range(num_decode))]:
            role = name.partition("-")[0]
            self._start(name, "tests.fakes.scripted.worker", role, "--worker-id", name, *worker)
        port = self._stack.enter_context(HeldPort()).port
        flags = ["--port", str(port), "--local-prefill-tokens", "0", "--max-attempts", "10"]
        self._start("router", "kvrelay_router", *named, *flags)
        return f"http://127.0.0.1:{port}"

    def _start(self, name: str, *arguments: str) -> None:
        log = self._stack.enter_context((self._directory / f"{name}.log").open("wb"))
        command = [sys.executable, "-m", *arguments, "--redis-url", self._redis.url]
        process = self._stack.enter_context(
            subprocess.Popen(command, stdout=log, stderr=log, env=self._environment, cwd=ROOT)
        )
        self._stack.callback(process.kill)
        self._processes[name] = process

    def _wait_until_ready(self, names: set[str]) -> None:
        deadline = time.monotonic() + 2 * PATIENCE_S
        while self._ready_workers() != names:
            for name, process in self._processes.items():
                if process.poll() is not None:
                    raise AssertionError(f"{name} ended:\n{(self._directory / f'{name}.log').read_text()[-3000:]}")
            assert time.monotonic() < deadline, "the system did not become ready"
            time.sleep(0.05)

    def _ready_workers(self) -> set[str]:
        try:
            workers = self.http.get("/fleet").raise_for_status().json()["workers"]
        except httpx.HTTPError:
            return set()
        return {worker["worker_id"] for worker in workers if worker["state"] == "ready"}
