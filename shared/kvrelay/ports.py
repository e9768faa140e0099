"""TCP ports that are known before anyone listens on them."""

from __future__ import annotations

import socket
from types import TracebackType
from typing import Self


class HeldPort:
    """A port for a server that starts later, or again: until `release`, the system gives it to nobody who asks for any.

    The socket is bound and never listens. On Linux a server that sets SO_REUSEADDR, as Redis, libzmq, asyncio and the
    router do, still binds the port, and connections reach that server; while there is none, they are refused.
    """

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Holds any free port, or this one. Raises OSError where nobody could listen on it."""
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
        except OSError:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Lets the system give the port away. Idempotent."""
        self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
