"""Two live routers with one id: workers serve the newer one. The older one notices, keeps its requests waiting, and
goes on when the newer one has ended. No token reaches the wrong router."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.component.dispatch.fake_workers import true_tokens
from tests.component.dispatch.rig import Rig, pair, read
from tests.fakes.waiting import PATIENCE_S, until


@pytest.fixture
async def routers() -> AsyncIterator[tuple[Rig, Rig]]:
    """The older and the newer one, with the same workers. The newer one has not started."""
    older, newer = Rig(), Rig()
    await older.start(*pair())
    newer.workers = older.workers
    yield older, newer
    await newer.dispatcher.close()
    await older.close()


async def test_the_older_of_two_routers_with_one_id_waits_and_goes_on(routers: tuple[Rig, Rig]) -> None:
    older, newer = routers
    assert await read(older.submit()) == {0: true_tokens(0, 6)}
    gate = older.workers["d0"].hold("token 3")
    waiting = asyncio.create_task(read(older.submit(timeout_s=4 * PATIENCE_S)))
    await asyncio.wait_for(gate.reached.wait(), PATIENCE_S)
    del older.workers["d0"].gates["token 3"]
    await newer.start()
    assert await read(newer.submit()) == {0: true_tokens(0, 6)}
    gate.open.set()
    await until(lambda: set(older.states().values()) == {"lost"})
    assert await read(newer.submit(num_sequences=2)) == {0: true_tokens(0, 6), 1: true_tokens(1, 6)}
    assert set(newer.states().values()) == {"ready"}
    await newer.dispatcher.close()
    assert await waiting == {0: true_tokens(0, 6)}
    await until(lambda: set(older.states().values()) == {"ready"})
    await older.nothing_is_left()
