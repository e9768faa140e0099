"""One router with the fleets of two models, all in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.process import HeldPort, die_with_parent
from tests.e2e import reference
from tests.e2e.conftest import DEMO_MODEL
from tests.e2e.prompts import prompt_of
from tests.fakes.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

START_S = 200.0
MAX_TOKENS = 12
DEMO, TINY = "kvrelay-demo", "tiny"
WORKER = ("--dtype", "float32", "--threads", "1", "--num-blocks", "64", "--transfer", "zmq")


class TwoFleets:
    """A router, and a prefill and a decode worker of each model."""

    def __init__(self, directory: Path, redis_url: str, http: httpx.Client, models: dict[str, Path]) -> None:
        self._directory, self._redis_url = directory, redis_url
        self.http, self._models = http, models
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start_router(self, port: int, *more: str, name: str = "router") -> None:
        fleets = self._directory / "fleets.toml"
        fleets.write_text(f'[[fleet]]\nmodel = "{self._models[TINY]}"\nserved_model_name = "{TINY}, alias"\n')
        flags = ("--fleets-file", str(fleets), "--local-prefill-tokens", "0", "--metrics-port", str(port))
        self._start(name, DEMO, "router", "--port", str(port), *flags, *more)

    def start_worker(self, role: str, model: str, *more: str) -> None:
        # Both fleets have workers of these names.
        named = ("--served-model-name", model, "--worker-id", f"{role}-0")
        self._start(f"{role} of {model}", model, role, *WORKER, *named, *more)

    def start_workers(self, model: str) -> None:
        for role in ("prefill", "decode"):
            self.start_worker(role, model)

    def _start(self, name: str, model: str, *arguments: str) -> None:
        common = ["--model", str(self._models[model]), "--redis", self._redis_url]
        command = [sys.executable, "-m", "kvrelay.cli.main", arguments[0], *common, *arguments[1:]]
        environment = {each: value for each, value in os.environ.items() if not each.startswith("KVRELAY_")}
        with (self._directory / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, preexec_fn=die_with_parent()
            )

    def ready_models(self) -> set[str]:
        """The models with a ready worker of each role; none until the router serves."""
        for name, process in self.processes.items():
            assert process.poll() is None, (self._directory / f"{name}.log").read_text()[-3000:]
        try:
            models = self.http.get("/ready").json().get("models", {})
        except httpx.TransportError:
            return set()
        return {
            name for name, each in models.items() if each["ready"] and each["workers"] == {"prefill": 1, "decode": 1}
        }

    def wait_until_ready(self, *models: str) -> None:
        deadline = time.monotonic() + START_S
        while not self.ready_models() >= set(models):
            assert time.monotonic() < deadline, (self._directory / "router.log").read_text()[-3000:]
            time.sleep(0.1)

    def kill_workers(self, model: str) -> None:
        for role in ("prefill", "decode"):
            process = self.processes.pop(f"{role} of {model}")
            process.kill()
            process.wait(PATIENCE_S)

    def complete(self, model: str, prompt: list[int], **headers: str) -> httpx.Response:
        body = {"model": model, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
        return self.http.post("/v1/completions", json=body | {"return_token_ids": True}, headers=headers)

    def check_output(self, name: str, model: str, seed: int) -> None:
        prompt = [1 + token % (reference.vocab_size(self._models[model]) - 1) for token in prompt_of(40, seed=seed)]
        answer = self.complete(name, prompt)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == name
        assert answer.json()["choices"][0]["token_ids"] == reference.greedy(self._models[model], prompt, MAX_TOKENS)
        assert (answer.headers["x-kvrelay-prefill"], answer.headers["x-kvrelay-decode"]) == ("prefill-0", "decode-0")

    def fleet(self) -> dict[str, Any]:
        view: dict[str, Any] = self.http.get("/fleet").raise_for_status().json()
        return view

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(PATIENCE_S)
            finally:
                process.kill()


@contextmanager
def two_fleets(directory: Path, models: dict[str, Path], *flags: str, has_redis: bool = True) -> Iterator[TwoFleets]:
    """`flags`: more of the router."""
    with ExitStack() as stack:
        redis_url = stack.enter_context(EmbeddedRedis()).url if has_redis else "none"
        port = stack.enter_context(HeldPort()).port
        http = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=2 * PATIENCE_S))
        fleets = TwoFleets(directory, redis_url, http, models)
        stack.callback(fleets.stop)
        fleets.start_router(port, *flags)
        yield fleets


def test_two_models_behind_one_router(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    with two_fleets(tmp_path, {DEMO: DEMO_MODEL, TINY: tiny_model("qwen3")}) as fleets:
        fleets.start_workers(DEMO)
        fleets.wait_until_ready(DEMO)
        # The fleet of the other model comes later.
        fleets.check_output(DEMO, DEMO, 1)
        assert fleets.complete(TINY, [1, 2]).status_code == 503
        fleets.start_workers(TINY)
        fleets.wait_until_ready(DEMO, TINY)
        for seed in (2, 3):
            fleets.check_output(DEMO, DEMO, seed)
            fleets.check_output(TINY, TINY, seed)
            fleets.check_output("alias", TINY, seed)
        listed = fleets.http.get("/v1/models").json()["data"]
        assert [each["id"] for each in listed] == [DEMO, TINY, "alias"]
        assert fleets.complete("third", [1, 2]).json()["error"]["code"] == "model_not_found"
        view = fleets.fleet()
        workers = [(each["model"], each["role"], each["state"]) for each in view["workers"]]
        assert workers == [(model, role, "ready") for model in (DEMO, TINY) for role in ("prefill", "decode")]
        assert {model: each["requests"]["finished"] for model, each in view["models"].items()} == {DEMO: 3, TINY: 4}
        assert all(each["prefix_index"]["state"] == "current" for each in view["models"].values())

        metrics = fleets.http.get("/metrics").text.splitlines()
        assert f'kvrelay_requests_total{{outcome="finished",model="{TINY}"}} 4' in metrics
        assert f'kvrelay_workers{{role="decode",state="ready",model="{DEMO}"}} 1' in metrics

        fleets.kill_workers(TINY)
        fleets.check_output(DEMO, DEMO, 4)
        wait_until(lambda: TINY not in fleets.ready_models())
        fleets.check_output(DEMO, DEMO, 5)
        assert fleets.complete(TINY, [1, 2], **{"x-request-timeout": "1"}).status_code in (503, 504)
        # It comes back.
        fleets.start_workers(TINY)
        fleets.wait_until_ready(TINY)
        fleets.check_output(TINY, TINY, 6)
        fleets.check_output(DEMO, DEMO, 6)


def test_static_workers_of_two_models(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    with ExitStack() as stack:
        places = [(role, model) for model in (DEMO, TINY) for role in ("prefill", "decode")]
        ports = {place: stack.enter_context(HeldPort()).port for place in places}
        flags: list[str] = []
        for port in ports.values():
            flags += ["--static-worker", f"http://127.0.0.1:{port}"]
        models = {DEMO: DEMO_MODEL, TINY: tiny_model("qwen3")}
        fleets = stack.enter_context(two_fleets(tmp_path, models, *flags, has_redis=False))
        for (role, model), port in ports.items():
            fleets.start_worker(role, model, "--http-port", str(port))
        fleets.wait_until_ready(DEMO, TINY)
        for model in (DEMO, TINY):
            fleets.check_output(model, model, 1)
        # An address of one fleet comes back with a worker of the other: both notice.
        process = fleets.processes.pop(f"decode of {TINY}")
        process.kill()
        process.wait(PATIENCE_S)
        moved = ("--http-port", str(ports["decode", TINY]), "--worker-id", "decode-1")
        fleets.processes["another decode"] = fleets.processes.pop(f"decode of {DEMO}")
        fleets.start_worker("decode", DEMO, *moved)
        deadline = time.monotonic() + START_S
        expected = [(DEMO, "decode-0"), (DEMO, "decode-1"), (DEMO, "prefill-0"), (TINY, "prefill-0")]
        while sorted((each["model"], each["worker_id"]) for each in ready_workers(fleets)) != expected:
            assert time.monotonic() < deadline, fleets.fleet()
            time.sleep(0.1)
        assert fleets.complete(TINY, [1, 2], **{"x-request-timeout": "1"}).status_code in (503, 504)
        assert fleets.complete(DEMO, [1, 2]).status_code == 200


def test_routers_share_limits_of_keys_and_stored_responses_of_all_models(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    flags = ("--key-requests-per-minute", "0.001", "--key-burst", "6")
    with ExitStack() as stack:
        models = {DEMO: DEMO_MODEL, TINY: tiny_model("qwen3")}
        fleets = stack.enter_context(two_fleets(tmp_path, models, *flags))
        for model in models:
            fleets.start_workers(model)
        fleets.wait_until_ready(DEMO, TINY)
        port = stack.enter_context(HeldPort()).port
        fleets.start_router(port, *flags, name="other router")
        one, other = (
            fleets.http,
            stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=2 * PATIENCE_S)),
        )
        fleets.http = other
        fleets.wait_until_ready(DEMO, TINY)
        for model in (DEMO, TINY):  # each router continues what the other answered
            first = respond(one, model, input="What is an otter?")
            second = respond(other, model, input="Where?", previous_response_id=first["id"])
            assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"] + first["usage"]["output_tokens"]
            assert one.get(f"/v1/responses/{second['id']}").json() == second
        statuses = []
        for number in range(6):
            fleets.http = (one, other)[number % 2]
            statuses.append(fleets.complete((DEMO, TINY)[number // 2 % 2], [1, 2]).status_code)
        assert statuses == [200, 200, 429, 429, 429, 429], "four of six were responses"


def respond(client: httpx.Client, model: str, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/responses", json={"model": model, "max_output_tokens": 4, **fields})
    assert answer.status_code == 200, answer.text
    response: dict[str, Any] = answer.json()
    assert response["store"] is True
    return response


def ready_workers(fleets: TwoFleets) -> list[dict[str, Any]]:
    return [each for each in fleets.fleet()["workers"] if each["state"] == "ready"]
