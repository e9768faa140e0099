from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvrelay.fleet.embedded import EmbeddedRedis


@pytest.fixture
def redis_url() -> Iterator[str]:
    with EmbeddedRedis() as redis:
        yield redis.url
