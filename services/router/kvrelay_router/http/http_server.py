"""Runs the app on a socket, inside the caller's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from kvrelay_router.http.connection import BoundedConnection, make_protocol
from kvrelay_router.http.connection_limits import ConnectionLimits
from kvrelay_router.http.connection_passing import PassedConnections

BACKLOG = 2048
LEAVE_S = 5.0
"""What connections that were handed over before a drain may take for their first requests."""
POLL_S = 0.005
CLOSING_TICKS = 100
"""Connections that close are looked at every 10 s."""
SETTLE_S = 0.02
"""Connections that were just taken are made known to uvicorn within it, which then tells all of them of the end."""
DEFAULT_LIMITS = ConnectionLimits()


class _EmbeddedServer(uvicorn.Server):
    """Leaves signals to the process that it runs in; may take connections that another process hands over."""

    def __init__(self, config: uvicorn.Config, handed: PassedConnections | None) -> None:
        super().__init__(config)
        self._passed = handed

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begins to take connections."""
        if self._passed is None:
            await super().startup(sockets)
            return
        self.servers = []
        self._passed.start(self._make_connection)
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second."""
        if self._passed is not None:
            self._passed.say_open(len(self.server_state.connections))
        if counter % CLOSING_TICKS == 0:
            for each in self.server_state.connections:
                cast("BoundedConnection", each).check_closing()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends all connections."""
        if self._passed is not None:
            self._passed.stop()
        await super().shutdown(sockets)

    def has_fresh_connections(self) -> bool:
        """Whether there are some on which no request has come."""
        return any(cast("BoundedConnection", each).is_fresh for each in self.server_state.connections)

    def _make_connection(self) -> asyncio.Protocol:
        made: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return made

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


class HttpServer:
    """A listening server. `port` is the bound one, also when 0 was asked for."""

    def __init__(self, config: uvicorn.Config, source: socket.socket | PassedConnections) -> None:
        self._passed = source if isinstance(source, PassedConnections) else None
        self._listener = None if isinstance(source, PassedConnections) else source
        sockets = [] if self._listener is None else [self._listener]
        self.port: int = source.port if isinstance(source, PassedConnections) else source.getsockname()[1]
        self._server = _EmbeddedServer(config, self._passed)
        self._task = asyncio.create_task(self._server.serve(sockets=sockets), name="http-server")

    async def started(self) -> None:
        """Returns when connections are taken. Raises what kept it from that."""
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise RuntimeError("the HTTP server ended before it was ready")
            await asyncio.sleep(POLL_S)

    async def wait(self) -> None:
        """Returns when the server has ended."""
        await asyncio.shield(self._task)

    def say_ready(self) -> None:
        """To the process that hands connections over, if one does."""
        if self._passed is not None:
            self._passed.say_ready()

    async def leave(self) -> None:
        """Has new connections handed to other processes, if one does that; those that have just come are served."""
        if self._passed is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._passed.leave()
                while self._server.has_fresh_connections():
                    await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """Takes no more connections, answers what comes on open ones up to the graceful timeout, then cuts it off."""
        for server in self._server.servers:  # now: uvicorn looks at `should_exit` every 0.1 s
            server.close()
        if self._listener is not None:
            self._listener.close()
        await asyncio.sleep(SETTLE_S)
        self._server.should_exit = True
        await self._task


async def serve(
    app: ASGIApp,
    source: socket.socket | PassedConnections,
    *,
    graceful_timeout_s: float = 30.0,
    limits: ConnectionLimits = DEFAULT_LIMITS,
) -> HttpServer:
    """Serves what comes from `source` until `stop`, which closes a listener."""
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", make_protocol(limits)),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="warning",
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(graceful_timeout_s)),
        backlog=BACKLOG,
    )
    server = HttpServer(config, source)
    await server.started()
    return server


def bind(host: str, port: int) -> socket.socket:
    """A listening socket whose connections do not wait to fill packets (they inherit TCP_NODELAY). Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
