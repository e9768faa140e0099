"""Router, workers and Redis as processes of their own, each behind the network that can be disturbed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx

from kvrelay.backends.cpu_build import load_kernel
from kvrelay.fleet.embedded import EmbeddedRedis
from kvrelay.process import die_with_parent
from tests.faults.storm.network import Network

Role = Literal["prefill", "decode", "router"]
ROOT = Path(__file__).parents[3]
DEMO_MODEL = ROOT / "models" / "demo"
HTTP_PORT, MESSAGE_PORT, TRANSFER_PORT = 20080, 20081, 20082
IDLE_STATES = ("free", "cached", "total")
START_TIMEOUT_S = 240.0
PATIENCE_S = 120.0
"""For what must come; a storm leaves a slow machine little time."""
QUIET_CHECK_S = 3.0
"""Workers recount their pools when they have been quiet for two seconds, and end if they do not add up."""
_ALARMING = re.compile(r"Traceback|ERROR|CRITICAL|does not fit its request")


@dataclass(slots=True)
class StackSettings:
    """`extra` are further flags by role."""

    transport: str = "zmq"
    dtype: str = ""  # empty: the one of `usual_dtype`
    num_prefill: int = 2
    num_decode: int = 2
    num_routers: int = 1
    peer_timeout_s: float = 2.5
    request_timeout_s: float = 180.0
    max_attempts: int = 8
    drain_timeout_s: float = 30.0
    event_logs: bool = False
    extra: dict[Role, list[str]] = field(default_factory=dict)


def usual_dtype() -> str:
    """bfloat16 where a retry repeats its bits; by AMX prompts and decoding differ in it."""
    return "float32" if load_kernel().kvrelay_tiles() else "bfloat16"


@dataclass(slots=True)
class Service:
    """A process that is started again under the same name. `is_leaving`: its end is wanted."""

    name: str
    role: Role
    command: list[str]
    log_path: Path
    process: subprocess.Popen[bytes] | None = None
    is_leaving: bool = False
    is_stopped: bool = False

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None


@dataclass(frozen=True, slots=True)
class Holding:
    """What a process holds of its machine."""

    descriptors: int
    threads: int
    resident_mb: float

    @classmethod
    def of(cls, pid: int) -> Holding:
        process = Path(f"/proc/{pid}")
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        resident_mb = int(status["VmRSS"].split()[0]) / 1024
        return cls(len(os.listdir(process / "fd")), int(status["Threads"]), round(resident_mb, 1))


class FaultStack:
    """A whole system. `events` says what was done to it, with seconds since its start."""

    def __init__(self, state_dir: Path, settings: StackSettings) -> None:
        state_dir.mkdir(parents=True, exist_ok=True)
        self.settings = settings
        self.network = Network()
        self.services: dict[str, Service] = {}
        self.events: list[str] = []
        self._stops: list[tuple[str, float, float]] = []
        self._state_dir = state_dir
        self._redis = EmbeddedRedis()
        self._began = time.monotonic()
        self._http = httpx.AsyncClient(timeout=20)

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Everything, until the routers see all workers ready."""
        settings = self.settings
        await self.network.open("redis", self._redis.port, ("127.0.0.1", self._redis.port))
        for role, number in (
            ("router", settings.num_routers),
            ("prefill", settings.num_prefill),
            ("decode", settings.num_decode),
        ):
            for index in range(number):
                await self._add(role, f"{role}-{index}")  # type: ignore[arg-type]
        await self.until_ready()

    async def close(self) -> None:
        """SIGTERM to all; what does not leave is killed."""
        await self._http.aclose()
        for service in self.services.values():
            service.is_leaving = True
            if service.is_stopped:
                self.resume(service.name)
            if service.process is not None and service.is_running:
                service.process.terminate()
        deadline = time.monotonic() + 10
        for service in self.services.values():
            if service.process is not None:
                try:
                    await asyncio.to_thread(service.process.wait, max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    service.process.kill()
                    service.process.wait()
        await self.network.close()
        self._redis.close()

    async def _add(self, role: Role, name: str) -> None:
        settings = self.settings
        own, told = self.network.join(name)
        command = [sys.executable, "-m", "tests.faults.storm.own_machine", f"kvrelay_{role}", f"--model={DEMO_MODEL}"]
        command += [f"--host={own}", f"--advertise-host={told}", f"--peer-timeout-s={settings.peer_timeout_s}"]
        command.append(f"--drain-timeout-s={settings.drain_timeout_s}")
        if role == "router":
            command += [f"--router-id={name}", f"--port={HTTP_PORT}", f"--message-port={MESSAGE_PORT}"]
            command += [f"--request-timeout-s={settings.request_timeout_s}", f"--max-attempts={settings.max_attempts}"]
        else:
            command += [f"--worker-id={name}", f"--port={MESSAGE_PORT}", f"--transfer-port={TRANSFER_PORT}"]
            command += [
                f"--dtype={settings.dtype or usual_dtype()}",
                "--threads=1",
                f"--transfer={settings.transport}",
                "--num-blocks=600",
            ]
            command += ["--token-budget=128", "--max-running=48"]
        if settings.event_logs:
            command.append(f"--event-log={self._state_dir / name}.events")
        command += settings.extra.get(role, [])
        await self.network.open(name, MESSAGE_PORT)
        if role == "decode":
            await self.network.open(name, TRANSFER_PORT)
        self.services[name] = Service(name, role, command, self._state_dir / f"{name}.log")
        self.spawn(name)

    def note(self, event: str) -> None:
        """For the message of a failure, and the report."""
        self.events.append(f"{time.monotonic() - self._began:.1f} s: {event}")

    # -- processes ----------------------------------------------------------------------------------------------------

    def spawn(self, name: str) -> None:
        """Starts a service that does not run."""
        service = self.services[name]
        assert not service.is_running
        _, redis_host = self.network.join("redis")
        environment = {each: value for each, value in os.environ.items() if not each.startswith("KVRELAY_")}
        environment["KVRELAY_REDIS_URL"] = self._redis.url.replace("127.0.0.1", redis_host)
        environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{environment.get('PYTHONPATH', '')}"
        with service.log_path.open("ab") as log:
            service.process = subprocess.Popen(
                service.command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment,
                preexec_fn=die_with_parent(),
            )
        service.is_leaving = service.is_stopped = False
        self.network.pids[service.process.pid] = name

    def kill(self, name: str) -> None:
        """kill -9."""
        self.note(f"kill {name}")
        service = self.services[name]
        assert service.process is not None
        service.is_leaving = True
        service.process.kill()
        service.process.wait()
        self._forget(service)

    def terminate(self, name: str) -> None:
        """SIGTERM; a second one ends the drain."""
        self.note(f"terminate {name}")
        service = self.services[name]
        assert service.process is not None
        service.is_leaving = True
        service.process.terminate()

    async def until_gone(self, name: str, timeout_s: float = PATIENCE_S) -> int:
        """The exit status."""
        service = self.services[name]
        assert service.process is not None
        status = await asyncio.to_thread(service.process.wait, timeout_s)
        self._forget(service)
        return status

    def stop(self, name: str) -> None:
        """SIGSTOP."""
        self.note(f"stop {name}")
        self._signal(name, signal.SIGSTOP)
        self.services[name].is_stopped = True

    def resume(self, name: str) -> None:
        """SIGCONT."""
        self.note(f"resume {name}")
        self.services[name].is_stopped = False
        self._signal(name, signal.SIGCONT)

    async def stand_still(self, name: str, for_s: float) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        self.stop(name)
        began = time.monotonic()
        try:
            await asyncio.sleep(for_s)
        finally:
            self.resume(name)
            self._stops.append((name, began, time.monotonic()))

    def stood_still_s(self, url: str, since: float) -> float:
        """For how long the router there was stopped since a moment of the monotonic clock."""
        return sum(end - max(begin, since) for name, begin, end in self._stops if self.url(name) == url and end > since)

    async def kill_redis(self, for_s: float) -> None:
        """It comes back empty."""
        self.note("kill redis")
        os.kill(self._redis.pid, signal.SIGKILL)
        while self._redis.poll() is None:
            await asyncio.sleep(0.01)
        await asyncio.sleep(for_s)
        self._redis.restart()
        self.note("redis is back")

    def _signal(self, name: str, number: int) -> None:
        process = self.services[name].process
        assert process is not None
        if process.poll() is None:
            process.send_signal(number)

    def _forget(self, service: Service) -> None:
        assert service.process is not None
        self.network.pids.pop(service.process.pid, None)
        service.is_stopped = False

    def check_nobody_crashed(self) -> None:
        """Raises if a service ended that nobody ended."""
        for service in self.services.values():
            if not service.is_running and not service.is_leaving:
                assert service.process is not None
                tail = service.log_path.read_text(errors="replace")[-3000:]
                raise AssertionError(f"{service.name} ended with {service.process.returncode} by itself:\n{tail}")

    def alarming_lines(self) -> list[str]:
        """Lines of the logs that must not be there."""
        return [
            f"{service.name}: {line}"
            for service in self.services.values()
            for line in service.log_path.read_text(errors="replace").splitlines()
            if _ALARMING.search(line)
        ]

    def holdings(self) -> dict[tuple[str, int], Holding]:
        """What the living processes hold, by name and process id."""
        return {
            (service.name, service.process.pid): Holding.of(service.process.pid)
            for service in self.services.values()
            if service.process is not None and service.is_running
        }

    # -- what the routers say -----------------------------------------------------------------------------------------

    def url(self, router: str = "router-0") -> str:
        own, _ = self.network.join(router)
        return f"http://{own}:{HTTP_PORT}"

    def names(self, *roles: Role) -> list[str]:
        return [service.name for service in self.services.values() if service.role in roles]

    async def fleet(self, router: str = "router-0") -> dict[str, Any]:
        """Raises httpx.HTTPError where the router cannot be reached."""
        answer: dict[str, Any] = (await self._http.get(f"{self.url(router)}/fleet")).json()
        return answer

    async def workers(self, router: str = "router-0") -> dict[str, dict[str, Any]]:
        return {worker["worker_id"]: worker for worker in (await self.fleet(router))["workers"]}

    async def incarnations(self) -> dict[str, str]:
        return {name: worker["incarnation"] for name, worker in (await self.workers()).items()}

    async def until(
        self, what: str, condition: Callable[[dict[str, Any]], bool], timeout_s: float = PATIENCE_S
    ) -> None:
        """Until the condition holds for every router's view of the fleet."""
        seen: dict[str, Any] = {}
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.check_nobody_crashed()
            try:
                seen = {router: await self.fleet(router) for router in self.names("router")}
                if all(condition(fleet) for fleet in seen.values()):
                    return
            except httpx.HTTPError as error:
                seen = {"error": repr(error)}
            await asyncio.sleep(0.05)
        raise AssertionError(f"not {what} within {timeout_s:g} s: {seen}\nafter: {'; '.join(self.events[-20:])}")

    async def until_ready(self, *names: str, since: dict[str, str] | None = None) -> None:
        """All of these workers (default: all) are ready at every router; with `since`, as other incarnations."""
        wanted = names or tuple(self.names("prefill", "decode"))
        old = since or {}

        def are_ready(fleet: dict[str, Any]) -> bool:
            workers = {worker["worker_id"]: worker for worker in fleet["workers"]}
            found = [workers[name] for name in wanted if name in workers]
            return len(found) == len(wanted) and all(
                worker["state"] == "ready" and worker["incarnation"] != old.get(worker["worker_id"]) for worker in found
            )

        await self.until(f"ready: {', '.join(wanted)}", are_ready, START_TIMEOUT_S)

    async def known_incarnations(self) -> dict[str, str]:
        """Of the workers, as far as any router answers."""
        for router in self.names("router"):
            try:
                return {each["worker_id"]: each["incarnation"] for each in (await self.fleet(router))["workers"]}
            except httpx.HTTPError:
                continue
        return {}

    async def until_seen_ready(self, name: str, old: str) -> None:
        """Some router sees another incarnation of the worker ready; routers may be away meanwhile."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            self.check_nobody_crashed()
            for router in self.names("router"):
                with suppress(httpx.HTTPError):
                    worker = (await self.workers(router)).get(name)
                    if worker is not None and worker["state"] == "ready" and worker["incarnation"] != old:
                        return
            await asyncio.sleep(0.1)
        raise AssertionError(f"{name} was not ready in {START_TIMEOUT_S:g} s; {'; '.join(self.events[-20:])}")

    async def until_router_serves(self, name: str) -> None:
        """It answers, and a request would be placed."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            self.check_nobody_crashed()
            with suppress(httpx.HTTPError):
                if (await self._http.get(f"{self.url(name)}/ready")).status_code == 200:
                    return
            await asyncio.sleep(0.1)
        raise AssertionError(f"{name} did not serve in {START_TIMEOUT_S:g} s")

    async def until_busy(self, name: str, state: str, router: str = "router-0") -> None:
        """The worker holds such blocks."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            if (await self.workers(router))[name]["blocks"].get(state):
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{name} held no {state} blocks in 30 s")

    async def until_clean(self, timeout_s: float = PATIENCE_S) -> None:
        """All run and are ready again, and nothing is held by anybody."""
        self.network.heal()
        for service in self.services.values():
            if service.is_stopped:
                self.resume(service.name)
        await self.until_ready()
        await self.until("clean", _is_clean, timeout_s)
        assert not (lines := self.alarming_lines()), "\n".join(lines[:20])

    async def until_recounted(self) -> None:
        """Clean, and the workers' own count of their blocks, when they are quiet, adds up."""
        await self.until_clean()
        before = await self.incarnations()
        await asyncio.sleep(QUIET_CHECK_S)
        await self.until_clean()
        assert await self.incarnations() == before, "a worker started again by itself"


def _is_clean(fleet: dict[str, Any]) -> bool:
    requests = fleet["requests"]
    if requests["running"] or requests["running_sequences"] or requests["protocol_errors"]:
        return False
    for worker in fleet["workers"]:
        blocks, queues = dict(worker["blocks"]), dict(worker["queues"])
        queues.pop("cancelled_requests", None)
        held = [count for state, count in blocks.items() if state not in IDLE_STATES]
        adds_up = blocks["free"] + blocks["cached"] == blocks["total"]
        if not worker["live"] or any(held) or any(queues.values()) or not adds_up or worker["in_flight_requests"]:
            return False
    return True
