"""Runs several router processes behind one port: starts them, restarts them if they die, and drains them together.

This process binds the port, accepts the connections and passes each to the process with the fewest
(`http/connection_passing.py`). It serves no request itself. There are two simpler designs, with these drawbacks:
- One listening socket that all processes inherit: if many connections arrive at once, the process that wakes up first
  accepts most of them.
- One socket for each process with SO_REUSEPORT: connections in the queue of a process that dies or drains would wait
  with it, and a second router on the same port would silently get half of the connections.

Towards workers each process is a router of its own, named after this one (`NAME-0`, `NAME-1`, ...), with its own
incarnation, inbox, load and view of the fleet. The limits of API keys hold for all processes together, through Redis.
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

from kvrelay.cli.display import DIED, Display
from kvrelay.cli.supervisor import Service, ServiceSpec, ServiceStartFailed
from kvrelay.config.router import RouterConfig
from kvrelay.process import StartFailed
from kvrelay_router.http.connection_passing import PassedConnections, ServingProcess, SharedPort
from kvrelay_router.http.http_server import bind

log = logging.getLogger(__name__)

CHANNEL = "KVRELAY_INHERITED_CHANNEL"
"""The environment variable with the descriptor of a process's end of the channel for connections."""
GRACE_S = 10.0
"""Maximum time for a process to exit after its drain timeout."""


def inherited_connections(port: int) -> PassedConnections | None:
    """The connections that another process passes on; None if this process binds the port itself."""
    descriptor = os.environ.get(CHANNEL)
    return None if descriptor is None else PassedConnections(socket.socket(fileno=int(descriptor)), port)


class ProcessDisplay(Display):
    """Logs the states of a process, and reports its death to the shared port."""

    def __init__(self, member: ServingProcess) -> None:
        self._member = member

    def __exit__(self, *exc_info: object) -> None:
        return None

    def update(self, name: str, state: str, detail: str = "") -> None:
        log.info("%s: %s %s", name, state, detail)
        if state == DIED:
            self._member.died()

    def note(self, text: str) -> None:
        """Logs the text as a line."""
        log.info("%s", text)


class RouterProcesses:
    """All processes of a router. `argv` holds the flags of this process, which they get too."""

    def __init__(self, config: RouterConfig, argv: Sequence[str]) -> None:
        self._config = config
        self._argv = argv
        self._stop = asyncio.Event()
        self._num_signals = 0
        self._services: list[Service] = []

    async def run(self) -> None:
        """Runs until SIGTERM or SIGINT, then drains. A second signal ends the drains. Raises StartFailed, OSError."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        shared = SharedPort(bind(self._config.host, self._config.port), self._config.processes)
        self._services = [
            Service(self._spec(number, shared.port, member), ProcessDisplay(member))
            for number, member in enumerate(shared.members)
        ]
        running = [asyncio.create_task(service.run()) for service in self._services]
        stop = asyncio.create_task(self._stop.wait())
        ready = asyncio.create_task(self._log_when_ready(shared.port))
        try:
            done, _ = await asyncio.wait([stop, *running], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except ServiceStartFailed as error:
            raise StartFailed(str(error)) from error
        finally:
            ready.cancel()
            shared.stop_listening()
            await asyncio.gather(*(service.stop() for service in self._services))
            for task in (stop, *running):
                task.cancel()
            await asyncio.gather(stop, ready, *running, return_exceptions=True)
            shared.close()

    async def _log_when_ready(self, port: int) -> None:
        for service in self._services:
            await service.ready.wait()
        log.info("%d processes serve at port %d", len(self._services), port)

    def _on_signal(self) -> None:
        self._num_signals += 1
        self._stop.set()
        if self._num_signals > 1:
            for service in self._services:
                service.interrupt()

    def _spec(self, number: int, port: int, member: ServingProcess) -> ServiceSpec:
        name = f"{self._config.router_id}-{number}"
        argv = [*self._argv, "--processes=1", f"--router-id={name}", f"--port={port}"]
        if self._config.message_port:
            # Each process takes as many ports as there are fleets.
            argv.append(f"--message-port={self._config.message_port + number * len(self._config.fleets())}")
        if self._config.metrics_port:
            argv.append(f"--metrics-port={self._config.metrics_port + number}")
        return ServiceSpec(
            name=name,
            argv=[sys.executable, "-m", "kvrelay_router", *argv],
            environ={CHANNEL: str(member.descriptor)},
            log_path=None,
            ready=member,
            drain_timeout_s=self._config.drain_timeout_s + GRACE_S,
            pass_fds=(member.descriptor,),
        )


def run_processes(config: RouterConfig) -> None:
    """Runs the process that starts the others, until all have ended."""
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(config))


async def _run(config: RouterConfig) -> None:
    try:
        await RouterProcesses(config, sys.argv[1:]).run()
    except OSError as error:
        raise StartFailed(str(error)) from error
