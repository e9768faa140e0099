"""Real worker processes whose KV transfer loses, corrupts, delays and mixes up blocks: the tokens are transformers'."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.ports import HeldPort
from tests.component.transfer.transports import NO_NIXL
from tests.e2e import reference
from tests.e2e.conftest import DEMO_MODEL
from tests.fakes.waiting import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
FAULTS = '{"seed": 5, "shares": {"drop": 0.02, "corrupt": 0.06, "delay": 0.1, "reorder": 0.1, "stall": 0.02}}'
WORKER = ["--model", str(DEMO_MODEL), "--dtype", "float32", "--threads", "1", "--num-blocks", "400"]
WORKER += ["--token-budget", "128", "--max-running", "16", "--transfer-checksums"]
START_TIMEOUT_S = 90.0


def until_ready(client: httpx.Client) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            answer = client.get("/ready")
            if answer.status_code == 200 and answer.json()["workers"] == {"prefill": 1, "decode": 1}:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError("the system did not become ready")


@pytest.fixture(params=["zmq", pytest.param("nixl", marks=pytest.mark.skipif(bool(NO_NIXL), reason=NO_NIXL))])
def router(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[httpx.Client]:
    """A router with one faulty worker of each kind behind it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVRELAY_")}
    with ExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis())
        port = stack.enter_context(HeldPort()).port

        def start(name: str, *arguments: str) -> None:
            log = stack.enter_context((tmp_path / f"{name}.log").open("wb"))
            command = [sys.executable, "-m", *arguments, "--redis-url", redis.url]
            env = environment | {"KVRELAY_TEST_FAULTS": FAULTS}
            process = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=log, env=env))
            stack.callback(process.kill)

        for role in ("prefill", "decode"):
            start(role, "tests.fakes.faulty_worker", role, "--transfer", request.param, *WORKER)
        start("router", "kvrelay_router", "--model", str(DEMO_MODEL), "--port", str(port))
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=2 * PATIENCE_S))
        until_ready(client)
        yield client


def test_every_token_is_right_although_the_network_is_not(router: httpx.Client) -> None:
    model = router.get("/v1/models").json()["data"][0]["id"]
    for length in (40, 300, 700, 129, 512, 90):
        prompt = random.Random(length).choices(range(4, 2048), k=length)
        body = {"model": model, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
        answer = router.post("/v1/completions", json=body | {"return_token_ids": True})
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == reference.greedy(DEMO_MODEL, prompt, 16)
    workers = {worker["role"]: worker for worker in router.get("/fleet").json()["workers"]}
    assert workers["decode"]["totals"]["failed_transfers"] > 0, "the network was not bad"
    assert workers["decode"]["totals"]["corrupted_blocks"] > 0
    assert sum(workers["decode"]["histograms"]["kvrelay.handoff.exposed"]["counts"]) > 0
