"""The interface between a connection and the rules that bound it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from kvrelay_router.http.uvicorn_internals import Exchange


class ConnectionPolicy(Protocol):
    """A policy for one connection. `UvicornConnection` calls it before uvicorn handles the same event."""

    @property
    def is_refused(self) -> bool:
        """True if no further request of this connection is served."""
        ...

    @property
    def is_fresh(self) -> bool:
        """True if no request has arrived yet."""
        ...

    def connected(self, num_connections: int) -> None: ...

    def lost(self) -> None: ...

    def received(self, data: bytes) -> None: ...

    def half_closed(self) -> bool:
        """The client ended its side. Returns True to keep the connection open."""
        ...

    def write_paused(self) -> None: ...

    def write_resumed(self) -> None: ...

    def request_begins(self) -> None: ...

    def url_grew(self, part: bytes) -> None: ...

    def head_grew(self, num_bytes: int) -> None: ...

    def head_complete(self) -> None: ...

    def body_grew(self, num_bytes: int) -> None: ...

    def request_ended(self) -> None:
        """The answer to the running request is complete."""
        ...

    def request_runs(self, exchange: Exchange) -> None: ...

    def malformed(self, message: str) -> None: ...

    def check_closing(self) -> None:
        """Called every few seconds."""
        ...
