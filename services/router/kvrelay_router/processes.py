"""Several processes behind one port: started, started again when they die, drained together.

This process binds the listening socket, and all of them inherit it; it serves nothing itself. One socket, and not one
for each with SO_REUSEPORT: connections that wait to be taken are then everybody's, so none is lost with a process that
dies or drains, and whoever is idle takes the next one; and a second router on the same port is an error, which would
otherwise get half of the connections without anybody noticing.

Each is a router of its own towards workers, named after this one (`NAME-0`, `NAME-1`, ...): it has its own incarnation,
inbox, load and view of the fleet, and its death is its alone. The limits of API keys hold for all, through Redis.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence

from kvrelay.cli.display import Display
from kvrelay.cli.supervisor import Service, ServiceSpec
from kvrelay.cli.supervisor import StartFailed as ServiceFailed
from kvrelay.config.router import RouterConfig
from kvrelay.process import StartFailed
from kvrelay_router.api.server import bind

log = logging.getLogger(__name__)

LISTENER = "KVRELAY_INHERITED_LISTENER"
"""In the environment of a process: the descriptor of the listening socket."""
READY = "KVRELAY_INHERITED_READY"
"""The descriptor of the pipe into which it writes a byte once it serves."""
GRACE_S = 10.0
"""What a process may take beyond its drain timeout."""


def inherited_listener() -> socket.socket | None:
    """The socket on which this process is to serve; None where it binds its own."""
    descriptor = os.environ.get(LISTENER)
    return None if descriptor is None else socket.socket(fileno=int(descriptor))


def tell_ready() -> None:
    """Says that this process serves, to the one that started it, if one did."""
    descriptor = os.environ.get(READY)
    if descriptor is not None:
        with contextlib.suppress(BrokenPipeError):
            os.write(int(descriptor), b"!")


class ToldReady:
    """A `ReadyCheck`: the process itself says so, through a pipe that all its starts inherit."""

    def __init__(self) -> None:
        self._told, self.descriptor = os.pipe()
        os.set_blocking(self._told, False)

    def restarted(self) -> None:
        """What a start before said no longer counts."""
        while self._read():
            pass

    async def is_ready(self) -> bool:
        """See `ReadyCheck`."""
        return self._read()

    def close(self) -> None:
        """Closes both ends."""
        os.close(self._told)
        os.close(self.descriptor)

    def _read(self) -> bool:
        try:
            return bool(os.read(self._told, 64))
        except BlockingIOError:
            return False


class LogDisplay(Display):
    """What happens to the processes, in the log."""

    def __exit__(self, *exc_info: object) -> None:
        return None

    def update(self, name: str, state: str, detail: str = "") -> None:
        """A line."""
        log.info("%s: %s %s", name, state, detail)

    def note(self, text: str) -> None:
        """A line."""
        log.info("%s", text)


class RouterProcesses:
    """`run` them all. `argv`: the flags that this process was started with."""

    def __init__(self, config: RouterConfig, argv: Sequence[str]) -> None:
        self._config = config
        self._argv = argv
        self._stop = asyncio.Event()
        self._num_signals = 0
        self._services: list[Service] = []

    async def run(self) -> None:
        """Until SIGTERM or SIGINT; then each drains. A second signal ends the drains. Raises StartFailed, OSError."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        listener = bind(self._config.host, self._config.port)
        checks = [ToldReady() for _ in range(self._config.processes)]
        self._services = [Service(self._spec(i, listener, check), LogDisplay()) for i, check in enumerate(checks)]
        running = [asyncio.create_task(service.run()) for service in self._services]
        stop = asyncio.create_task(self._stop.wait())
        ready = asyncio.create_task(self._say_when_ready(listener.getsockname()[1]))
        try:
            done, _ = await asyncio.wait([stop, *running], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except ServiceFailed as error:
            raise StartFailed(str(error)) from error
        finally:
            ready.cancel()
            listener.close()  # the processes close theirs: only then is nothing accepted any more
            await asyncio.gather(*(service.stop() for service in self._services))
            for task in (stop, *running):
                task.cancel()
            await asyncio.gather(stop, ready, *running, return_exceptions=True)
            for check in checks:
                check.close()

    async def _say_when_ready(self, port: int) -> None:
        for service in self._services:
            await service.ready.wait()
        log.info("%d processes serve at port %d", len(self._services), port)

    def _on_signal(self) -> None:
        self._num_signals += 1
        self._stop.set()
        if self._num_signals > 1:
            for service in self._services:
                service.interrupt()

    def _spec(self, number: int, listener: socket.socket, check: ToldReady) -> ServiceSpec:
        name = f"{self._config.router_id}-{number}"
        argv = [*self._argv, "--processes=1", f"--router-id={name}"]
        if self._config.message_port:
            argv.append(f"--message-port={self._config.message_port + number}")
        if self._config.metrics_port:
            argv.append(f"--metrics-port={self._config.metrics_port + number}")
        return ServiceSpec(
            name=name,
            argv=[sys.executable, "-m", "kvrelay_router", *argv],
            environ={LISTENER: str(listener.fileno()), READY: str(check.descriptor)},
            log_path=None,
            ready=check,
            drain_timeout_s=self._config.drain_timeout_s + GRACE_S,
            pass_fds=(listener.fileno(), check.descriptor),
        )


def run_processes(config: RouterConfig) -> None:
    """The whole life of the process that starts the others."""
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(config))


async def _run(config: RouterConfig) -> None:
    try:
        await RouterProcesses(config, sys.argv[1:]).run()
    except OSError as error:
        raise StartFailed(str(error)) from error
