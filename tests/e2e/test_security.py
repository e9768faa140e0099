"""The whole system with API keys and with a fleet's key, and the ports that it opens with each transport."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from kvrelay.curve import read_keys
from kvrelay.fleet.embedded import EmbeddedRedis
from tests.component.transfer.transports import NO_NIXL
from tests.e2e.conftest import DEMO_MODEL
from tests.e2e.open_ports import HEALTH_PAGES, check_ports
from tests.fakes.command import command
from tests.fakes.stack import Stack
from tests.fakes.waiting import PATIENCE_S

keys = command("keys")

DEADLINE_S = 240.0
pytestmark = pytest.mark.timeout(600)  # models are loaded three times over
NEEDS_NIXL = pytest.mark.skipif(bool(NO_NIXL), reason=NO_NIXL)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["zmq", pytest.param("nixl", marks=NEEDS_NIXL)])
def test_nothing_listens_beyond_loopback_unless_told_to(
    tiny_model: Callable[[str], Path], tmp_path: Path, transport: str
) -> None:
    with Stack(tiny_model("llama"), tmp_path, "--transfer", transport, environ=HEALTH_PAGES) as stack:
        check_ports(stack)


def test_wrong_keys_are_refused_and_others_are_not(tmp_path: Path) -> None:
    keys_file = tmp_path / "keys.txt"
    keys_file.write_text("# who may ask\nsk-otter\nsk-another\n")
    flags = ("--backend", "simulated", "--api-keys-file", str(keys_file))
    with Stack(DEMO_MODEL, tmp_path / "state", *flags, api_key="sk-otter") as stack:
        for key in ("sk-wrong", "", "# who may ask"):
            with client_of(stack, key or "none") as stranger:
                with pytest.raises(openai.AuthenticationError) as refused:
                    stranger.completions.create(model=stack.model, prompt="An otter is", max_tokens=12)
                assert refused.value.status_code == 401
                with pytest.raises(openai.AuthenticationError):
                    stranger.models.list()
        for key in ("sk-otter", "sk-another"):
            with client_of(stack, key) as friend:
                answer = friend.completions.create(model=stack.model, prompt="An otter is", max_tokens=1)
                assert answer.choices[0].finish_reason == "length"


def client_of(stack: Stack, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.base_url}/v1", api_key=key, max_retries=0, timeout=2 * PATIENCE_S)


@contextmanager
def decode_worker(model: Path, redis_url: str, worker_id: str, key: Path) -> Iterator[None]:
    command = [sys.executable, "-m", "kvrelay", "decode", "--model", str(model), "--worker-id", worker_id]
    command += ["--num-blocks", "64", "--dtype", "float32", "--threads", "1", "--curve-key-file", str(key)]
    process = subprocess.Popen(command, env={**os.environ, "KVRELAY_REDIS_URL": redis_url}, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def until_state(stack: Stack, worker_id: str, state: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        states = {worker["worker_id"]: worker["state"] for worker in stack.fleet()["workers"]}
        if states.get(worker_id) == state:
            return
        assert time.monotonic() < deadline, f"{worker_id} did not become {state}: {states}"
        time.sleep(0.1)


@pytest.mark.slow
def test_a_fleet_with_a_key_serves_and_takes_no_worker_with_another(
    tiny_model: Callable[[str], Path], tmp_path: Path, redis_server: EmbeddedRedis
) -> None:
    model, ours, theirs = tiny_model("llama"), tmp_path / "ours", tmp_path / "theirs"
    assert keys([str(ours)]) == keys([str(theirs)]) == 0
    flags = ["--redis", redis_server.url, "--dtype", "float32", "--num-blocks", "64"]
    with Stack(model, tmp_path / "state", *flags, "--curve-key-file", str(ours)) as stack:
        before = stack.complete(list(range(5, 60)), 12)
        totals = [worker["totals"] for worker in stack.workers("decode")]
        assert sum(each["handoffs_committed"] for each in totals) == 1
        with decode_worker(model, redis_server.url, "stranger", theirs):
            until_state(stack, "stranger", "lost")
            reason = f"it encrypts with key {read_keys(theirs)[0].fingerprint}, this process has "
            assert [each["reason"].startswith(reason) for each in stack.fleet()["workers"] if each["reason"]] == [True]
            assert stack.complete(list(range(5, 60)), 12)["token_ids"] == before["token_ids"]
        with decode_worker(model, redis_server.url, "friend", ours):
            until_state(stack, "friend", "ready")
        assert stack.complete(list(range(5, 60)), 12)["token_ids"] == before["token_ids"]
        logs = [path.read_text() for path in (tmp_path / "state").rglob("*.log")]
        assert sum(text.count(reason) for text in logs) == 1, "one line, however often the router asks"
