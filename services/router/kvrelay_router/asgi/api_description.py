"""The API's description, OpenAPI 3.1: of the models that check requests, and of the types of answers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import msgspec
import orjson
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from kvrelay.text.request.parsing import TOKEN_SCHEMA, RequestModel
from kvrelay_router.access.identity import VALID_REQUEST_ID
from kvrelay_router.asgi import answers
from kvrelay_router.asgi.operations import MAX_ENDED
from kvrelay_router.http.error_response import is_anthropic
from kvrelay_router.openai.chat_request import NOT_IN_BATCHES
from kvrelay_router.responses.response_store import LISTED, MAX_LISTED

Schema = dict[str, Any]

REFERENCE = "#/components/schemas/{name}"
_TYPES = [each for each in vars(answers).values() if inspect.isclass(each) and issubclass(each, msgspec.Struct)]
_TYPES = [each for each in _TYPES if each is not msgspec.Struct]
_REFERENCES, _COMPONENTS = msgspec.json.schema_components(_TYPES, ref_template=REFERENCE)
_OF_TYPE = dict(zip(_TYPES, _REFERENCES, strict=True))

LARGEST = 2**64 - 1
"""The largest integer that a body may have."""
OWN_ANSWERS = "x-answers"
"""The key of an operation's answers until they replace FastAPI's."""
_ANY = {"application/json": "object", "text/html": "string", "text/plain": "string"}

SESSION: Schema = {"type": "string", "pattern": f"^{VALID_REQUEST_ID.pattern}$"}


def _query(name: str, schema: Schema, description: str, *, is_required: bool = False) -> Schema:
    place = {"name": name, "in": "query", "required": is_required}
    return {**place, "schema": schema, "description": description}


OF_SESSION = _query("session", {"type": "string"}, "Only requests of this session")
SESSIONS = _query(
    "session",
    {"type": "array", "items": SESSION, "minItems": 1, "maxItems": MAX_ENDED},
    "The sessions to end",
    is_required=True,
)
PAGE_QUERIES = [
    _query("limit", {"type": "integer", "minimum": 1, "maximum": MAX_LISTED, "default": LISTED}, "Items of a page"),
    _query("order", {"enum": ["asc", "desc"], "default": "desc"}, "Oldest or newest first"),
    _query("after", {"type": "string"}, "The id of the item before the page"),
]
_ITS_ID = {"parameters": {"response_id": "$response.body#/id"}}
OF_RESPONSES = {
    name: {"operationId": f"{name}_v1_responses__response_id__{end}", **_ITS_ID}
    for name, end in (("get", "get"), ("delete", "delete"), ("input_items", "input_items_get"))
}
"""The operations that take the id of a response."""


def operation(
    *answer: type,
    body: Sequence[type[RequestModel]] = (),
    streams: bool = False,
    media_type: str = "application/json",
    status: str = "200",
    links: Mapping[str, Any] | None = None,
    queries: Sequence[Schema] = (),
) -> dict[str, Any]:
    """What FastAPI cannot derive of an operation, because its endpoint reads the body and writes the answer itself.
    Several types of an answer, or of a body, are alternatives; without a type, the answer is any object or text."""
    schema = _one_of([_OF_TYPE[each] for each in answer]) if answer else {"type": _ANY[media_type]}
    content = {} if status == "204" else {media_type: {"schema": schema}}
    if streams:
        content["text/event-stream"] = {"schema": {}}  # of each event
    more = {name: each for name, each in (("content", content), ("links", links)) if each}
    found: dict[str, Any] = {OWN_ANSWERS: {status: {"description": "The answer", **more}}}
    if queries:
        found["parameters"] = list(queries)
    return _with_bodies(found, [_schema(model) for model in body]) if body else found


def _one_of(schemas: Sequence[Schema]) -> Schema:
    return schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}


@functools.cache  # a schema takes 5 to 20 ms
def _schema(model: type[RequestModel]) -> Schema:
    return model.model_json_schema(ref_template=REFERENCE.replace("name", "model"))


def batched(chat: dict[str, Any]) -> dict[str, Any]:
    """The operation of a chat as that of batches: without the fields that they refuse, and with conversations in place
    of messages."""
    (schema,) = bodies(chat)
    properties = {name: each for name, each in schema["properties"].items() if name not in NOT_IN_BATCHES}
    properties["messages"] = {"type": "array", "minItems": 1, "items": properties["messages"]}
    return _with_bodies(chat, [{**schema, "properties": properties}])


def without_model(described: dict[str, Any]) -> dict[str, Any]:
    """An operation whose bodies may leave the model out."""
    schemas = [
        {**each, "required": [name for name in each["required"] if name != "model"]} for each in bodies(described)
    ]
    return _with_bodies(described, schemas)


def _with_bodies(described: dict[str, Any], schemas: Sequence[Schema]) -> dict[str, Any]:
    content = {"application/json": {"schema": _one_of(schemas)}}
    return {**described, "requestBody": {"required": True, "content": content}}


def describe(
    app: FastAPI, models: Sequence[str], open_paths: Iterable[str], num_tokens: int | None, *, needs_key: bool
) -> dict[str, Any]:
    """The description of the application's routes. `models`: the names that requests may use. `num_tokens`: of the
    vocabulary, if it is known."""
    found = get_openapi(
        title=app.title, version=version("kvrelay"), openapi_version="3.1.0", routes=app.routes, servers=app.servers
    )
    document: dict[str, Any] = orjson.loads(orjson.dumps(found))  # bodies are shared
    schemas = document["components"] = {"schemas": dict(_COMPONENTS)}
    for path, each in _operations(document):
        error = _OF_TYPE[answers.MessageError if is_anthropic(path) else answers.Error]
        refused = {"description": "An error", "content": {"application/json": {"schema": error}}}
        each["responses"] = {**each.pop(OWN_ANSWERS), "4XX": refused, "5XX": refused}
        for parameter in each.get("parameters", ()):
            if parameter["name"] == "session" and parameter["in"] == "path":
                parameter["schema"] = SESSION
        for body in bodies(each):
            schemas["schemas"] |= body.pop("$defs", {})
            model = body["properties"]["model"]
            _each_text(model)["enum"] = list(models)
        if needs_key and path not in open_paths:
            each["security"] = [{"bearer": []}]
    _complete(document, num_tokens)
    if needs_key:
        document["components"]["securitySchemes"] = {"bearer": {"type": "http", "scheme": "bearer"}}
    return document


def _complete(part: Any, num_tokens: int | None) -> None:
    """Adds what the types of requests and answers do not say: integers have 64 bits, token ids are in the vocabulary,
    and generators of clients want items of every list."""
    if isinstance(part, dict) and part.get("type") == "integer" and not part.keys() & {"maximum", "exclusiveMaximum"}:
        is_token = part.get("format") == TOKEN_SCHEMA["format"]
        part["maximum"] = num_tokens - 1 if is_token and num_tokens is not None else LARGEST
    if isinstance(part, dict) and part.get("type") == "array":
        part.setdefault("items", {})
    for each in part.values() if isinstance(part, dict) else part if isinstance(part, list) else ():
        _complete(each, num_tokens)


def _operations(document: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for each in methods.values():
            yield path, each


def bodies(operation: Mapping[str, Any]) -> list[Schema]:
    """The alternatives of an operation's body."""
    content = operation.get("requestBody", {}).get("content", {})
    schema = content.get("application/json", {}).get("schema")
    return [] if schema is None else schema.get("anyOf", [schema])


def _each_text(schema: Schema) -> Schema:
    return next(each for each in schema.get("anyOf", [schema]) if each.get("type") == "string")
