"""Runs the app on a socket, inside the caller's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from kvrelay_router.http.connection import make_protocol
from kvrelay_router.http.connection_limits import ConnectionLimits
from kvrelay_router.http.connection_passing import PassedConnections
from kvrelay_router.http.uvicorn_internals import EmbeddedServer

BACKLOG = 2048
LEAVE_S = 5.0
"""What connections that were handed over before a drain may take for their first requests."""
POLL_S = 0.005
SETTLE_S = 0.02
"""Connections that were just taken are made known to uvicorn within it, which then tells all of them of the end."""
DEFAULT_LIMITS = ConnectionLimits()


class HttpServer:
    """A listening server. `port` is the bound one, also when 0 was asked for."""

    def __init__(self, config: uvicorn.Config, source: socket.socket | PassedConnections) -> None:
        self._passed = source if isinstance(source, PassedConnections) else None
        self._listener = None if isinstance(source, PassedConnections) else source
        sockets = [] if self._listener is None else [self._listener]
        self.port: int = source.port if isinstance(source, PassedConnections) else source.getsockname()[1]
        self._server = EmbeddedServer(config, self._passed)
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

    def report_ready(self) -> None:
        """To the process that hands connections over, if one does."""
        if self._passed is not None:
            self._passed.report_ready()

    async def leave(self) -> None:
        """Has new connections handed to other processes, if one does that; those that have just come are served."""
        if self._passed is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self._passed.leave()
                while any(each.policy.is_fresh for each in self._server.open_connections):
                    await asyncio.sleep(POLL_S)

    async def stop(self) -> None:
        """Takes no more connections, answers what comes on open ones up to the graceful timeout, then cuts it off."""
        self._server.stop_listening()
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
