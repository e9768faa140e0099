"""The rig, closed after each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from kvrelay_router.dispatch import dispatcher
from tests.component.dispatch.rig import Rig


@pytest_asyncio.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(dispatcher, "LIVE_TIMEOUT_S", 3.0)
    rig = Rig()
    yield rig
    await rig.close()
