"""Services as a user starts them, each alone, without any Redis, and with one that is away at their start."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import httpx
import pytest

from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.process import HeldPort, die_with_parent
from tests.e2e import reference
from tests.e2e.conftest import DEMO_MODEL
from tests.e2e.prompts import prompt_of
from tests.fakes.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

START_S = 150.0
"""In which processes start on a slow machine, torch and all."""
MAX_TOKENS = 12
COMMON = ["--model", str(DEMO_MODEL)]
WORKER = ["--dtype", "float32", "--threads", "1", "--num-blocks", "64", "--transfer", "zmq"]


class Services:
    """A prefill worker, a decode worker, and a router that has their pages' addresses; ports stay theirs."""

    def __init__(self, directory: Path, redis_url: str) -> None:
        self._directory = directory
        self._redis_url = redis_url
        self._stack = ExitStack()
        self._ports = {name: self._stack.enter_context(HeldPort()).port for name in ("router", "prefill", "decode")}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.http = self._stack.enter_context(
            httpx.Client(base_url=f"http://127.0.0.1:{self._ports['router']}", timeout=2 * PATIENCE_S)
        )

    def start(self, name: str, *flags: str) -> None:
        port = str(self._ports[name])
        own = {"router": ["--port", port, "--local-prefill-tokens", "0"]}
        if name == "router":
            for worker in ("prefill", "decode"):
                own[name] += ["--static-worker", f"http://127.0.0.1:{self._ports[worker]}"]
        else:
            own[name] = [*WORKER, "--http-port", port]
        command = [sys.executable, "-m", "kvrelay.cli.main", name, *COMMON, "--redis", self._redis_url, *own[name]]
        environment = {each: value for each, value in os.environ.items() if not each.startswith("KVRELAY_")}
        with self.log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*command, *flags], stdout=log, stderr=log, env=environment, preexec_fn=die_with_parent()
            )

    def log(self, name: str) -> Path:
        return self._directory / f"{name}.log"

    def fleet(self) -> dict[str, Any]:
        """The router's view; empty until it serves."""
        for name, process in self.processes.items():
            assert process.poll() is None, self.log(name).read_text()[-3000:]
        try:
            view: dict[str, Any] = self.http.get("/fleet").raise_for_status().json()
        except httpx.TransportError:
            return {"workers": [], "router": {}, "prefix_index": {}}
        return view

    def ready(self) -> list[tuple[str, str]]:
        """Roles and incarnations of the ready workers, prefill first."""
        return [(each["role"], each["incarnation"]) for each in self.fleet()["workers"] if each["state"] == "ready"]

    def wait_until_ready(self, *but: tuple[str, str]) -> None:
        """One of each role, and none of these starts."""

        def are_ready() -> bool:
            ready = self.ready()
            return [role for role, _ in ready] == ["prefill", "decode"] and not set(but) & set(ready)

        deadline = time.monotonic() + START_S
        while not are_ready():
            assert time.monotonic() < deadline, f"{self.fleet()}\n{self.log('router').read_text()[-3000:]}"
            time.sleep(0.1)

    def check_output(self, seed: int) -> None:
        prompt = prompt_of(40, seed=seed)
        body = {"model": "kvrelay-demo", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
        answer = self.http.post("/v1/completions", json={**body, "return_token_ids": True, "ignore_eos": True})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == reference.greedy(DEMO_MODEL, prompt, MAX_TOKENS)
        assert answer.headers["x-kvrelay-prefill"] and answer.headers["x-kvrelay-decode"]

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
        self._stack.close()


@pytest.mark.slow
def test_a_fleet_without_redis_serves_and_finds_a_worker_again(tmp_path: Path) -> None:
    with Services(tmp_path, "none") as services:
        services.start("router", "--key-requests-per-minute", "0.001", "--key-burst", "2")
        for name in ("prefill", "decode"):
            services.start(name)
        services.wait_until_ready()
        assert services.fleet()["router"]["registry"] == "none"
        assert services.fleet()["prefix_index"]["state"] == "off"
        services.check_output(1)
        _, before = services.ready()
        services.processes["decode"].kill()
        services.processes["decode"].wait()
        services.start("decode")
        services.wait_until_ready(before)
        services.check_output(2)
        refused = services.http.post("/v1/completions", json={"model": "kvrelay-demo", "prompt": "otter"})
        assert refused.status_code == 429
        services.processes["decode"].terminate()
        assert services.processes["decode"].wait(PATIENCE_S) == 0


def test_services_that_start_while_redis_is_away_serve_and_take_it_when_it_comes(tmp_path: Path) -> None:
    with EmbeddedRedis() as redis:
        redis.stop()
        with Services(tmp_path, redis.url) as services:
            for name in ("router", "prefill", "decode"):
                services.start(name)
            services.wait_until_ready()
            assert services.fleet()["router"]["registry"] not in ("ok", "none")
            services.check_output(1)
            starts = services.ready()
            redis.restart()
            wait_until(lambda: services.fleet()["router"]["registry"] == "ok")
            wait_until(lambda: services.fleet()["prefix_index"]["state"] == "current")
            wait_until(lambda: "joined the fleet" in services.log("decode").read_text())
            wait_until(lambda: services.ready() == starts)
            services.check_output(2)
