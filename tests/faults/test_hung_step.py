"""A step that never ends: the worker's process does, and its requests go on elsewhere."""

from __future__ import annotations

import errno
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrelay.fleet.embedded import EmbeddedRedis
from tests.e2e.conftest import DEMO_MODEL
from tests.fakes.failing_worker import FailingToken
from tests.fakes.service_processes import ServiceProcesses
from tests.fakes.waiting import PATIENCE_S, wait_until
from tests.faults.storm.processes import usual_dtype

pytestmark = [pytest.mark.timeout(300), pytest.mark.faults]
HANGS_AFTER_S = 4.0
PROMPT = [5, 6, 7, 8] * 9


def body(number: int, **fields: Any) -> dict[str, Any]:
    sampling = {"temperature": 1, "seed": number, "max_tokens": 300, "ignore_eos": True}
    return {"model": "kvrelay-demo", "prompt": [*PROMPT, 10 + number], "return_token_ids": True, **sampling, **fields}


def streamed(http: httpx.Client, request: dict[str, Any]) -> list[int]:
    token_ids: list[int] = []
    with http.stream("POST", "/v1/completions", json=request | {"stream": True}) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                token_ids += choice["token_ids"] or []
    return token_ids


def hold_gate(path: Path) -> int:
    """Opens the pipe at which a step hangs, once one does. It hangs until this is closed."""
    opened: list[int] = []

    def is_reader_there() -> bool:
        try:
            opened.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return False
        return True

    wait_until(is_reader_there)
    return opened[0]


def test_streams_of_a_worker_whose_step_hangs_go_on(tmp_path: Path, redis_server: EmbeddedRedis) -> None:
    gate, armed = tmp_path / "gate", tmp_path / "armed"
    os.mkfifo(gate)
    environ = {
        "KVRELAY_TEST_ARMED": str(armed),
        "KVRELAY_TEST_GATE": str(gate),
        "KVRELAY_TEST_HANGS_AFTER_S": str(HANGS_AFTER_S),
    }
    worker = ["--model", str(DEMO_MODEL), "--dtype", usual_dtype(), "--threads", "1", "--num-blocks", "600"]
    worker += ["--no-fused-layers", "--transfer", "zmq"]
    prefix = ["--redis-prefix", tmp_path.name]
    with ServiceProcesses(tmp_path, redis_server.url, environ) as services, ThreadPoolExecutor(8) as threads:
        for name in ("prefill-0", "decode-0", "decode-1"):
            role = name.split("-")[0]
            services.start(name, "tests.fakes.failing_worker", role, "--worker-id", name, *worker, *prefix)
        port = services.hold_port()
        router = ["--model", str(DEMO_MODEL), "--port", str(port), "--routing-policy", "round_robin"]
        services.start("router", "kvrelay_router", *router, "--local-prefill-tokens", "0", *prefix)
        http = services.client(port)
        services.wait_until(lambda: len(services.ready_workers(http)) == 3)
        expected = [streamed(http, body(number)) for number in range(6)]
        armed.touch()
        streams = [threads.submit(streamed, http, body(number)) for number in range(6)]
        # Its first token, which prefill samples, is the one at which decode hangs.
        bias = {str(int(FailingToken.HANG)): 100}
        hanging = threads.submit(streamed, http, body(9, logit_bias=bias, max_tokens=3))
        held = hold_gate(gate)
        began = time.monotonic()
        armed.unlink()  # what hangs does so once, as a kernel may: the same tokens go through elsewhere
        try:
            ended: list[str] = []

            def one_has_ended() -> bool:
                ended[:] = [name for name, process in services.processes.items() if process.poll() is not None]
                return bool(ended)

            wait_until(one_has_ended)
            assert HANGS_AFTER_S - 1 < time.monotonic() - began < HANGS_AFTER_S + 10
            (name,) = ended
            assert services.processes.pop(name).wait(PATIENCE_S) == 1
            assert [each.result(PATIENCE_S) for each in streams] == expected
            assert hanging.result(PATIENCE_S) == [FailingToken.HANG] * 3
            assert "will not end" in services.log(name) and "wait_at_gate" in services.log(name), "where it hangs"
        finally:
            os.close(held)
        services.start(name, "tests.fakes.failing_worker", "decode", "--worker-id", name, *worker, *prefix)
        services.wait_until(lambda: len(services.ready_workers(http)) == 3)
