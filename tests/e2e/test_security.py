"""The whole system with a fleet's key, and the ports that it opens."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest

from kvrelay.cli.keys import keys
from kvrelay.fleet.embedded import EmbeddedRedis
from tests.component.transfer.transports import NO_NIXL
from tests.fakes.stack import Stack
from tests.fakes.waiting import PATIENCE_S

DEADLINE_S = 240.0
pytestmark = pytest.mark.timeout(600)  # models are loaded three times over
NEEDS_NIXL = pytest.mark.skipif(bool(NO_NIXL), reason=NO_NIXL)


def open_ports(pid: int) -> list[tuple[str, int]]:
    """Where a process and its children listen, TCP and UDP."""
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    found = []
    for process in family:
        for connection in process.net_connections("inet"):
            is_udp = connection.type == socket.SOCK_DGRAM
            if connection.status == psutil.CONN_LISTEN or (is_udp and not connection.raddr):
                found.append((connection.laddr.ip, connection.laddr.port))
    return found


@pytest.mark.parametrize("transport", ["zmq", pytest.param("nixl", marks=NEEDS_NIXL)])
def test_nothing_listens_beyond_loopback_unless_told_to(
    tiny_model: Callable[[str], Path], tmp_path: Path, transport: str
) -> None:
    """Everything that a stack starts, health pages included, after a request that opened all its connections."""
    environ = {"KVRELAY_HTTP_PORT": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        with Stack(tiny_model("llama"), tmp_path, "--prefill", "1", "--decode", "1", "--transfer", transport) as stack:
            stack.complete([5, 6, 7], 3)
            ports = open_ports(stack.process.pid)
    assert len(ports) >= 5  # HTTP, Redis, three inboxes, and decode's for blocks
    assert [port for port in ports if not ip_address(port[0]).is_loopback] == []


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
            assert stack.complete(list(range(5, 60)), 12)["token_ids"] == before["token_ids"]
        with decode_worker(model, redis_server.url, "friend", ours):
            until_state(stack, "friend", "ready")
        assert stack.complete(list(range(5, 60)), 12)["token_ids"] == before["token_ids"]
