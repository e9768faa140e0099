"""Runs the app on a socket, inside the caller's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import cast

import uvicorn
from starlette.types import ASGIApp

from kvrelay_router.api.connection import ConnectionLimits, make_protocol

BACKLOG = 2048
DEFAULT_LIMITS = ConnectionLimits()


class _EmbeddedServer(uvicorn.Server):
    """Leaves signals to the process that it runs in."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


class HttpServer:
    """A listening server. `port` is the bound one, also when 0 was asked for."""

    def __init__(self, server: uvicorn.Server, listener: socket.socket) -> None:
        self.port: int = listener.getsockname()[1]
        self._server = server
        self._task = asyncio.create_task(server.serve(sockets=[listener]), name="http-server")

    async def started(self) -> None:
        """Returns when connections are taken. Raises what kept it from that."""
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise RuntimeError("the HTTP server ended before it was ready")
            await asyncio.sleep(0.005)

    async def wait(self) -> None:
        """Returns when the server has ended."""
        await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Takes no more connections, lets answers finish up to the graceful timeout, then cuts them off."""
        self._server.should_exit = True
        await self._task


async def serve(
    app: ASGIApp,
    listener: socket.socket,
    *,
    graceful_timeout_s: float = 30.0,
    limits: ConnectionLimits = DEFAULT_LIMITS,
) -> HttpServer:
    """Serves until `stop`, which closes the listener."""
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
    server = HttpServer(_EmbeddedServer(config), listener)
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
