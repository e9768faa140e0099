"""No message repeats a client's value whole: each position of each API's description with a text of half a megabyte."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest

from kvrelay.text.service import TextService
from tests.component.router.rig import MODEL, Router
from tests.component.router.test_error_forms import BODIES

LONG = "otter" * 100_000
MOST_BYTES = 1500
"""Of an error's whole body."""
MAX_DEPTH = 9

Place = Callable[[Any], Any]
"""Puts a value into a body."""


@pytest.fixture
def text(tools_text: TextService) -> TextService:
    """Of the router: also what is about tools is reached."""
    return tools_text


def resolved(schema: Any, document: dict[str, Any]) -> Any:
    while isinstance(schema, dict) and "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[-1]]
    return schema


def branches(schema: Any, document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The schema without references and alternatives."""
    schema = resolved(schema, document)
    if not isinstance(schema, dict):
        return
    alternatives = [each for name in ("anyOf", "oneOf", "allOf") for each in schema.get(name, ())]
    if "properties" in schema or "items" in schema or not alternatives:
        yield schema
    for each in alternatives:
        yield from branches(each, document)


def example(schema: Any, document: dict[str, Any], depth: int = 0) -> Any:
    """A small value of the schema."""
    schema = resolved(schema, document)
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return None
    for name in ("anyOf", "oneOf", "allOf"):
        if name in schema and "properties" not in schema:
            return example(schema[name][0], document, depth)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    match schema.get("type"):
        case "object":
            properties = schema.get("properties", {})
            return {name: example(properties.get(name), document, depth + 1) for name in schema.get("required", ())}
        case "array":
            return [example(schema.get("items"), document, depth + 1)] if schema.get("minItems") else []
        case "string":
            return "x"
        case "integer" | "number":
            return schema.get("minimum", 1)
        case "boolean":
            return False
    return None


def in_list(place: Place) -> Place:
    return lambda value: [place(value)]


def in_object(around: dict[str, Any], name: str, place: Place) -> Place:
    return lambda value: {**deepcopy(around), name: place(value)}


def as_key(around: dict[str, Any]) -> Place:
    return lambda value: {**around, value: 1} if isinstance(value, str) else around


def places(schema: Any, document: dict[str, Any], depth: int = 0) -> Iterator[tuple[str, Place]]:
    """Every position of a value below the schema, and each map's keys. What is around it is an example."""
    for branch in branches(schema, document):
        yield "", lambda value: value
        if depth > MAX_DEPTH:
            return
        if branch.get("type") == "array":
            for name, place in places(branch.get("items"), document, depth + 1):
                yield f"[]{name}", in_list(place)
        if branch.get("type") != "object":
            continue
        around = example(branch, document, depth)
        yield ".KEY", as_key(around)
        for name, part in branch.get("properties", {}).items():
            for more, place in places(part, document, depth + 1):
                yield f".{name}{more}", in_object(around, name, place)


def test_positions_and_examples_of_a_schema() -> None:
    document = {"components": {"schemas": {"A": {"type": "object", "properties": {"b": {"type": "string"}}}}}}
    schema = {"type": "array", "items": {"anyOf": [{"$ref": "#/components/schemas/A"}, {"type": "null"}]}}
    found = {name: place("v") for name, place in places(schema, document)}
    assert found == {"": "v", "[]": ["v"], "[].KEY": [{"v": 1}], "[].b": [{"b": "v"}]}


async def test_no_error_repeats_a_long_value(router: Router) -> None:
    document = (await router.http.get("/openapi.json")).json()
    num_refused = 0
    for path, methods in document["paths"].items():
        if "requestBody" not in methods.get("post", {}):
            continue
        schema = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
        seen = set()
        for name, place in places(schema, document):
            key = json.dumps(place("LONG"))
            if key in seen or not isinstance(body := place(LONG), dict):
                continue
            seen.add(key)
            whole = {"model": MODEL, **BODIES[path], **body}
            answer = await router.http.post(path, json=whole)
            assert answer.status_code < 500, (path, name, answer.text[:500])
            if answer.status_code >= 400:
                num_refused += 1
                assert len(answer.content) <= MOST_BYTES, (path, name, answer.text[:300])
    assert num_refused > 200


LONG_PATH = "x" * 20_000


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", f"/{LONG_PATH}"),
        ("PUT", f"/requests/{LONG_PATH}"),
        ("GET", f"/requests/{LONG_PATH}"),
        ("GET", f"/requests/{LONG_PATH}/timeline"),
        ("GET", f"/v1/models/{LONG_PATH}"),
        ("GET", f"/v1/responses/{LONG_PATH}"),
        ("DELETE", f"/v1/responses/{LONG_PATH}"),
        ("GET", f"/v1/responses/{LONG_PATH}/input_items"),
        ("GET", f"/v1/responses/x/input_items?after={LONG_PATH}&limit={LONG_PATH}"),
        ("DELETE", f"/sessions/{LONG_PATH}"),
        ("DELETE", f"/sessions?session={LONG_PATH}"),
    ],
)
async def test_no_error_repeats_a_long_path(router: Router, method: str, path: str) -> None:
    answer = await router.http.request(method, path)
    assert 400 <= answer.status_code < 500 and len(answer.content) <= MOST_BYTES, answer.text[:300]


HEADERS = (
    "x-request-id",
    "x-request-timeout",
    "x-kvrelay-session",
    "x-kvrelay-route",
    "content-encoding",
    "traceparent",
)


@pytest.mark.parametrize("header", HEADERS)
async def test_no_answer_repeats_a_long_header(router: Router, header: str) -> None:
    answer = await router.http.post("/v1/completions", content=b"{", headers={header: LONG_PATH})
    other = await router.http.post("/v1/completions", json={"model": MODEL, "prompt": "x"}, headers={header: LONG_PATH})
    for each in (answer, other):
        assert each.status_code < 500 and sum(len(value) for value in each.headers.values()) < 5000
        assert each.status_code < 400 or len(each.content) <= MOST_BYTES
