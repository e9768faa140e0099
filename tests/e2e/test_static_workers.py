"""Services as a user starts them, each alone, without any Redis, and with one that is away at their start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvrelay.fleet.embedded import EmbeddedRedis
from tests.e2e import reference
from tests.e2e.conftest import DEMO_MODEL
from tests.e2e.prompts import prompt_of
from tests.fakes.service_processes import ServiceProcesses
from tests.fakes.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

MAX_TOKENS = 12
COMMON = ["--model", str(DEMO_MODEL)]
WORKER = ["--dtype", "float32", "--threads", "1", "--num-blocks", "64", "--transfer", "zmq"]


class Services(ServiceProcesses):
    """A prefill worker, a decode worker, and a router that has their pages' addresses; ports stay theirs."""

    def __init__(self, directory: Path, redis_url: str) -> None:
        super().__init__(directory, redis_url)
        self._ports = {name: str(self.hold_port()) for name in ("router", "prefill", "decode")}
        self.http = self.client(int(self._ports["router"]))

    def begin(self, name: str, *flags: str) -> None:
        if name == "router":
            own = ["--port", self._ports[name], "--local-prefill-tokens", "0"]
            for worker in ("prefill", "decode"):
                own += ["--static-worker", f"http://127.0.0.1:{self._ports[worker]}"]
        else:
            own = [*WORKER, "--http-port", self._ports[name]]
        self.start(name, "kvrelay.cli.main", name, *COMMON, *own, *flags)

    def fleet(self) -> dict[str, Any]:
        """The router's view; without anything in it until it serves."""
        return self.get(self.http, "/fleet") or {"workers": [], "router": {}, "prefix_index": {}}

    def ready(self) -> list[tuple[str, str]]:
        """Roles and incarnations of the ready workers, prefill first."""
        return [(each["role"], each["incarnation"]) for each in self.ready_workers(self.http)]

    def wait_until_ready(self, *but: tuple[str, str]) -> None:
        """One of each role, and none of these starts."""

        def are_ready() -> bool:
            ready = self.ready()
            return [role for role, _ in ready] == ["prefill", "decode"] and not set(but) & set(ready)

        self.wait_until(are_ready)

    def check_output(self, seed: int) -> None:
        prompt = prompt_of(40, seed=seed)
        body = {"model": "kvrelay-demo", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
        answer = self.http.post("/v1/completions", json={**body, "return_token_ids": True, "ignore_eos": True})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == reference.greedy(DEMO_MODEL, prompt, MAX_TOKENS)
        assert answer.headers["x-kvrelay-prefill"] and answer.headers["x-kvrelay-decode"]


@pytest.mark.slow
def test_a_fleet_without_redis_serves_and_finds_a_worker_again(tmp_path: Path) -> None:
    with Services(tmp_path, "none") as services:
        services.begin("router", "--key-requests-per-minute", "0.001", "--key-burst", "2")
        for name in ("prefill", "decode"):
            services.begin(name)
        services.wait_until_ready()
        assert services.fleet()["router"]["registry"] == "none"
        assert services.fleet()["prefix_index"]["state"] == "off"
        services.check_output(1)
        _, before = services.ready()
        services.kill("decode")
        services.begin("decode")
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
                services.begin(name)
            services.wait_until_ready()
            assert services.fleet()["router"]["registry"] not in ("ok", "none")
            services.check_output(1)
            starts = services.ready()
            redis.restart()
            wait_until(lambda: services.fleet()["router"]["registry"] == "ok")
            wait_until(lambda: services.fleet()["prefix_index"]["state"] == "current")
            wait_until(lambda: "joined the fleet" in services.log("decode"))
            wait_until(lambda: services.ready() == starts)
            services.check_output(2)


def test_an_answer_says_whether_its_workers_round_alike(tmp_path: Path) -> None:
    body = {"model": "kvrelay-demo", "prompt": prompt_of(40), "max_tokens": MAX_TOKENS, "temperature": 0}
    with Services(tmp_path, "none") as services:
        for name in ("router", "prefill", "decode"):
            services.begin(name)
        services.wait_until_ready()
        (numerics,) = {each["numerics"] for each in services.fleet()["workers"]}
        assert len(numerics) == 8
        assert services.http.post("/v1/completions", json=body).headers["x-kvrelay-numerics"] == numerics
        _, before = services.ready()
        services.kill("decode")
        services.begin("decode", "--no-fused-layers")
        services.wait_until_ready(before)
        *_, other = [each["numerics"] for each in services.fleet()["workers"] if each["role"] == "decode"]
        assert services.http.post("/v1/completions", json=body).headers["x-kvrelay-numerics"] == f"{numerics}, {other}"
