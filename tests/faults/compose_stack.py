"""deploy/compose.yaml on a real engine, behind TLS, under a project of its own, and a load that compares its outputs.

The engine is the Docker CLI that KVRELAY_DOCKER names (a path, or `docker`), with DOCKER_HOST as the CLI reads it.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
DEADLINE_S = 180.0
POLL_S = 0.2
PROMPTS = [f"The boat number {number} sang of winter to its old friend" for number in range(12)]
NUM_TOKENS = 60


def engine() -> str | None:
    """Why there is no engine to test with, or None."""
    docker = os.environ.get("KVRELAY_DOCKER")
    if not docker:
        return "KVRELAY_DOCKER does not name a Docker CLI"
    try:
        subprocess.run([docker, "compose", "version"], check=True, capture_output=True, timeout=60)
        subprocess.run([docker, "info"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{docker} reaches no engine with compose: {error}"
    return None


def make_certificate(directory: Path, name: str = "tls") -> None:
    """A certificate that signs itself and its key, as NAME.crt and NAME.key, which containers can read."""
    key, certificate = directory / f"{name}.key", directory / f"{name}.crt"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    for path in (directory, key, certificate):
        path.chmod(0o755)


@dataclass
class Compose:
    """One project with a certificate in `tls`. Every wait has a deadline and says what it waited for. Assignments to
    `environment` are what an operator changes in deploy/.env."""

    tls: Path
    project: str = field(default_factory=lambda: f"kvrelay-test-{secrets.token_hex(4)}")

    def __post_init__(self) -> None:
        make_certificate(self.tls)
        self.trusted = ssl.create_default_context(cafile=self.tls / "tls.crt")
        self.image = f"{self.project}:cpu"
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("COMPOSE_")}
        self.environment |= {
            "COMPOSE_FILE": str(ROOT / "deploy" / "compose.yaml"),
            "COMPOSE_PROJECT_NAME": self.project,
            "KVRELAY_IMAGE": self.image,
            "KVRELAY_TLS_DIR": str(self.tls),
            "KVRELAY_PUBLISH": "127.0.0.1:",  # any free port
            "KVRELAY_DTYPE": "float32",
            "KVRELAY_THREADS": "1",
            "KVRELAY_KV_MEMORY_BYTES": "128MiB",
            "KVRELAY_TORCH_INDEX": os.environ.get("KVRELAY_TORCH_INDEX", ""),
        }

    def docker(self, *arguments: str, given: str | None = None) -> str:
        """The output of `docker ...`. Raises with what it said."""
        done = self.run(os.environ["KVRELAY_DOCKER"], *arguments, given=given)
        assert done.returncode == 0, f"{done.args}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    def run(self, *command: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
        """Runs a command with the project's environment, and `given` as its input."""
        return subprocess.run(
            command, env=self.environment, input=given, capture_output=True, text=True, timeout=600, check=False
        )

    def roll(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`deploy/roll ...`"""
        return self.run(str(ROOT / "deploy" / "roll"), *arguments)

    def __call__(self, *arguments: str) -> str:
        """The output of `docker compose ...`."""
        return self.docker("compose", *arguments)

    def containers(self, service: str | None = None) -> list[dict[str, Any]]:
        """What `docker inspect` says of a service's containers, or of all; also of those that do not run."""
        ids = self("ps", "--all", "--quiet", *([service] if service else [])).split()
        found: list[dict[str, Any]] = json.loads(self.docker("inspect", *ids)) if ids else []
        return found

    @cached_property
    def api_key(self) -> str:
        """The key that was made at the first start."""
        return self("exec", "-T", "router", "cat", "/run/secrets/api/api_keys").strip()

    def url(self) -> str:
        """Where the balancer's port is published."""
        scheme = "https" if self.environment["KVRELAY_TLS_DIR"] else "http"
        return f"{scheme}://{self('port', 'balancer', '8000').strip()}"

    def client(self) -> httpx.AsyncClient:
        """A client of the balancer where it is now."""
        headers = {"authorization": f"Bearer {self.api_key}"}
        return httpx.AsyncClient(base_url=self.url(), timeout=300, headers=headers, verify=self.trusted)

    async def until_ready(self, **wanted: int) -> dict[str, Any]:
        """Until the router sees Redis, and so many ready workers of each role, all idle; returns its view."""
        view: dict[str, Any] = {}

        async def is_ready() -> bool:
            nonlocal view
            try:
                async with self.client() as http:
                    view = (await http.get("/fleet")).json()
            except (httpx.HTTPError, AssertionError, ValueError):
                return False
            ready = [worker["role"] for worker in view.get("workers", []) if worker["state"] == "ready"]
            return view["router"]["registry"] == "ok" and all(ready.count(role) == n for role, n in wanted.items())

        await until(is_ready, lambda: f"{wanted} ready workers; last seen: {view}")
        return view


async def until(condition: Callable[[], Any], what: Callable[[], str]) -> None:
    """Waits for a coroutine function to answer true. Raises AssertionError after the deadline."""
    deadline = time.monotonic() + DEADLINE_S
    while not await condition():
        assert time.monotonic() < deadline, f"waited in vain for {what()}"
        await asyncio.sleep(POLL_S)


@dataclass
class Load:
    """Clients that ask the same prompts again and again. `failures`: what went wrong, in words."""

    http: httpx.AsyncClient
    expected: dict[str, str]
    num_done: int = 0
    failures: list[str] = field(default_factory=list)

    async def more(self, number: int) -> None:
        """Until so many more requests have ended."""
        wanted = self.num_done + number

        async def reached() -> bool:
            assert not self.failures, self.failures
            return self.num_done >= wanted

        await until(reached, lambda: f"{wanted} requests; {self.num_done} have ended")

    async def client(self, first: int) -> None:
        while True:
            for prompt in PROMPTS[first:] + PROMPTS[:first]:
                try:
                    text = await stream(self.http, prompt)
                    if text != self.expected[prompt]:
                        self.failures.append(f"{prompt!r}: {text!r} is not {self.expected[prompt]!r}")
                except (httpx.HTTPError, AssertionError, ValueError) as error:
                    self.failures.append(f"{prompt!r}: {error!r}")
                self.num_done += 1


@asynccontextmanager
async def load(compose: Compose, num_clients: int = 6) -> AsyncIterator[Load]:
    """A load on the router, with what an undisturbed run answers."""
    async with compose.client() as http:
        running = Load(http, {prompt: await stream(http, prompt) for prompt in PROMPTS})
        clients = [asyncio.create_task(running.client(2 * number)) for number in range(num_clients)]
        try:
            yield running
        finally:
            for client in clients:
                client.cancel()
            await asyncio.gather(*clients, return_exceptions=True)
    assert not running.failures, running.failures


async def stream(
    http: httpx.AsyncClient, prompt: str, max_tokens: int = NUM_TOKENS, started: Callable[[str], object] = str
) -> str:
    """A greedy completion, as a stream. `started` is called with the router's id at its first byte. Raises
    AssertionError unless the stream came whole."""
    body = {"model": "kvrelay-demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": True}
    text, finished, done = "", None, False
    async with http.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as answer:
        assert answer.status_code == 200, (await answer.aread()).decode()
        started(answer.headers["x-kvrelay-router"])
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    text += choice["text"]
                    finished = choice["finish_reason"] or finished
    assert done and finished == "length", f"the stream broke off after {text!r}"
    return text


async def answer(http: httpx.AsyncClient, prompt: str, max_tokens: int = NUM_TOKENS) -> str:
    """The same completion, not as a stream."""
    body = {"model": "kvrelay-demo", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    came = await http.post("/v1/completions", json=body)
    assert came.status_code == 200, came.text
    return str(came.json()["choices"][0]["text"])
