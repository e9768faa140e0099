"""Stored responses, for GET and for requests that continue them: in Redis for all routers, or in memory."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response

from kvrelay.fleet.shared_responses import SharedResponses, StoreBounds, StoreUnavailable
from kvrelay.text.request.api_error import ApiError, wrong
from kvrelay_router.access.identity import names_of
from kvrelay_router.http.error_response import json_response
from kvrelay_router.responses.responses_request import as_items, is_reference


class StoredResponse(msgspec.Struct, frozen=True):
    """JSON of a response, and of the items of the whole conversation up to and including its output, whose ids are
    `output_ids`.
    """

    response: bytes
    items: tuple[bytes, ...]
    output_ids: tuple[str, ...] = ()

    def output_item(self, item_id: str) -> bytes | None:
        """JSON of an item of its output."""
        if item_id not in self.output_ids:
            return None
        return self.items[self.output_ids.index(item_id) - len(self.output_ids)]


class OwnResponses:
    """As `SharedResponses`, in the memory of this process, for routers without Redis. Drops what was not used for
    the longest time, of the owner with the most bytes."""

    def __init__(self, bounds: StoreBounds, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._bounds = bounds
        self._clock = clock
        self._responses: OrderedDict[tuple[str, str], tuple[bytes, float]] = OrderedDict()
        self._bytes_of: dict[str, int] = {}  # keyed by owner
        self.num_bytes = 0

    async def put(self, owner: str, response_id: str, data: bytes) -> bool:
        """Returns whether the response was stored: it may be too large."""
        if len(data) > self._bounds.max_bytes:
            return False
        self._drop((owner, response_id))
        self._responses[owner, response_id] = data, self._clock()
        self._count(owner, len(data))
        self._drop_expired()
        while self.num_bytes > self._bounds.max_bytes or len(self._responses) > self._bounds.max_responses:
            largest = max(self._bytes_of, key=lambda each: (self._bytes_of[each], each))
            self._drop(next(key for key in self._responses if key[0] == largest))
        return True

    async def get(self, owner: str, response_id: str) -> bytes | None:
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
        self._count(key[0], -len(found[0]))
        return True

    def _count(self, owner: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._bytes_of[owner] = self._bytes_of.get(owner, 0) + num_bytes
        if not self._bytes_of[owner]:
            del self._bytes_of[owner]


ResponseStore = OwnResponses | SharedResponses


def _away(error: StoreUnavailable) -> ApiError:
    return ApiError(
        f"Stored responses cannot be read or deleted now: {error}. Send the whole conversation, or try again later",
        status=503,
        code="response_store_unavailable",
        retry_after_s=1,
    )


Keep = Callable[[dict[str, Any]], Awaitable[bool]]
"""Stores a response at its end. Returns whether it did."""


class StoredConversations:
    """The conversations of stored responses. `store` is None if responses are not stored: then none is found."""

    def __init__(self, store: ResponseStore | None) -> None:
        self._store = store

    async def get(self, http: Request, response_id: str) -> Response:
        """Returns a stored response, or 404."""
        stored = await self._find(names_of(http).caller.owner, response_id)
        if stored is None:
            raise _not_found(response_id)
        return Response(stored.response, media_type="application/json")

    async def delete(self, http: Request, response_id: str) -> Response:
        """Deletes a stored response, or returns 404."""
        try:
            is_deleted = self._store is not None and await self._store.delete(names_of(http).caller.owner, response_id)
        except StoreUnavailable as error:
            raise _away(error) from error
        if not is_deleted:
            raise _not_found(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def items(self, given: Any, previous_id: str | None, owner: str) -> tuple[list[Any], tuple[bytes, ...]]:
        """The items of the field `input`, with stored ones in place of references, and those of the conversation that
        ends with the response `previous_id`, as JSON. Raises ApiError."""
        items = [
            await self._item(item, f"input[{index}].id", owner) if is_reference(item) else item
            for index, item in enumerate(as_items(given))
        ]
        if previous_id is None:
            return items, ()
        stored = await self._find(owner, previous_id)
        if stored is None:
            raise ApiError(
                f"Previous response with id '{previous_id}' not found: it was not stored, or it was dropped for later "
                "ones",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return items, stored.items

    def keep(self, owner: str, earlier: tuple[bytes, ...], items: list[Any]) -> Keep | None:
        """What stores the response that continues `earlier` and the request's own `items`. None if nothing is to."""
        store = self._store
        if store is None:
            return None
        given = (*earlier, *_dumped(items))

        async def keep(response: dict[str, Any]) -> bool:
            output = tuple(orjson.dumps(_without_scores(item)) for item in response["output"])
            ids = tuple(item["id"] for item in response["output"])
            stored = StoredResponse(orjson.dumps(response), given + output, ids)
            try:
                return await store.put(owner, response["id"], msgspec.msgpack.encode(stored))
            except StoreUnavailable:  # the response is served all the same
                return False

        return keep

    async def _find(self, owner: str, response_id: str) -> StoredResponse | None:
        if self._store is None:
            return None
        try:
            data = await self._store.get(owner, response_id)
        except StoreUnavailable as error:
            raise _away(error) from error
        return None if data is None else msgspec.msgpack.decode(data, type=StoredResponse)

    async def _item(self, reference: dict[str, Any], where: str, owner: str) -> Any:
        """The item that is referred to. Its id names its response."""
        item_id = reference.get("id")
        if not isinstance(item_id, str):
            raise wrong(where, "it must be a string")
        _, _, unique = item_id.partition("_")
        response = await self._find(owner, f"resp_{unique.partition('_')[0]}")
        item = None if response is None else response.output_item(item_id)
        if item is None:
            raise ApiError(
                f"Item with id '{item_id[:100]}' not found: its response was not stored, or was dropped for later ones",
                status=404,
                param=where,
                code="item_not_found",
            )
        return orjson.loads(item)


def _not_found(response_id: str) -> ApiError:
    return ApiError(f"Response with id '{response_id}' not found", status=404, code="response_not_found")


def _without_scores(item: dict[str, Any]) -> dict[str, Any]:
    """Drops log-probabilities: stored responses continue conversations, which do not need them."""
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}


def _dumped(items: list[Any]) -> list[bytes]:
    dumped = []
    for index, item in enumerate(items):
        try:
            dumped.append(orjson.dumps(item))
        except TypeError:
            raise wrong(f"input[{index}]", "it is nested too deeply to be stored") from None
    return dumped
