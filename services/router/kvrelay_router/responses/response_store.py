"""Keeps responses for GET and for requests that continue them: in Redis for all routers, or in memory."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from kvrelay.fleet.shared_responses import SharedResponses, StoreBounds, StoreUnavailable
from kvrelay.text.request.api_error import ApiError


class StoredResponse(msgspec.Struct, frozen=True):
    """JSON of a response, and of the items of the whole conversation up to and including its output, whose ids are
    `output_ids`.
    """

    response: bytes
    items: tuple[bytes, ...]
    output_ids: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        return len(self.response) + sum(map(len, self.items)) + sum(map(len, self.output_ids))

    def output_item(self, item_id: str) -> bytes | None:
        """JSON of an item of its output."""
        if item_id not in self.output_ids:
            return None
        return self.items[self.output_ids.index(item_id) - len(self.output_ids)]


class OwnResponses:
    """Responses in the memory of this process, for routers without Redis. Drops those that were not used for the
    longest time. Each API key has its own."""

    def __init__(self, bounds: StoreBounds, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._bounds = bounds
        self._clock = clock
        self._responses: OrderedDict[tuple[str, str], tuple[StoredResponse, float]] = OrderedDict()
        self._bytes_of: dict[str, int] = {}  # keyed by owner
        self.num_bytes = 0

    async def put(self, owner: str, response_id: str, stored: StoredResponse) -> bool:
        """Returns whether the response was stored: it may be too large."""
        if stored.num_bytes > self._bounds.max_bytes:
            return False
        self._drop((owner, response_id))
        self._responses[owner, response_id] = stored, self._clock()
        self._count(owner, stored.num_bytes)
        self._drop_expired()
        while self.num_bytes > self._bounds.max_bytes or len(self._responses) > self._bounds.max_responses:
            largest = max(self._bytes_of, key=lambda each: (self._bytes_of[each], each))
            self._drop(next(key for key in self._responses if key[0] == largest))
        return True

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        self._drop_expired()
        found = self._responses.pop((owner, response_id), None)
        if found is None:
            return None
        self._responses[owner, response_id] = found[0], self._clock()
        return found[0]

    async def delete(self, owner: str, response_id: str) -> bool:
        """Returns whether it was there."""
        self._drop_expired()
        return self._drop((owner, response_id))

    def _drop_expired(self) -> None:
        oldest = self._clock() - self._bounds.kept_s
        while self._responses and next(iter(self._responses.values()))[1] <= oldest:
            self._drop(next(iter(self._responses)))

    def _drop(self, key: tuple[str, str]) -> bool:
        found = self._responses.pop(key, None)
        if found is None:
            return False
        self._count(key[0], -found[0].num_bytes)
        return True

    def _count(self, owner: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._bytes_of[owner] = self._bytes_of.get(owner, 0) + num_bytes
        if not self._bytes_of[owner]:
            del self._bytes_of[owner]


class RedisResponses:
    """As `OwnResponses`, in Redis. While it is away responses are served and not stored, and the others raise 503."""

    def __init__(self, shared: SharedResponses) -> None:
        self._shared = shared

    async def put(self, owner: str, response_id: str, stored: StoredResponse) -> bool:
        try:
            return await self._shared.put(owner, response_id, msgspec.msgpack.encode(stored))
        except StoreUnavailable:
            return False

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        try:
            data = await self._shared.get(owner, response_id)
        except StoreUnavailable as error:
            raise _away(error) from error
        return None if data is None else msgspec.msgpack.decode(data, type=StoredResponse)

    async def delete(self, owner: str, response_id: str) -> bool:
        try:
            return await self._shared.delete(owner, response_id)
        except StoreUnavailable as error:
            raise _away(error) from error


ResponseStore = OwnResponses | RedisResponses


def _away(error: StoreUnavailable) -> ApiError:
    return ApiError(
        f"Stored responses cannot be read or deleted now: {error}. Send the whole conversation, or try again later",
        status=503,
        code="response_store_unavailable",
        retry_after_s=1,
    )


async def output_item(store: ResponseStore, owner: str, item_id: str) -> bytes | None:
    """JSON of an item of the output of a stored response. Its id names the response. Raises 503."""
    _, _, unique = item_id.partition("_")
    found = await store.get(owner, f"resp_{unique.partition('_')[0]}")
    return None if found is None else found.output_item(item_id)
