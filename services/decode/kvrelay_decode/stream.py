"""Tokens on their way to the routers: one message a step and router."""

from __future__ import annotations

from collections.abc import Callable

from kvrelay.protocol.messages import PeerRef, TokenBatch, TokenEntry


class TokenStream:
    """Collects the entries of a step and sends them as one message to each router."""

    def __init__(self, send: Callable[[PeerRef, TokenBatch], None]) -> None:
        self._send = send
        self._pending: dict[PeerRef, list[TokenEntry]] = {}

    def put(self, router: PeerRef, entry: TokenEntry) -> None:
        """Adds an entry to the router's next message."""
        self._pending.setdefault(router, []).append(entry)

    def flush(self) -> None:
        """Sends what was collected."""
        pending, self._pending = self._pending, {}
        for router, entries in pending.items():
            self._send(router, TokenBatch(entries=entries))
