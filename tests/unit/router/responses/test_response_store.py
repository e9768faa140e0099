"""The bounded store of responses in memory."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from kvrelay.fleet.shared_responses import StoreBounds
from kvrelay_router.responses.response_store import OwnResponses, StoredResponse
from tests.fakes.response_oracle import CALLS, Key, ResponseOracle


def response_of(size: int) -> StoredResponse:
    return StoredResponse(b"x" * (size // 2), (b"x" * (size - size // 2),))


@given(calls=CALLS, max_responses=st.integers(1, 6))
def test_the_owner_with_the_most_bytes_drops_what_it_did_not_use(
    calls: list[tuple[str, Key, int]], max_responses: int
) -> None:
    async def run() -> None:
        store, oracle = OwnResponses(StoreBounds(30, max_responses)), ResponseOracle(30, max_responses)
        kept: dict[Key, StoredResponse] = {}
        for call, key, size in calls:
            if call == "put":
                kept[key] = response_of(size)
                assert await store.put(*key, kept[key]) == oracle.put(key, size)
            elif call == "get":
                assert await store.get(*key) is (kept[key] if oracle.get(key) else None)
            else:
                assert await store.delete(*key) == oracle.delete(key)
            assert store.num_bytes == sum(oracle.sizes.values())

    asyncio.run(run())


async def test_what_is_too_large_alone_is_not_kept() -> None:
    store = OwnResponses(StoreBounds(20))
    assert await store.put("a", "1", response_of(20))
    assert not await store.put("a", "2", response_of(21))
    assert await store.get("a", "1") is not None and await store.get("a", "2") is None


async def test_a_response_expires_some_time_after_its_last_use() -> None:
    now = 0.0
    store = OwnResponses(StoreBounds(kept_s=10.0), clock=lambda: now)
    for name in "123":
        await store.put("a", name, response_of(4))
    now = 9.0
    assert await store.get("a", "1") is not None
    now = 10.0
    assert await store.get("a", "2") is None and not await store.delete("a", "3")
    assert await store.get("a", "1") is not None and store.num_bytes == 4
    now = 20.0
    assert await store.get("a", "1") is None and store.num_bytes == 0
