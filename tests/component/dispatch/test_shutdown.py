"""A router that ends closes everything, whatever one of its parts raises meanwhile."""

from __future__ import annotations

import pytest

from kvrelay.config import RouterConfig
from kvrelay.fleet import Registry
from kvrelay.fleet.key_limits import SharedLimits
from kvrelay.text.service import TextService
from kvrelay_router.server import RouterServer


async def test_a_close_that_raises_keeps_nothing_else_open(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    async def fail(self: SharedLimits) -> None:
        raise ConnectionResetError("it was in the middle of something")

    async def note_registry(self: Registry) -> None:
        closed.append("registry")

    def note_text(self: TextService) -> None:
        closed.append("text")

    monkeypatch.setattr(SharedLimits, "close", fail)
    monkeypatch.setattr(Registry, "close", note_registry)
    monkeypatch.setattr(TextService, "close", note_text)
    server = RouterServer(RouterConfig(port=0, redis_url="redis://127.0.0.1:1/0"))
    await server.startup()
    assert server._http is not None
    (fleet,) = server._fleets
    with pytest.raises(ConnectionResetError):
        await server.shutdown()
    assert closed == ["registry", "text"]
    assert fleet.dispatcher._is_closed
    await server._http.wait()
