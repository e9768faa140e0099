"""Runs services as child processes: starts them, waits until they are ready, restarts them, stops them in order.

States of a service: STARTING > READY > DIED > STARTING (after a pause) ..., and STOPPING > STOPPED from any state. One
that ends with status 0, as after SIGTERM, is STOPPED in place of DIED. A service that ends before it was ever ready
fails the complete start.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, BinaryIO, Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from kvrelay.cli.stacks import DIED, READY, STARTING, STOPPED, STOPPING, ProcessState
from kvrelay.flag_parser import CommandFailed
from kvrelay.fleet import Registry, RegistryUnavailable
from kvrelay.machine_memory import num_memory_kills
from kvrelay.process import describe_exit, die_with_parent

READY_POLL_S = 0.1
HTTP_TIMEOUT_S = 2.0
FIRST_PAUSE_S = 0.5
LAST_PAUSE_S = 15.0
LAST_PAUSE_OF_READY_S = 2.0
"""A service that became ready can start. It is killed from outside, or by a request that is not tried for ever."""
HEALTHY_AFTER_S = 60.0
"""A service that ran this long restarts with the shortest pause."""
KILL_GRACE_S = 5.0
"""Additional time after a service's drain timeout before it is killed."""
MAX_LOG_LINES = 30
MAX_LOG_COLUMNS = 300
MAX_ERROR_COLUMNS = 1000
"""An error line may be longer than others, because it ends with advice."""
_ERROR = re.compile(
    r" (ERROR|CRITICAL) |\"level\": ?\"(error|critical)\"|^[A-Za-z_.]*(Error|Exception)\b.*:|cannot start"
)
_CONFIGURATION = re.compile(r"\bconfiguration: ")


# -- displays of their states -----------------------------------------------------------------------------------------

STYLES = {READY: "green", DIED: "red", STOPPED: "dim", STOPPING: "yellow", STARTING: "yellow"}


class Display(AbstractContextManager["Display"]):
    """Shows the states of services, as one line per event: for files, pipes and next to logs."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def update(self, name: str, state: str, detail: str = "") -> None:
        """Shows that a service entered a state."""
        self.note(f"{name:12} {state:9} {detail}".rstrip())

    def note(self, text: str) -> None:
        """Shows a permanent text. Drops it if the output is closed or its disk is full: services are supervised all the
        same."""
        with suppress(OSError, ValueError):
            print(text, file=self._out, flush=True)


class LiveDisplay(Display):
    """A table that is redrawn in place, for terminals."""

    def __init__(self, console: Console) -> None:
        super().__init__(console.file)
        self._rows: dict[str, tuple[str, str, float]] = {}
        self._spinners: dict[str, Spinner] = {}
        self._live = Live(console=console, get_renderable=self._table, refresh_per_second=8)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def update(self, name: str, state: str, detail: str = "") -> None:
        """Changes the service's row."""
        self._rows[name] = (state, detail, time.monotonic())

    def note(self, text: str) -> None:
        """Prints above the table."""
        self._live.console.print(Text(text), soft_wrap=True)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, (state, detail, since) in self._rows.items():
            if state in (STARTING, STOPPING):
                spinner = self._spinners.setdefault(name, Spinner("dots"))
                table.add_row(spinner, name, Text(f"{state} {time.monotonic() - since:.0f} s", STYLES[state]), detail)
            else:
                table.add_row("", name, Text(state, STYLES[state]), detail)
        return table


def make_display(out: IO[str], *, plain: bool) -> Display:
    """A live table on a terminal; lines elsewhere or with `plain`."""
    console = Console(file=out)
    return Display(out) if plain or not console.is_terminal else LiveDisplay(console)


# -- services ---------------------------------------------------------------------------------------------------------


class WorkerReady:
    """A worker process is ready when all its workers are registered with new incarnations."""

    def __init__(self, registry: Registry, model: str, worker_ids: Set[str]) -> None:
        self._registry = registry
        self._model = model
        self._worker_ids = worker_ids
        self._found: set[tuple[str, str]] = set()
        self._stale: set[tuple[str, str]] = set()

    def restarted(self) -> None:
        """Remembers the old incarnations, whose leases may still be valid."""
        self._stale |= self._found

    async def is_ready(self) -> bool:
        """Returns whether all workers are registered; False if Redis does not answer."""
        try:
            workers = await self._registry.list_workers(self._model)
        except RegistryUnavailable:
            return False
        starts = {(each.worker_id, each.incarnation) for each in workers if each.worker_id in self._worker_ids}
        self._found = starts - self._stale
        return {worker_id for worker_id, _ in self._found} == self._worker_ids


class RouterReady:
    """A router is ready when GET /ready answers 200 and counts all workers started with it.

    Before that, it would serve without some workers, for example compute all prompts on decode.
    """

    def __init__(self, host: str, port: int, workers: Mapping[str, int]) -> None:
        self._host = host
        self._port = port
        self._workers = workers

    def restarted(self) -> None:
        """Does nothing: a dead router does not answer."""

    async def is_ready(self) -> bool:
        """Returns whether the router is ready; False if it does not listen."""
        try:
            async with asyncio.timeout(HTTP_TIMEOUT_S):
                status, body = await self._get_ready()
            counted = json.loads(body)["workers"] if status == b"200" else None
        except (OSError, TimeoutError, ValueError, LookupError):
            return False  # nothing listens, or another server does
        return counted is not None and all(counted.get(role, 0) >= number for role, number in self._workers.items())

    async def _get_ready(self) -> tuple[bytes, bytes]:
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            writer.write(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        finally:
            writer.close()
        return head.split(b" ", 2)[1] if head else b"", body


ReadyCheck = WorkerReady | RouterReady
"""Polled while a service starts. `restarted` is called before a restart: earlier readiness no longer counts."""


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """A process to run. `environ` extends this process's environment; without `log_path` its output is inherited."""

    name: str
    role: str
    argv: Sequence[str]
    environ: Mapping[str, str]
    log_path: Path | None
    ready: ReadyCheck
    drain_timeout_s: float
    pass_fds: Sequence[int] = ()  # inherited file descriptors
    where: str = ""  # location shown to users, such as a GPU


class RestartPauses:
    """The pauses before the restarts of one service, which double."""

    def __init__(self) -> None:
        self._next_s = FIRST_PAUSE_S

    def after(self, ran_s: float, *, became_ready: bool) -> float:
        """Returns the pause in seconds after a run of `ran_s` seconds."""
        if ran_s > HEALTHY_AFTER_S:
            self._next_s = FIRST_PAUSE_S
        pause_s = min(self._next_s, LAST_PAUSE_OF_READY_S if became_ready else LAST_PAUSE_S)
        self._next_s = 2 * pause_s
        return pause_s


class Service:
    """A child process and its restarts. `on_change` is called when `described` has changed."""

    def __init__(self, spec: ServiceSpec, display: Display, on_change: Callable[[], None]) -> None:
        self.spec = spec
        self.ready = asyncio.Event()
        self._state = STARTING
        self._display = display
        self._on_change = on_change
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self._was_ready = False
        self._became_ready = False  # the present run did

    async def run(self) -> None:
        """Keeps the service running until `stop`. Raises CommandFailed if it never becomes ready."""
        pauses = RestartPauses()
        while not self._stopping:
            started = time.monotonic()
            ending = await self._run_once()
            if self._stopping:
                return
            if not self._was_ready:
                raise CommandFailed(f"{self.spec.name} {ending} before it was ready{self._log_tail()}")
            pause_s = pauses.after(time.monotonic() - started, became_ready=self._became_ready)
            state = STOPPED if ending == describe_exit(0) else DIED
            self._enter(state, f"{ending}; restarts in {pause_s:g} s {self._log_hint()}")
            await asyncio.sleep(pause_s)
            self.spec.ready.restarted()

    def described(self) -> ProcessState:
        spec = self.spec
        pid = None if self._process is None else self._process.pid
        return ProcessState(spec.name, spec.role, pid, self._state, spec.drain_timeout_s + KILL_GRACE_S)

    def _enter(self, state: str, detail: str = "") -> None:
        self._state = state
        self._on_change()
        self._display.update(self.spec.name, state, detail)

    async def stop(self) -> None:
        """Drains the process, and kills it after its timeout."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        self._enter(STOPPING)
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), self.spec.drain_timeout_s + KILL_GRACE_S)
        except TimeoutError:
            self.kill()
            await process.wait()
        self._enter(STOPPED)

    def interrupt(self) -> None:
        """Signals again, upon which services end without waiting for open requests."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._stopping = True
        self._signal(signal.SIGKILL)

    async def _run_once(self) -> str:
        """Runs the process once; returns how it ended."""
        where = f"{self.spec.where} " if self.spec.where else ""
        self._enter(STARTING, f"{where}{self._log_hint()}")
        started, num_kills = time.monotonic(), num_memory_kills()
        self._became_ready = False
        try:
            process = await self._spawn()
        except OSError as error:  # no memory, no descriptor or no process is left: there may be one later
            return f"could not be started ({error})"
        self._process = process
        self._on_change()
        if self._stopping:  # stop was requested during the spawn
            self.kill()
        ended = asyncio.create_task(process.wait())
        while not (is_ready := await self.spec.ready.is_ready()) and not ended.done():
            await asyncio.wait([ended], timeout=READY_POLL_S)
        if is_ready and not self._stopping:  # it may have become ready and ended since the last poll
            self._was_ready = self._became_ready = True
            self.ready.set()
            self._enter(READY, f"{where}after {time.monotonic() - started:.1f} s")
        status = await ended
        self.ready.clear()
        return describe_exit(status, num_kills)

    async def _spawn(self) -> asyncio.subprocess.Process:
        with self._output() as output:
            return await asyncio.create_subprocess_exec(
                *self.spec.argv,
                env={**os.environ, **self.spec.environ},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # so that Ctrl-C reaches only this process, which stops services in order
                preexec_fn=die_with_parent(),
                pass_fds=self.spec.pass_fds,
            )

    def _output(self) -> AbstractContextManager[BinaryIO | None]:
        """The log. A service is restarted without one if its log cannot be opened."""
        if self.spec.log_path is None:
            return nullcontext()
        try:
            self.spec.log_path.parent.mkdir(parents=True, exist_ok=True)  # removed since the start
            return self.spec.log_path.open("ab")
        except OSError as error:
            self._display.note(f"{self.spec.name} runs without a log: {error}")
            return open(os.devnull, "ab")

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                return

    def _log_hint(self) -> str:
        return f"(log: {self.spec.log_path})" if self.spec.log_path else ""

    def _log_tail(self) -> str:
        if self.spec.log_path is None or not self.spec.log_path.exists():
            return ""
        lines = self.spec.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        return "".join(f"\n  | {line}" for line in log_excerpt(lines)) + f"\nComplete log: {self.spec.log_path}"


class Supervisor:
    """Runs a set of services. `front` drains first, so no new requests arrive while the others finish."""

    def __init__(self, front: Service, others: Sequence[Service]) -> None:
        self._front = front
        self._others = others
        self._tasks: list[asyncio.Task[None]] = []

    def described(self) -> tuple[ProcessState, ...]:
        return tuple(service.described() for service in (*self._others, self._front))

    def start(self) -> None:
        """Starts all services at the same time."""
        self._tasks = [asyncio.create_task(service.run()) for service in (*self._others, self._front)]

    async def wait_ready(self) -> None:
        """Waits until every service was ready. Raises CommandFailed."""
        waiting = asyncio.create_task(self._all_ready())
        running: list[asyncio.Task[None]] = [waiting, *self._tasks]
        try:
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for task in self._tasks:
                if task.done():
                    task.result()
        finally:
            waiting.cancel()

    async def _all_ready(self) -> None:
        for service in (*self._others, self._front):
            await service.ready.wait()

    async def stop(self) -> None:
        """Drains `front`, then the others together, and waits for all processes."""
        await self._front.stop()
        await asyncio.gather(*(service.stop() for service in self._others))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def kill(self) -> None:
        for service in (self._front, *self._others):
            service.kill()


def log_excerpt(lines: Sequence[str]) -> list[str]:
    """The last error first, then the last lines. Without the line of the configuration; long lines are cut."""
    last = [line for line in lines if not _CONFIGURATION.search(line)][-MAX_LOG_LINES:]
    error = next((number for number in range(len(last) - 1, -1, -1) if _ERROR.search(last[number])), None)
    if error is None:
        return [_cut(line) for line in last]
    before = [_cut(line) for number, line in enumerate(last) if number != error]
    return [_cut(last[error], MAX_ERROR_COLUMNS), *(["(the last lines of the log)", *before] if before else [])]


def _cut(line: str, columns: int = MAX_LOG_COLUMNS) -> str:
    return line if len(line) <= columns else f"{line[: columns - 1]}…"
