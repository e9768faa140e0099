"""TCP ports that are reserved before a server listens on them."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Self


class HeldPort:
    """Reserves a port for a server that starts later: until `release`, the system does not assign it as a free port.

    The socket is bound and never listens. On Linux a server with SO_REUSEADDR (Redis, libzmq, asyncio, the router) can
    still bind the port and receives its connections; without a server they are refused.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Reserves this port, or any free one for 0. Raises OSError if it cannot be bound."""
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
        except OSError:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Ends the reservation. Idempotent."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
