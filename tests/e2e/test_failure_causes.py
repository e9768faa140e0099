"""What goes wrong in the model of a real worker process, as an HTTP client and the request's record show it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrelay.fleet.embedded import EmbeddedRedis
from tests.e2e.conftest import DEMO_MODEL
from tests.fakes.failing_worker import FailingToken
from tests.fakes.service_processes import ServiceProcesses
from tests.fakes.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
WORKER = ["--model", str(DEMO_MODEL), "--dtype", "float32", "--threads", "1", "--num-blocks", "100"]
WORKER += ["--token-budget", "64", "--max-running", "4", "--no-fused-layers"]
ROUTER = ["--model", str(DEMO_MODEL), "--max-attempts", "1", "--local-prefill-tokens", "0"]
SHORT_TIMEOUT_S = "2"


class FailingSystem(ServiceProcesses):
    """A prefill and a decode worker that fail at certain tokens, and two routers: `impatient` has a short time limit
    for requests. Every request has one attempt."""

    def __init__(self, directory: Path, redis_url: str) -> None:
        self.gate, self._armed = directory / "gate", directory / "armed"
        environ = {"KVRELAY_TEST_ARMED": str(self._armed), "KVRELAY_TEST_GATE": str(self.gate)}
        super().__init__(directory, redis_url, environ)
        os.mkfifo(self.gate)
        self._workers: dict[str, str] = {}  # ids by role
        self._numbers = count()
        for role in ("prefill", "decode"):
            self._start_worker(role)
        self.patient = self._start_router("patient")
        self.impatient = self._start_router("impatient", "--request-timeout-s", SHORT_TIMEOUT_S)
        self._until_ready()
        self._armed.touch()

    def replace(self, role: str) -> None:
        """Starts a worker in the place of one that has ended."""
        assert self.processes.pop(self._workers[role]).wait(PATIENCE_S) != 0
        self._armed.unlink()  # a worker tries its model at the start, with any tokens
        self._start_worker(role)
        self._until_ready()
        self._armed.touch()

    def num_committed(self) -> int:
        """How many handoffs the present decode worker has told `patient` of."""
        workers = self.ready_workers(self.patient)
        name = self._workers["decode"]
        return next(int(worker["totals"]["handoffs_committed"]) for worker in workers if worker["worker_id"] == name)

    def _start_worker(self, role: str) -> None:
        name = self._workers[role] = f"{role}-{next(self._numbers)}"
        self.start(name, "tests.fakes.failing_worker", role, "--worker-id", name, *WORKER)

    def _start_router(self, name: str, *flags: str) -> httpx.Client:
        port = self.hold_port()
        self.start(name, "kvrelay_router", *ROUTER, "--port", str(port), "--router-id", name, *flags)
        return self.client(port)

    def _until_ready(self) -> None:
        """Until both routers see the present workers, and no others, as ready."""
        expected = set(self._workers.values())

        def is_seen_by(router: httpx.Client) -> bool:
            return {each["worker_id"] for each in self.ready_workers(router)} == expected

        self.wait_until(lambda: is_seen_by(self.patient) and is_seen_by(self.impatient))


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FailingSystem]:
    with EmbeddedRedis() as redis, FailingSystem(tmp_path_factory.mktemp("system"), redis.url) as system:
        yield system


def read_by_prefill(token: FailingToken) -> dict[str, Any]:
    """A request whose prompt has the token."""
    return {"prompt": [5, 6, token, 7], "max_tokens": 4}


def read_by_decode(token: FailingToken) -> dict[str, Any]:
    """A request whose first sampled token it is, which only decode reads."""
    return {"prompt": [5, 6, 7], "max_tokens": 4, "logit_bias": {str(int(token)): 100}}


def check_failure(router: httpx.Client, body: dict[str, Any], status: int, code: str, kind: str, cause: str) -> None:
    """The answer has this status and code, its message contains `cause`, and the request's record has the kind."""
    answer = router.post("/v1/completions", json=body | {"model": "kvrelay-demo", "temperature": 0})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == (code, "server_error")
    assert cause in error["message"]
    record = router.get(f"/requests/{answer.headers['x-request-id']}").raise_for_status().json()
    assert record["failure_kind"] == kind
    assert cause in record["error"]
    assert [(each["finish"], each["failure_kind"]) for each in record["sequences"]] == [("abort", kind)]


def check_serves(router: httpx.Client) -> None:
    body = {"model": "kvrelay-demo", "prompt": [5, 6], "max_tokens": 4, "temperature": 0}
    answer = router.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text


READERS = pytest.mark.parametrize("request_with", [read_by_prefill, read_by_decode])


@READERS
def test_logits_that_are_not_finite(system: FailingSystem, request_with: Any) -> None:
    body = request_with(FailingToken.BAD_LOGITS)
    check_failure(system.patient, body, 502, "bad_logits", "bad_logits", "logits are not finite")
    check_serves(system.patient)


@READERS
def test_too_little_memory_for_a_step(system: FailingSystem, request_with: Any) -> None:
    body = request_with(FailingToken.OUT_OF_MEMORY)
    check_failure(system.patient, body, 502, "out_of_memory", "out_of_memory", "can't allocate memory")
    check_serves(system.patient)


@READERS
def test_a_step_that_outlasts_the_deadline(system: FailingSystem, request_with: Any) -> None:
    body = request_with(FailingToken.HANG)
    check_failure(system.impatient, body, 504, "request_timeout", "deadline", f"{SHORT_TIMEOUT_S} s")
    system.gate.open("wb").close()
    check_serves(system.patient)


@pytest.mark.parametrize(("role", "request_with"), [("prefill", read_by_prefill), ("decode", read_by_decode)])
def test_a_device_that_accepts_no_more_work(system: FailingSystem, role: str, request_with: Any) -> None:
    body = request_with(FailingToken.DEVICE_LOST)
    check_failure(system.patient, body, 502, "device_lost", "device_lost", "the test's device is gone")
    system.replace(role)  # its process has ended
    check_serves(system.patient)


@pytest.mark.parametrize(("role", "request_with"), [("prefill", read_by_prefill), ("decode", read_by_decode)])
def test_a_request_that_kills_its_worker(system: FailingSystem, role: str, request_with: Any) -> None:
    """The worker was lost with this request alone, which counts as its attempt."""
    body = request_with(FailingToken.CRASH)
    num_committed = system.num_committed()
    with ThreadPoolExecutor(1) as pool:
        lost = pool.submit(check_failure, system.patient, body, 502, "worker_lost", "worker_lost", f"{role}-")
        with system.gate.open("wb"):  # the worker is in the step that will end it
            if role == "decode":  # a decode worker that ends with its commit unsent is replaced in the same attempt
                wait_until(lambda: system.num_committed() > num_committed)
        lost.result()
    system.replace(role)
    check_serves(system.patient)
