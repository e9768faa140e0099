"""The same as in tests/component/fleet/test_index_churn.py with 64 workers and a million blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvrelay.fleet.embedded import RedisServer
from tests.component.fleet.churn import Churn, Size
from tests.fakes.redis_servers import ONLY_WHEN_TOLD


@pytest.mark.timeout(1200)
async def test_everybody_agrees_after_it_all(tmp_path: Path) -> None:
    with RedisServer(tmp_path, ONLY_WHEN_TOLD) as server:
        await Churn(server, Size(num_workers=64, num_blocks=1 << 14, num_rounds=12), seed=1).run()
