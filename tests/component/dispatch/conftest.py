"""The rig, closed after each test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.component.dispatch.rig import Rig


@pytest_asyncio.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    await rig.close()
