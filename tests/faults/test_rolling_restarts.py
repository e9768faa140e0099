"""Every worker and every router is restarted in turn under load, behind its own address: no request fails.

Real routers, Redis and workers with simulated devices; what every stream must say is known. Clients know the addresses
of both routers, and ask the other one where a connection ends before the first byte of an answer.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrelay.config.demo import DEMO_MODEL_NAME as MODEL
from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.ports import HeldPort
from kvrelay.process import die_with_parent
from kvrelay.protocol.sampling import Sampling
from kvrelay.simulated.token_hash import continuation
from tests.component.dispatch.test_server import until_refused
from tests.e2e.conftest import DEMO_MODEL
from tests.faults.test_redis_under_streams import PARAMETERS, PROFILE, VOCABULARY

pytestmark = pytest.mark.timeout(900)

NUM_CLIENTS = 60
PATIENCE_S = 240.0
NUM_LONG_STREAMS, LONG_TOKENS = 8, 1000
"""What is open while its router drains."""
PREFILL, DECODE = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
ROUTERS = ("router-0", "router-1")
IDLE_STATES = ("free", "cached", "total")
# A drain that waits for what never comes takes longer than any test waits for it, and nobody is slow enough to be lost.
COMMON = ("--model", str(DEMO_MODEL), "--drain-timeout-s", "900", "--peer-timeout-s", "60")


@dataclass
class Service:
    """A process that is started again behind its ports."""

    command: list[str]
    ports: list[HeldPort]
    log_path: Path
    process: subprocess.Popen[bytes] | None = None

    def spawn(self, redis_url: str) -> None:
        assert self.process is None or self.process.poll() is not None
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVRELAY_")}
        environment |= {"KVRELAY_REDIS_URL": redis_url, "KVRELAY_LOCAL_PREFILL_TOKENS": "0"}
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=log, env=environment, preexec_fn=die_with_parent()
            )

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def gone(self) -> int:
        """The exit status."""
        assert self.process is not None
        return await asyncio.to_thread(self.process.wait, PATIENCE_S)

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Fleet:
    """Two routers and four workers, each a process of its own with an address that it keeps."""

    def __init__(self, directory: Path) -> None:
        profile = directory / "quick.json"
        profile.write_text(json.dumps(PROFILE))
        self._redis = EmbeddedRedis()
        self._http = httpx.AsyncClient(timeout=PATIENCE_S, limits=httpx.Limits(max_keepalive_connections=0))
        self.services: dict[str, Service] = {}
        for name in PREFILL + DECODE:
            ports = [HeldPort(), HeldPort()]
            flags = ["--worker-id", name, "--port", str(ports[0].port), "--transfer-port", str(ports[1].port)]
            flags += ["--backend", "simulated", "--profile", str(profile)]
            self._add(directory, name, ports, flags)
        for name in ROUTERS:
            ports = [HeldPort()]
            flags = ["--router-id", name, "--port", str(ports[0].port)]
            self._add(directory, name, ports, flags)

    def _add(self, directory: Path, name: str, ports: list[HeldPort], flags: list[str]) -> None:
        command = [sys.executable, "-m", f"kvrelay_{name.split('-')[0]}", *COMMON, *flags]
        self.services[name] = Service(command, ports, directory / f"{name}.log")

    def spawn(self, name: str) -> None:
        self.services[name].spawn(self._redis.url)

    def url(self, router: str) -> str:
        return f"http://127.0.0.1:{self.services[router].ports[0].port}"

    async def close(self) -> None:
        await self._http.aclose()
        for service in self.services.values():
            if service.is_running:
                service.send(signal.SIGKILL)
                await service.gone()
            for port in service.ports:
                port.release()
        self._redis.close()

    # -- what routers say ---------------------------------------------------------------------------------------------

    async def view(self, router: str) -> dict[str, Any] | None:
        """`/fleet`, of any of its processes; None while the router is away."""
        try:
            answer: dict[str, Any] = (await self._http.get(f"{self.url(router)}/fleet")).raise_for_status().json()
        except httpx.TransportError:
            return None
        return answer

    async def incarnations(self) -> dict[str, str]:
        view = await self.view(ROUTERS[0])
        assert view is not None
        return {each["worker_id"]: each["incarnation"] for each in view["workers"]}

    async def until(self, router: str, is_so: Callable[[dict[str, Any]], bool]) -> None:
        """In the view of the router, or of that of its processes that happens to be asked."""
        view: dict[str, Any] | None = None
        try:
            async with asyncio.timeout(PATIENCE_S):
                while view is None or not is_so(view):
                    assert self.services[router].is_running, self.tail(router)
                    await asyncio.sleep(0.02)
                    view = await self.view(router)
        except TimeoutError:
            raise AssertionError(f"{router} did not say so: {view}\n{self.tail(router)}") from None

    async def until_ready(self, *names: str, since: dict[str, str] | None = None) -> None:
        """Both routers see these workers ready; with `since`, as other incarnations."""
        old = since or {}

        def are_ready(view: dict[str, Any]) -> bool:
            ready = {each["worker_id"]: each["incarnation"] for each in view["workers"] if each["state"] == "ready"}
            return all(name in ready and ready[name] != old.get(name) for name in names)

        for router in ROUTERS:
            await self.until(router, are_ready)

    async def until_clean(self) -> None:
        """Nothing of any request is left, and none failed since the routers' last start."""

        def is_clean(view: dict[str, Any]) -> bool:
            requests = view["requests"]
            assert not requests["failed"] and not requests["timed_out"] and not requests["refused"], requests
            held = [n for each in view["workers"] for state, n in each["blocks"].items() if state not in IDLE_STATES]
            return not requests["running"] and not any(held)

        for router in ROUTERS:
            await self.until(router, is_clean)

    def tail(self, name: str) -> str:
        return self.services[name].log_path.read_text(errors="replace")[-3000:]

    # -- restarts -----------------------------------------------------------------------------------------------------

    async def restart_worker(self, name: str, how: signal.Signals = signal.SIGTERM) -> None:
        service, old = self.services[name], await self.incarnations()
        service.send(how)
        assert await service.gone() == (0 if how is signal.SIGTERM else -how), self.tail(name)
        self.spawn(name)
        await self.until_ready(name, since=old)

    async def restart_router(self, name: str, load: Load) -> bool:
        """Under SIGTERM its port is closed, its long streams go on to their ends, and the other router serves.

        Whether some of these streams were still open when the port was closed; or there was nothing to drain.
        """
        service, other = self.services[name], other_than(name)
        async with asyncio.TaskGroup() as group:
            long = [LongStream(load, name, number) for number in range(NUM_LONG_STREAMS)]
            tasks = [group.create_task(stream.run()) for stream in long]
            await asyncio.gather(*(stream.has_begun.wait() for stream in long))
            service.send(signal.SIGTERM)
            await until_refused("127.0.0.1", service.ports[0].port)
            were_open = not all(task.done() for task in tasks)
            await load.until_more_are_served_by(other)
        assert await service.gone() == 0, self.tail(name)
        self.spawn(name)
        await self.until_ready(*PREFILL, *DECODE)
        await load.until_more_are_served_by(name)
        return were_open


class Load:
    """Clients that ask again and again, each time one of the routers as chance has it."""

    def __init__(self, fleet: Fleet) -> None:
        self.served: Counter[str] = Counter()
        self._fleet = fleet
        self._is_over = asyncio.Event()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=NUM_CLIENTS)
        self._http = httpx.AsyncClient(timeout=2 * PATIENCE_S, limits=limits)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """What one of the clients finds wrong ends what is done meanwhile."""
        async with self._http, asyncio.TaskGroup() as group:
            begun = [asyncio.Event() for _ in range(NUM_CLIENTS)]
            for number in range(NUM_CLIENTS):
                group.create_task(self._client(number, begun[number]))
            await asyncio.gather(*(each.wait() for each in begun))
            yield
            self._is_over.set()

    async def until_more_are_served_by(self, router: str) -> None:
        """By clients that began while it could be asked, or found it when the other one was gone."""
        async with asyncio.timeout(PATIENCE_S):
            served = self.served[router]
            while self.served[router] < served + NUM_CLIENTS:
                await asyncio.sleep(0.02)

    async def _client(self, number: int, begun: asyncio.Event) -> None:
        rng = random.Random(number)
        family = random.Random(number % 8).choices(range(3, 2048), k=320)
        while not self._is_over.is_set():
            prompt = family[: rng.choice([0, 64, 320])] + rng.choices(range(3, 2048), k=rng.randint(1, 200))
            await self._ask(rng.choice(ROUTERS), prompt, rng.randint(1, 80))
            begun.set()

    async def _ask(self, router: str, prompt: list[int], max_tokens: int) -> None:
        while True:
            try:
                await self.stream(router, prompt, max_tokens)
            except NoAnswer:
                router = other_than(router)
                await asyncio.sleep(0.01)
            else:
                self.served[router] += 1
                return

    async def stream(
        self, router: str, prompt: list[int], max_tokens: int, has_begun: asyncio.Event | None = None
    ) -> None:
        """Its tokens must be the right ones and its end that of a stream. Raises NoAnswer."""
        token_ids: list[int] = []
        last = ""
        parameters = PARAMETERS | {"max_tokens": max_tokens}
        body = {"model": MODEL, "prompt": prompt, "stream": True, "return_token_ids": True} | parameters
        async with AsyncExitStack() as stack:
            request = self._http.stream("POST", f"{self._fleet.url(router)}/v1/completions", json=body)
            try:
                answer = await stack.enter_async_context(request)
            except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
                raise NoAnswer from error
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    event = json.loads(line.removeprefix("data: "))
                    assert "choices" in event, event
                    token_ids += [token for choice in event["choices"] for token in choice["token_ids"]]
                    if has_begun is not None:
                        has_begun.set()
                last = line or last
        assert last == "data: [DONE]"
        assert token_ids == continuation(prompt, Sampling(**parameters), VOCABULARY, 8192, 0)  # type: ignore[arg-type]


class NoAnswer(Exception):
    """The connection was refused, or ended before the first byte of an answer."""


class LongStream:
    """It stays at one router from its first byte to its last."""

    def __init__(self, load: Load, router: str, number: int) -> None:
        self.has_begun = asyncio.Event()
        self._load, self._router = load, router
        self._prompt = random.Random(f"long {number}").choices(range(3, 2048), k=100)

    async def run(self) -> None:
        """Its router is asked again where a connection that idled was closed before the first byte."""
        while True:
            with suppress(NoAnswer):
                return await self._load.stream(self._router, self._prompt, LONG_TOKENS, self.has_begun)


def other_than(router: str) -> str:
    return ROUTERS[1 - ROUTERS.index(router)]


async def undisturbed(directory: Path, disturb: Callable[[Fleet, Load], Awaitable[None]]) -> None:
    fleet = Fleet(directory)
    try:
        for name in fleet.services:
            fleet.spawn(name)
        await fleet.until_ready(*PREFILL, *DECODE)
        load = Load(fleet)
        async with load.running():
            await disturb(fleet, load)
        await fleet.until_clean()
    finally:
        await fleet.close()


@pytest.mark.parametrize("order", [PREFILL + DECODE, DECODE + PREFILL], ids=["prefill first", "decode first"])
def test_every_worker_in_turn(tmp_path: Path, order: Sequence[str]) -> None:
    async def disturb(fleet: Fleet, load: Load) -> None:
        for name in order:
            await fleet.restart_worker(name)

    asyncio.run(undisturbed(tmp_path, disturb))


@pytest.mark.parametrize("killed", [PREFILL[0], DECODE[0]])
def test_every_worker_in_turn_one_of_them_by_kill(tmp_path: Path, killed: str) -> None:
    async def disturb(fleet: Fleet, load: Load) -> None:
        for name in PREFILL + DECODE:
            await fleet.restart_worker(name, signal.SIGKILL if name == killed else signal.SIGTERM)

    asyncio.run(undisturbed(tmp_path, disturb))


def test_every_router_in_turn(tmp_path: Path) -> None:
    async def disturb(fleet: Fleet, load: Load) -> None:
        for name in ROUTERS:
            while not await fleet.restart_router(name, load):
                pass

    asyncio.run(undisturbed(tmp_path, disturb))
