"""One router with the fleets of two models, all in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.process import HeldPort
from tests.e2e import reference
from tests.e2e.conftest import DEMO_MODEL
from tests.e2e.prompts import prompt_of
from tests.fakes.service_processes import ServiceProcesses
from tests.fakes.waiting import wait_until

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

MAX_TOKENS = 12
DEMO, TINY = "kvrelay-demo", "tiny"
WORKER = ("--dtype", "float32", "--threads", "1", "--num-blocks", "64", "--transfer", "zmq")


class TwoFleets(ServiceProcesses):
    """A router, and a prefill and a decode worker of each model."""

    def __init__(self, directory: Path, redis_url: str, models: dict[str, Path]) -> None:
        super().__init__(directory, redis_url)
        self._models = models
        self._fleets = directory / "fleets.toml"
        self._fleets.write_text(f'[[fleet]]\nmodel = "{models[TINY]}"\nserved_model_name = "{TINY}, alias"\n')

    def start_router(self, *more: str, name: str = "router") -> None:
        """Requests go to the newest router."""
        port = self.hold_port()
        self.http = self.client(port)
        flags = ("--fleets-file", str(self._fleets), "--local-prefill-tokens", "0", "--metrics-port", str(port))
        self._start(name, DEMO, "router", "--port", str(port), *flags, *more)

    def start_worker(self, role: str, model: str, *more: str) -> None:
        # Both fleets have workers of these names.
        named = ("--served-model-name", model, "--worker-id", f"{role}-0")
        self._start(f"{role} of {model}", model, role, *WORKER, *named, *more)

    def start_workers(self, model: str) -> None:
        for role in ("prefill", "decode"):
            self.start_worker(role, model)

    def _start(self, name: str, model: str, role: str, *arguments: str) -> None:
        self.start(name, "kvrelay.cli.main", role, "--model", str(self._models[model]), *arguments)

    def ready_models(self) -> set[str]:
        """The models with a ready worker of each role; none until the router serves."""
        models = self.get(self.http, "/ready").get("models", {})
        return {
            name for name, each in models.items() if each["ready"] and each["workers"] == {"prefill": 1, "decode": 1}
        }

    def wait_until_ready(self, *models: str) -> None:
        self.wait_until(lambda: self.ready_models() >= set(models))

    def kill_workers(self, model: str) -> None:
        for role in ("prefill", "decode"):
            self.kill(f"{role} of {model}")

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


@contextmanager
def two_fleets(directory: Path, models: dict[str, Path], *flags: str, has_redis: bool = True) -> Iterator[TwoFleets]:
    """`flags`: more of the router."""
    with ExitStack() as stack:
        redis_url = stack.enter_context(EmbeddedRedis()).url if has_redis else "none"
        fleets = stack.enter_context(TwoFleets(directory, redis_url, models))
        fleets.start_router(*flags)
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
        fleets.kill(f"decode of {TINY}")
        moved = ("--http-port", str(ports["decode", TINY]), "--worker-id", "decode-1")
        fleets.processes["another decode"] = fleets.processes.pop(f"decode of {DEMO}")
        fleets.start_worker("decode", DEMO, *moved)
        expected = [(DEMO, "decode-0"), (DEMO, "decode-1"), (DEMO, "prefill-0"), (TINY, "prefill-0")]
        fleets.wait_until(
            lambda: sorted((each["model"], each["worker_id"]) for each in fleets.ready_workers(fleets.http)) == expected
        )
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
        one = fleets.http
        fleets.start_router(*flags, name="other router")
        other = fleets.http
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
