"""POST /v1/responses and /v1/responses/input_tokens, and GET and DELETE of stored responses."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from kvrelay.text.request.api_error import ApiError, fields_named, wrong
from kvrelay.text.request.validation import RequestedOutput
from kvrelay_router.http.client_watch import while_connected
from kvrelay_router.http.error_response import json_response
from kvrelay_router.openai.api_service import ServedModels, check_model
from kvrelay_router.openai.chat_planning import plan_chat
from kvrelay_router.openai.chat_request import ChatRequest, parse_chat
from kvrelay_router.openai.delivery import GenerationResponse
from kvrelay_router.responses.input_items import as_items, input_messages, is_reference
from kvrelay_router.responses.output_items import OutputItems, TokenScores
from kvrelay_router.responses.response_store import ResponseStore, StoredResponse, output_item
from kvrelay_router.responses.responses_format import Keep, ResponseAnswer, ResponseObject, ResponseStream
from kvrelay_router.responses.responses_request import (
    FIELD_NAMES,
    ResponsesRequest,
    generation_fields,
    namespaces,
    parse_response,
    tool_fields,
)


class ResponsesEndpoint:
    """Converts responses to chat completions, which plan and run them."""

    def __init__(self, models: ServedModels, store: ResponseStore | None) -> None:
        """`store`: None if no response is to be stored."""
        self._models = models
        self._store = store

    async def serve(self, http: Request) -> Response:
        """Raises ApiError for every mistake in the request; nothing has been submitted by then."""
        service, content = await self._models.read(http)
        names, owner = service.names(http), self._owner(http)
        request = parse_response(content)
        items, earlier = await self._items(request, owner)
        messages = input_messages(items, [orjson.loads(item) for item in earlier])
        output = RequestedOutput(asked=request.max_output_tokens, default=None, param="max_output_tokens")
        with fields_named(FIELD_NAMES):
            chat_request = _chat_request(request, messages, content)
            planning = plan_chat(service, names, [chat_request], output, prompt_param="input")
            plan = await while_connected(http, service.settings.request_timeout_s, planning)
        scores = TokenScores(service.text.tokenizer, request.top_logprobs if request.wants_logprobs else None)
        items_of_output = OutputItems(names.unique, scores, namespaces(request))
        keep = None
        if request.store and self._store is not None:
            keep = _keep(self._store, owner, (*earlier, *_dumped(items)))
        (run,) = plan.runs
        response = ResponseObject(names.unique, request, run, keep)
        answer = ResponseStream if request.stream else ResponseAnswer
        return GenerationResponse(service, plan, answer(response, run, items_of_output))

    async def count_tokens(self, http: Request) -> Response:
        """Counts the tokens of a response's prompt, special tokens included."""
        service, content = await self._models.read(http)
        request = parse_response(content)
        check_model(service.settings, request.model)
        items, earlier = await self._items(request, self._owner(http))
        messages = input_messages(items, [orjson.loads(item) for item in earlier])
        with fields_named(FIELD_NAMES):
            chat_request = _chat_request(request, messages, content)
            encoding = service.encode_chat(chat_request.messages, chat_request.options)
            token_ids = await while_connected(http, service.settings.request_timeout_s, encoding)
        return json_response({"object": "response.input_tokens", "input_tokens": len(token_ids)})

    async def get(self, http: Request, response_id: str) -> Response:
        """Returns a stored response, or 404."""
        stored = None if self._store is None else await self._store.get(self._owner(http), response_id)
        if stored is None:
            raise _not_found(response_id)
        return Response(stored.response, media_type="application/json")

    async def delete(self, http: Request, response_id: str) -> Response:
        if self._store is None or not await self._store.delete(self._owner(http), response_id):
            raise _not_found(response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    def _owner(self, http: Request) -> str:
        service = self._models.first
        return service.settings.tenants.of(service.names(http).key).owner

    async def _items(self, request: ResponsesRequest, owner: str) -> tuple[list[Any], tuple[bytes, ...]]:
        """The request's own items, and those of the conversation that it continues. Raises ApiError."""
        items = await self._with_stored(as_items(request.input), owner)
        return items, await self._earlier_items(request, owner)

    async def _with_stored(self, items: list[Any], owner: str) -> list[Any]:
        """The items, with stored ones in place of references. Raises ApiError."""
        return [
            await self._stored_item(item, f"input[{index}].id", owner) if is_reference(item) else item
            for index, item in enumerate(items)
        ]

    async def _stored_item(self, reference: dict[str, Any], where: str, owner: str) -> Any:
        item_id = reference.get("id")
        if not isinstance(item_id, str):
            raise wrong(where, "it must be a string")
        stored = None if self._store is None else await output_item(self._store, owner, item_id)
        if stored is None:
            raise ApiError(
                f"Item with id '{item_id[:100]}' not found: its response was not stored, or was dropped for later ones",
                status=404,
                param=where,
                code="item_not_found",
            )
        return orjson.loads(stored)

    async def _earlier_items(self, request: ResponsesRequest, owner: str) -> tuple[bytes, ...]:
        """The items of the conversation that the request continues."""
        if request.previous_response_id is None:
            return ()
        stored = None if self._store is None else await self._store.get(owner, request.previous_response_id)
        if stored is None:
            raise ApiError(
                f"Previous response with id '{request.previous_response_id}' not found: it was not stored, or it was "
                "dropped for later ones",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return stored.items


def _keep(store: ResponseStore, owner: str, items: tuple[bytes, ...]) -> Keep:
    async def keep(response: dict[str, Any]) -> bool:
        output = [orjson.dumps(_without_scores(item)) for item in response["output"]]
        ids = tuple(item["id"] for item in response["output"])
        return await store.put(owner, response["id"], StoredResponse(orjson.dumps(response), (*items, *output), ids))

    return keep


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


def _chat_request(request: ResponsesRequest, messages: list[dict[str, Any]], content: dict[str, Any]) -> ChatRequest:
    """The chat completion with this prompt. The instructions come first. `content`: the body of the request."""
    if request.instructions:
        messages = [{"role": "system", "content": request.instructions}, *messages]
    if not messages:
        raise wrong("input", "it must not be empty")
    chat = {"model": request.model, "messages": messages}
    return parse_chat({**chat, **tool_fields(request), **generation_fields(request, content)})


def _not_found(response_id: str) -> ApiError:
    return ApiError(f"Response with id '{response_id}' not found", status=404, code="response_not_found")
