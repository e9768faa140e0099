"""Every form of a constraint that clients send reaches dispatch as the same grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrelay.protocol.grammar import Grammar, GrammarKind
from tests.component.router.rig import MODEL, Router

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]}
AS_JSON = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(SCHEMA, separators=(",", ":")))
ANY_OBJECT = Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"type":"object"}')
CHOICE = Grammar(kind=GrammarKind.CHOICE, text='["yes","no"]')
LARK = Grammar(kind=GrammarKind.GRAMMAR, text='start: "a"')
COMPACT = Grammar(kind=GrammarKind.JSON_SCHEMA, text=AS_JSON.text, whitespace="")

FORMS: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
        AS_JSON,
    ),
    ({"guided_json": SCHEMA}, AS_JSON),
    ({"guided_json": AS_JSON.text}, AS_JSON),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": ""}, COMPACT),
    ({"json_schema": AS_JSON.text}, AS_JSON),
    ({"guided_json_object": True}, ANY_OBJECT),
    ({"guided_json_object": False, "guided_json": None, "guided_choice": [], "guided_regex": ""}, None),
    ({"guided_regex": "a+"}, Grammar(kind=GrammarKind.REGEX, text="a+")),
    ({"regex": "a+"}, Grammar(kind=GrammarKind.REGEX, text="a+")),
    ({"guided_choice": ["yes", "no", "yes"]}, CHOICE),
    ({"guided_grammar": LARK.text}, LARK),
    ({"ebnf": LARK.text}, LARK),
    ({"structured_outputs": {"json": SCHEMA}}, AS_JSON),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": ""}}, COMPACT),
    ({"structured_outputs": {"choice": ["yes", "no"], "regex": None}}, CHOICE),
    ({"structured_outputs": {"json_object": True}}, ANY_OBJECT),
    (
        {"response_format": {"type": "structural_tag", **TAG}},
        Grammar(
            kind=GrammarKind.STRUCTURAL_TAG, text=json.dumps({"type": "structural_tag", **TAG}, separators=(",", ":"))
        ),
    ),
    ({"structural_tag": json.dumps(TAG)}, Grammar(kind=GrammarKind.STRUCTURAL_TAG, text=json.dumps(TAG))),
]


@pytest.mark.parametrize(("fields", "grammar"), FORMS, ids=[json.dumps(fields)[:60] for fields, _ in FORMS])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_form_of_each_server(
    router: Router, path: str, fields: dict[str, Any], grammar: Grammar | None
) -> None:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    answer = await router.http.post(path, json={"model": MODEL, **prompt, **fields})
    assert answer.status_code == 200, answer.text
    (request,) = router.dispatcher.requests
    assert request.sampling.grammar == grammar


async def test_an_error_names_what_the_library_says(router: Router) -> None:
    body = {"model": MODEL, "prompt": "hi", "guided_json": {"type": "object", "not": {}}}
    answer = await router.http.post("/v1/completions", json=body)
    assert answer.status_code == 400 and "not" in answer.json()["error"]["message"]
    assert not router.dispatcher.requests
