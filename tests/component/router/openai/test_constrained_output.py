"""Every form of a constraint that clients send reaches dispatch as the same grammar."""

from __future__ import annotations

import json
from typing import Any

import pydantic
import pytest

from kvrelay.protocol.sampling import Grammar, GrammarKind
from tests.component.router.rig import MODEL, Router

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}]}
TRIGGERED = {
    "type": "triggered_tags",
    "triggers": ["<f"],
    "tags": [{"begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}],
}
TRIGGERED_GRAMMAR = Grammar(
    kind=GrammarKind.STRUCTURAL_TAG, text=json.dumps({"format": TRIGGERED}, separators=(",", ":"))
)
AS_JSON = Grammar(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(SCHEMA, separators=(",", ":")))
ANY_OBJECT = Grammar(kind=GrammarKind.JSON_SCHEMA, text='{"type":"object"}')
CHOICE = Grammar(kind=GrammarKind.CHOICE, text='["yes","no"]')
CLOSED = Grammar(kind=AS_JSON.kind, text=AS_JSON.text[:-1] + ',"additionalProperties":false}')
NAMED_SO: dict[str, Any] = {"properties": {"properties": {"enum": [{"properties": 1}]}}}
NAMED_SO_CLOSED = Grammar(
    kind=AS_JSON.kind, text=json.dumps(NAMED_SO | {"additionalProperties": False}, separators=(",", ":"))
)
LARK = Grammar(kind=GrammarKind.GRAMMAR, text='start: "a"')
COMPACT = Grammar(kind=GrammarKind.JSON_SCHEMA, text=AS_JSON.text, whitespace="")
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}

FORMS: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, ANY_OBJECT),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}},
        CLOSED,
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, AS_JSON),
    ({"guided_json": SCHEMA}, AS_JSON),
    ({"guided_json": AS_JSON.text}, AS_JSON),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": ""}, COMPACT),
    ({"guided_json": SCHEMA, "whitespace_pattern": ""}, COMPACT),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": "", "whitespace_pattern": " "}, COMPACT),
    (
        {
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
            "guided_whitespace_pattern": "",
        },
        COMPACT,
    ),
    ({"structured_outputs": {"json": SCHEMA}, "guided_whitespace_pattern": ""}, COMPACT),
    ({"structured_outputs": {"json": SCHEMA, "whitespace_pattern": ""}, "guided_whitespace_pattern": " "}, COMPACT),
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
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True, "disable_fallback": True}}, COMPACT),
    ({"structured_outputs": {"json": AS_JSON.text, "disable_additional_properties": True}}, CLOSED),
    ({"structured_outputs": {"json": NAMED_SO, "disable_additional_properties": True}}, NAMED_SO_CLOSED),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, AS_JSON),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, AS_JSON),
    # The types of TGI and of Hugging Face's client.
    ({"response_format": {"type": "json_object", "value": SCHEMA}}, AS_JSON),
    ({"response_format": {"type": "json", "value": SCHEMA}}, AS_JSON),
    ({"response_format": {"type": "json", "value": AS_JSON.text}}, AS_JSON),
    ({"response_format": {"type": "json_schema", "value": {"name": "x", "schema": SCHEMA}}}, AS_JSON),
    ({"response_format": {"type": "regex", "value": "a+"}}, Grammar(kind=GrammarKind.REGEX, text="a+")),
    ({"response_format": {"type": "json_object", "json_schema": {"name": "x", "schema": SCHEMA}}}, AS_JSON),
    ({"response_format": {"type": "json_object", "value": None, "schema": None}}, ANY_OBJECT),
    # One constraint, given twice.
    ({"structured_outputs": {"grammar": LARK.text}, "guided_grammar": LARK.text}, LARK),
    ({"guided_json": SCHEMA, "json_schema": json.dumps(SCHEMA)}, AS_JSON),
    ({"structured_outputs": {"choice": ["yes", "no"]}, "guided_choice": ["no", "yes"]}, CHOICE),
    ({"structured_outputs": {"json_object": True, "json": {"type": "object"}}}, ANY_OBJECT),
    ({"response_format": {"type": "json_object"}, "guided_json_object": True}, ANY_OBJECT),
    ({"structural_tag": TAG, "response_format": {"type": "structural_tag", "format": TRIGGERED}}, TRIGGERED_GRAMMAR),
    # Options of another constraint.
    ({**FORMAT, "structured_outputs": {"whitespace_pattern": ""}}, COMPACT),
    ({**FORMAT, "structured_outputs": {"disable_any_whitespace": True, "json": None}}, COMPACT),
    ({**FORMAT, "structured_outputs": {"disable_additional_properties": True}}, CLOSED),
    ({"guided_json": SCHEMA, "structured_outputs": {"disable_additional_properties": True}}, CLOSED),
    (
        {"guided_regex": "a+", "structured_outputs": {"whitespace_pattern": ""}},
        Grammar(kind=GrammarKind.REGEX, text="a+"),
    ),
    (
        {"structural_tag": TAG, "structured_outputs": {"whitespace_pattern": ""}},
        Grammar(kind=GrammarKind.STRUCTURAL_TAG, text=TRIGGERED_GRAMMAR.text, whitespace=""),
    ),
    (
        {"structural_tag": TAG, "structured_outputs": {"disable_additional_properties": True}},
        Grammar(kind=GrammarKind.STRUCTURAL_TAG, text=TRIGGERED_GRAMMAR.text.replace(AS_JSON.text, CLOSED.text)),
    ),
    ({"guided_grammar": '?start: "a"'}, Grammar(kind=GrammarKind.GRAMMAR, text='?start: "a"')),
    (
        {"response_format": {"type": "structural_tag", "format": {"type": "any_text"}}},
        Grammar(kind=GrammarKind.STRUCTURAL_TAG, text='{"format":{"type":"any_text"}}'),
    ),
    ({"response_format": {"type": "structural_tag", **TAG}}, TRIGGERED_GRAMMAR),
    ({"structural_tag": json.dumps(TAG)}, TRIGGERED_GRAMMAR),
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


@pytest.mark.parametrize("depth", [100, 250, 450])
@pytest.mark.parametrize("form", ["guided_json", "structured_outputs", "response_format", "structural_tag", "input"])
async def test_a_schema_that_is_nested_deeply_is_followed_or_refused(router: Router, form: str, depth: int) -> None:
    """As deep as a body can be read, which is deeper than JSON is written."""
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"items": schema}
    described = {"type": "json_schema", "name": "x", "schema": schema}
    of_form: dict[str, dict[str, Any]] = {
        "guided_json": {"guided_json": schema},
        "structured_outputs": {"structured_outputs": {"json": schema, "disable_additional_properties": True}},
        "response_format": {"response_format": {"type": "json_schema", "json_schema": described}},
        "structural_tag": {"structural_tag": TAG | {"structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}]}},
        "input": {"input": "hi", "text": {"format": described}},
    }
    body = {"model": MODEL, **of_form[form]}
    if form == "input":
        answer = await router.http.post("/v1/responses", json=body)
    else:
        answer = await router.http.post("/v1/completions", json={"prompt": "hi", **body})
    if answer.status_code == 200:
        assert depth < 120
        return
    assert answer.status_code == 400, answer.text
    assert "nested too deeply" in answer.json()["error"]["message"]
    assert not router.dispatcher.requests


@pytest.mark.parametrize(
    ("tag", "reason"),
    [
        ({"triggers": ["<"]}, "structures"),
        ({"triggers": ["<"], "structures": []}, "at least one"),
        ({"triggers": ["<"], "structures": [{"begin": "<", "end": ""}]}, "schema"),
        ({"triggers": ["<"], "structures": [{"begin": "(", "schema": {}, "end": ""}]}, "no trigger"),
        ({"triggers": ["<"], "structures": [{"begin": "<", "schema": {}}]}, "'end'"),
        ("{", "JSON"),
        ("7", "object"),
    ],
)
async def test_a_malformed_structural_tag_is_refused(router: Router, tag: Any, reason: str) -> None:
    answer = await router.http.post("/v1/completions", json={"model": MODEL, "prompt": "hi", "structural_tag": tag})
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"], answer.text
    assert not router.dispatcher.requests


class Animal(pydantic.BaseModel):
    name: str
    age: int


@pytest.mark.parametrize("streamed", [False, True])
async def test_the_openai_client_parses_an_answer_for_a_pydantic_model(router: Router, streamed: bool) -> None:
    router.answers('{"name": "an otter", "age": 7}')
    asked: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "?"}], "response_format": Animal}
    if streamed:
        async with router.openai.chat.completions.stream(**asked) as stream:
            answer = await stream.get_final_completion()
    else:
        answer = await router.openai.chat.completions.parse(**asked)
    assert answer.choices[0].message.parsed == Animal(name="an otter", age=7)
    (request,) = router.dispatcher.requests
    schema = Animal.model_json_schema() | {"additionalProperties": False}  # which the client adds
    assert request.sampling.grammar is not None and json.loads(request.sampling.grammar.text) == schema


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_limits_of_tokens_reach_dispatch_with_a_grammar(router: Router, path: str) -> None:
    """A bad word is spelled as at the beginning of a text and, if its space is no token of its own, behind a space."""
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    fields = {"guided_regex": "a+", "logit_bias": {"5": 1}, "allowed_token_ids": [7, 5, 7]}
    words = ["the", " the", "otters"]
    answer = await router.post(path, **prompt, **fields, bad_words=words)
    assert answer.status_code == 200, answer.text
    (request,) = router.dispatcher.requests
    sampling = request.sampling
    assert sampling.grammar == Grammar(kind=GrammarKind.REGEX, text="a+")
    assert (sampling.allowed_token_ids, sampling.logit_bias) == ((7, 5), {5: 1.0})
    expected = []
    for word in ("the", "otters"):
        bare, spaced = router.tokens(word), router.tokens(" " + word)
        expected += [bare, spaced] if len(bare) == len(spaced) and bare[0] != spaced[0] else [bare]
    assert [list(word) for word in sampling.bad_words] == expected


async def test_bad_words_that_forbid_all_allowed_tokens_are_refused(router: Router) -> None:
    (token_id,) = router.tokens("a")
    answer = await router.post("/v1/completions", prompt="hi", allowed_token_ids=[token_id], bad_words=["a"])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "bad_words")
    assert not router.dispatcher.requests


async def test_ignore_eos_lets_a_grammar_end_where_nothing_else_is_left(router: Router) -> None:
    answer = await router.post("/v1/completions", prompt="hi", guided_regex="a{3}", ignore_eos=True, max_tokens=9)
    assert answer.status_code == 200
    (request,) = router.dispatcher.requests
    assert (request.sampling.ignore_eos, request.sampling.min_tokens) == (False, 9)


IDS = [1234567890123456789, 1234567890123456790]


@pytest.mark.parametrize("number", [*IDS, 2**63, 2**64 - 1, -(2**63)])
@pytest.mark.parametrize("form", ["guided_json", "response_format", "structural_tag", "text", "output_config"])
async def test_an_integer_of_64_bits_reaches_the_grammar_as_it_is(router: Router, form: str, number: int) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [number]}}, "required": ["a"]}
    status, text = await _constrained(router, form, schema)
    assert status == 200, text
    (request,) = router.dispatcher.requests
    assert request.sampling.grammar is not None and f'{{"enum":[{number}]}}' in request.sampling.grammar.text


@pytest.mark.parametrize("keyword", ["const", "minimum"])
@pytest.mark.parametrize("form", ["guided_json", "response_format", "structural_tag", "text", "output_config"])
async def test_an_integer_of_more_bits_is_refused(router: Router, form: str, keyword: str) -> None:
    schema = {"type": "object", "properties": {"a": {keyword: 2**64 + 1}}, "required": ["a"]}
    status, text = await _constrained(router, form, schema)
    assert status == 400 and "64 bits" in text, text
    assert not router.dispatcher.requests


async def _constrained(router: Router, form: str, schema: dict[str, Any]) -> tuple[int, str]:
    described = {"type": "json_schema", "name": "x", "schema": schema}
    tag = {"type": "json_schema", "json_schema": schema}
    paths = {"text": "/v1/responses", "output_config": "/v1/messages"}
    of_form: dict[str, Any] = {
        "guided_json": {"guided_json": schema},
        "response_format": {"response_format": described},
        "structural_tag": {"structural_tag": {"format": tag}},
        "text": {"input": "hi", "text": {"format": described}},
        "output_config": {"output_config": {"format": described}, "max_tokens": 9},
    }
    prompts: dict[str, Any] = {"text": {}, "output_config": {"messages": [{"role": "user", "content": "hi"}]}}
    body = {"model": MODEL, **prompts.get(form, {"prompt": "hi"}), **of_form[form]}
    headers = {"content-type": "application/json"}
    # The client's own encoder would refuse more than 64 bits.
    answer = await router.http.post(paths.get(form, "/v1/completions"), content=json.dumps(body), headers=headers)
    return answer.status_code, answer.text


async def test_a_schema_beside_a_json_object_of_responses_is_followed(router: Router) -> None:
    body = {"model": MODEL, "input": "hi", "text": {"format": {"type": "json_object", "schema": SCHEMA}}}
    answer = await router.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    (request,) = router.dispatcher.requests
    assert request.sampling.grammar == AS_JSON
