"""Serves an ASGI application on a socket inside the caller's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from kvrelay_router.http.connection import ConnectionLimits, OpenConnections

BACKLOG = 2048
POLL_S = 0.005
DEFAULT_LIMITS = ConnectionLimits()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the process."""
        yield


class HttpServer:
    """A running server. `port` is the bound port even if the configured one is 0."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket, connections: OpenConnections) -> None:
        self.port: int = listener.getsockname()[1]
        self.connections = connections
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]), name="http-server")

    async def started(self) -> None:
        """Returns once the server accepts connections. Raises the error that stopped it."""
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise RuntimeError("the HTTP server ended before it was ready")
            await asyncio.sleep(POLL_S)

    async def wait(self) -> None:
        """Returns when the server has ended."""
        await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Accepts no more connections, serves open ones until the graceful timeout, then cancels the rest."""
        self._server.should_exit = True
        await self._task


async def serve(
    app: ASGIApp,
    listener: socket.socket,
    *,
    graceful_timeout_s: float = 30.0,
    limits: ConnectionLimits = DEFAULT_LIMITS,
) -> HttpServer:
    """Serves the listening socket until `stop`, which closes it."""
    connections = OpenConnections(limits)
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", connections.new),
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
    server = HttpServer(config, listener, connections)
    await server.started()
    return server


def bind(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """Returns a listening socket whose connections inherit TCP_NODELAY. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
