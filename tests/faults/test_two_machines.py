"""The units of deploy/systemd with the settings of docs/deployment.md, on two addresses of this machine in place of two
machines: restarted one after the other under load, as the page upgrades them, they fail no request."""

from __future__ import annotations

import asyncio
import os
import random
import re
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import pytest

from kvrelay.config.common import DEMO_MODEL_NAME, demo_model_path
from kvrelay.fleet.embedded import RedisServer
from tests.document_blocks import ROOT, blocks_of
from tests.fakes.command import command
from tests.fakes.waiting import PATIENCE_S

UNITS = ROOT / "deploy" / "systemd"
SETTINGS = {block.mark: block.text for block in blocks_of(ROOT / "docs" / "deployment.md") if block.language == "ini"}
SERVICES = {
    "decode": "kvrelay-decode@.service",
    "prefill": "kvrelay-prefill@.service",
    "router": "kvrelay-router.service",
}
READY = {"decode": 8082, "prefill": 8081, "router": 8000}
START_S = 120.0
NUM_CLIENTS = 6


class Machine:
    """One of the two, with its services by role."""

    def __init__(self, address: str, directory: Path, redis_port: int) -> None:
        self.address = address
        self.router = f"http://{address}:8000"
        self._name = f"machine-{address.rsplit('.', 1)[1]}"
        self._directory = directory
        self._redis_port = redis_port
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: str) -> None:
        unit = (UNITS / SERVICES[role]).read_text()
        (arguments,) = re.findall(r"^ExecStart=/opt/kvrelay/bin/kvrelay (.+)$", unit, re.MULTILINE)
        lines = re.findall(r"^Environment=(.+)$", unit, re.MULTILINE)
        own = [word for line in lines for word in line.split() if not word.startswith("KVRELAY_CACHE_DIR")]
        text = SETTINGS["environment"].replace("10.0.0.1:6379", f"127.0.0.1:{self._redis_port}")
        text = text.replace("10.0.0.1", self.address).replace("/etc/kvrelay", str(self._directory))
        text = text.replace("/srv/models/my-decoder", str(demo_model_path()))
        words = [*own, *text.splitlines()]
        if role != "router":
            words += SETTINGS[f"{role}-0"].splitlines()
        settings = dict(word.replace("%H", self._name).replace("%i", "0").split("=", 1) for word in words)
        with (self._directory / f"{self._name}-{role}.log").open("ab") as log:
            self._running[role] = subprocess.Popen(
                [sys.executable, "-m", "kvrelay.cli.main", *arguments.split()],
                env={**os.environ, **settings},
                stdout=log,
                stderr=log,
            )

    async def until_ready(self, role: str) -> None:
        """As `until kvrelay health` does."""
        url = f"http://{self.address}:{READY[role]}/ready"
        async with asyncio.timeout(START_S):
            while await asyncio.to_thread(command("health"), [url]) != 0:
                assert self._running[role].poll() is None, (self._directory / f"{self._name}-{role}.log").read_text()
                await asyncio.sleep(0.2)

    async def restart(self, role: str) -> None:
        self._running[role].terminate()
        assert await asyncio.to_thread(self._running[role].wait, PATIENCE_S) == 0
        self.start(role)
        await self.until_ready(role)

    def stop(self) -> None:
        for process in self._running.values():
            process.kill()
            process.wait()


@contextmanager
def two_machines(directory: Path) -> Iterator[list[Machine]]:
    password = secrets.token_hex(24)
    for name, content in (("redis_password", password), ("api_keys", "sk-two")):
        (directory / name).write_text(content)
        (directory / name).chmod(0o600)
    assert command("keys")([str(directory / "curve_key")]) == 0
    network = f"127.{random.randrange(10, 250)}.{random.randrange(250)}"
    redis = RedisServer(directory, password=password)
    machines = [Machine(f"{network}.{number}", directory, redis.port) for number in (1, 2)]
    try:
        yield machines
    finally:
        for machine in machines:
            machine.stop()
        redis.close()


async def ask(http: httpx.AsyncClient, routers: list[str], number: int) -> list[int]:
    """Tries the other router if one refuses the connection, or ends it before the first byte."""
    body = {"model": DEMO_MODEL_NAME, "prompt": [9 + number, *range(20, 80)], "max_tokens": 48, "temperature": 0}
    for router in routers:
        try:
            answer = await http.post(f"{router}/v1/completions", json=body | {"return_token_ids": True})
        except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
            continue
        assert answer.status_code == 200, answer.text
        token_ids: list[int] = answer.json()["choices"][0]["token_ids"]
        return token_ids
    raise AssertionError("both routers are away")


@asynccontextmanager
async def load(machines: list[Machine], counts: list[int]) -> AsyncIterator[None]:
    """Clients that ask again and again, each beginning with another router, and know the answer."""
    routers = [machine.router for machine in machines]
    headers = {"authorization": "Bearer sk-two"}
    is_over = asyncio.Event()

    async def client(number: int) -> None:
        mine = routers if number % 2 else routers[::-1]
        async with httpx.AsyncClient(timeout=PATIENCE_S, headers=headers) as http:
            expected = await ask(http, mine, number)
            while not is_over.is_set():
                assert await ask(http, mine, number) == expected
                counts[number] += 1

    async with asyncio.TaskGroup() as clients:
        for number in range(NUM_CLIENTS):
            clients.create_task(client(number))
        try:
            yield
        finally:
            is_over.set()


@pytest.mark.timeout(600)
@pytest.mark.asyncio
async def test_an_upgrade_one_after_the_other_fails_nothing(tmp_path: Path) -> None:
    counts = [0] * NUM_CLIENTS
    with two_machines(tmp_path) as machines:
        for machine in machines:
            for role in SERVICES:
                machine.start(role)
        for machine in machines:
            for role in SERVICES:
                await machine.until_ready(role)
        async with load(machines, counts):
            for machine in machines:
                for role in SERVICES:
                    await machine.restart(role)
    print(f"{sum(counts)} requests")
    assert min(counts) > 1
