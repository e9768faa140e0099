"""Stored responses, for GET and for requests that continue them: in Redis for all routers, or in memory."""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response

from kvrelay.excerpts import quoted
from kvrelay.fleet.shared_responses import SharedResponses, StoreBounds, StoreUnavailable
from kvrelay.text.request.api_error import ApiError, wrong
from kvrelay_router.access.identity import names_of
from kvrelay_router.http.error_response import json_response
from kvrelay_router.loop_share import LoopShare
from kvrelay_router.responses.responses_request import as_items, is_reference

LISTED, MAX_LISTED = 20, 100
"""Items of a page, by default and at most."""

_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
"""Of the ids that items get."""

_ITEM_ID = re.compile(r"[a-z]+_(.*?)(?:_\d+)?")
"""The id of an item of an output, with the end of its response's."""


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

    async def input_items(self, http: Request, response_id: str) -> Response:
        """Returns a page of the items before the output of a stored response, those of earlier ones included, or 404.
        Newest first, as in OpenAI's API, unless `?order=asc`; `?limit` of them behind the item `?after`."""
        limit, order, after = (http.query_params.get(name) for name in ("limit", "order", "after"))
        num_listed = int(limit) if limit and limit.isascii() and limit.isdecimal() and len(limit) <= 3 else 0
        if limit is not None and not 1 <= num_listed <= MAX_LISTED:
            raise wrong("limit", f"it must be 1 to {MAX_LISTED}")
        if order not in (None, "asc", "desc"):
            raise wrong("order", "it must be 'asc' or 'desc'")
        stored = await self._find(names_of(http).caller.owner, response_id)
        if stored is None:
            raise _not_found(response_id)
        items = stored.items[: len(stored.items) - len(stored.output_ids)]
        page, has_more = await _page(items if order == "asc" else items[::-1], num_listed or LISTED, after)
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
        return json_response({"object": "list", "data": page, **ends, "has_more": has_more})

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
                f"Previous response with id {quoted(previous_id)} not found: it was not stored, or was dropped for "
                "later ones",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return items, stored.items

    def keep(self, unique: str, owner: str, earlier: tuple[bytes, ...], items: list[Any]) -> Keep | None:
        """What stores the response that continues `earlier` and the request's own `items`. None if nothing is to.
        `unique`: the end of the response's id."""
        store = self._store
        if store is None:
            return None
        given = (*earlier, *_dumped(items, unique))

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
        found = _ITEM_ID.fullmatch(item_id)
        response = None if found is None else await self._find(owner, f"resp_{found[1]}")
        item = None if response is None else response.output_item(item_id)
        if item is None:
            raise ApiError(
                f"Item with id {quoted(item_id)} not found: its response was not stored, or was dropped for later ones",
                status=404,
                param=where,
                code="item_not_found",
            )
        return orjson.loads(item)


def _not_found(response_id: str) -> ApiError:
    return ApiError(f"Response with id {quoted(response_id)} not found", status=404, code="response_not_found")


async def _page(items: Sequence[bytes], num_listed: int, after: str | None) -> tuple[list[dict[str, Any]], bool]:
    """Items behind the one with the id `after`, and whether others follow. Raises 404 if there is none with this id."""
    share, start = LoopShare(), 0 if after is None else -1
    for index, item in enumerate(items if after is not None else ()):
        if orjson.loads(item).get("id") == after:
            start = index + 1  # behind the last one, so that pages of items with equal ids end
        await share.pause()
    if start < 0:
        raise ApiError(f"No item has the id {quoted(after)}", status=404, param="after", code="item_not_found")
    end = start + num_listed
    return [_listed(orjson.loads(item)) for item in items[start:end]], end < len(items)


def _listed(item: dict[str, Any]) -> dict[str, Any]:
    """An item in the form of lists: with its type, and its content as parts."""
    item = {**item, "type": _type(item), "status": item.get("status") or "completed"}
    if item["type"] == "message" and isinstance(item["content"], str):
        is_own = item["role"] == "assistant"
        part = {"type": "output_text", "annotations": []} if is_own else {"type": "input_text"}
        item["content"] = [{**part, "text": item["content"]}]
    return item


def _type(item: dict[str, Any]) -> str:
    return str(item.get("type", "message"))


def _without_scores(item: dict[str, Any]) -> dict[str, Any]:
    """Drops log-probabilities: stored responses continue conversations, which do not need them."""
    if item["type"] != "message":
        return item
    return {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}


def _dumped(items: list[Any], unique: str) -> list[bytes]:
    """JSON of checked items. Those without an id get one."""
    dumped = []
    for index, item in enumerate(items):
        own = {} if isinstance(item.get("id"), str) else {"id": f"{_PREFIXES[_type(item)]}_{unique}_in{index}"}
        try:
            dumped.append(orjson.dumps({**item, **own}))
        except TypeError:
            raise wrong(f"input[{index}]", "it is nested too deeply to be stored") from None
    return dumped
