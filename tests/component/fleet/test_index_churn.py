"""After stores, evictions, crashes, gaps, accidents of Redis and of the router, the index is what the caches hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.fleet.embedded import RedisServer
from tests.component.fleet.churn import Churn, Size
from tests.fakes.redis_servers import ONLY_WHEN_TOLD


@pytest.mark.timeout(300)
async def test_everybody_agrees_after_it_all(tmp_path: Path) -> None:
    with RedisServer(tmp_path, ONLY_WHEN_TOLD) as server:
        await Churn(server, Size(num_workers=8, num_blocks=512, num_rounds=12), seed=1).run()
