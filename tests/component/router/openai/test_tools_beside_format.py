"""Tools beside an output format, as agents with an output type send: outputs are calls or texts of the format."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from kvrelay.grammar.grammar_compiler import GrammarError
from kvrelay.grammar.llguidance_compiler import LLGuidanceCompiler
from kvrelay.protocol.sampling import Grammar
from kvrelay.text.service import TextService
from tests.component.router.rig import Router, running_router
from tests.component.router.tools import CALL, HELLO, PARAMETERS, THINKING, TOOL, sampling_of
from tests.fakes.text_model import byte_level_tokenizer, write_text_model

SCHEMA: Any = {"properties": {"legs": {"type": "integer"}}, "required": ["legs"], "additionalProperties": False}
SCHEMA |= {"type": "object"}
JSON_SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "weather"}}
OTHER: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
STRICT: Any = {"type": "function", "function": {**TOOL["function"], "strict": True}}
NOW = '<tool_call>\n{"name": "now", "arguments": {"zone": 7}}\n</tool_call>'
BAD_CALL = CALL.replace('"city"', '"town"')
GOOD, BAD = '{"legs": 4}', '{"legs": "four"}'


@pytest.fixture
async def router(tools_text: TextService) -> AsyncIterator[Router]:
    async with running_router(tools_text) as running:
        yield running


@pytest.fixture(scope="module")
def plain_text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextService]:
    """Of a model whose way of calling no grammar can write."""
    service = TextService.load(str(write_text_model(tmp_path_factory.mktemp("model"))))
    yield service
    service.close()


def allows(grammar: Grammar | None, text: str) -> bool:
    """Whether an output of the routers' model may be this text."""
    assert grammar is not None
    tokenizer = byte_level_tokenizer()
    end = tokenizer.token_to_id("<|im_end|>")
    assert end is not None
    compiler = LLGuidanceCompiler(tokenizer.to_str(), tokenizer.get_vocab_size(), [end])
    try:
        compiler.compile(grammar).accept([*tokenizer.encode(text, add_special_tokens=False).ids, end])
    except GrammarError:
        return False
    return True


async def grammar_of(router: Router, path: str = "/v1/chat/completions", **fields: Any) -> Grammar | None:
    return (await sampling_of(router, path, **fields)).grammar


async def test_auto_allows_calls_or_a_text_of_the_format(router: Router) -> None:
    for tools in ([STRICT, OTHER], [TOOL, OTHER]):
        grammar = await grammar_of(router, tools=tools, response_format=JSON_SCHEMA)
        for text in (GOOD, CALL, NOW, f"{CALL}\n{NOW}", THINKING + GOOD, THINKING + CALL):
            assert allows(grammar, text), text
        for text in (BAD, "It has four.", "", GOOD + CALL, f"It is.\n{CALL}", CALL.replace("weather", "other")):
            assert not allows(grammar, text), text
        assert allows(grammar, BAD_CALL) is (tools[0] is TOOL)
        assert grammar == await grammar_of(router, tools=tools, response_format=JSON_SCHEMA)  # compiled once


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"response_format": {"type": "json_object"}}, '{"a": []}', "[]"),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": ""}, '{"legs":4}', GOOD),
        ({"guided_regex": "[0-9]+ legs"}, "4 legs", "four legs"),
        ({"guided_choice": ["four", "six\n"]}, "six\n", "six"),
        ({"guided_grammar": 'start: "a" b\nb: "b"+'}, "abb", "ba"),
    ],
)
async def test_every_constraint_stands_beside_calls(router: Router, fields: Any, good: str, bad: str) -> None:
    grammar = await grammar_of(router, tools=[STRICT, OTHER], **fields)
    assert allows(grammar, good) and not allows(grammar, bad)
    assert allows(grammar, CALL) and not allows(grammar, BAD_CALL)


async def test_which_tools_and_how_many(router: Router) -> None:
    fields: dict[str, Any] = {"tools": [TOOL, OTHER], "response_format": JSON_SCHEMA}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
    grammar = await grammar_of(router, **fields, tool_choice=allowed)
    assert allows(grammar, GOOD) and allows(grammar, CALL) and not allows(grammar, NOW)
    grammar = await grammar_of(router, **fields, parallel_tool_calls=False)
    assert allows(grammar, GOOD) and allows(grammar, CALL) and not allows(grammar, f"{CALL}\n{CALL}")
    grammar = await grammar_of(router, **fields, tool_choice="none")
    assert allows(grammar, GOOD) and not allows(grammar, CALL)


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_required_call_leaves_the_format_aside(router: Router, choice: Any) -> None:
    alone = await grammar_of(router, tools=[TOOL], tool_choice=choice)
    assert alone == await grammar_of(router, tools=[TOOL], tool_choice=choice, response_format=JSON_SCHEMA)
    assert not allows(alone, GOOD)


async def test_the_other_apis_ask_for_the_same(router: Router) -> None:
    function = TOOL["function"]
    text_format = {"format": {"type": "json_schema", "name": "animal", "schema": SCHEMA}}
    response_tool = {"type": "function", **function}
    message_format = {"format": {"type": "json_schema", "schema": SCHEMA}}
    message_tool = {"name": "weather", "description": "Looks.", "input_schema": PARAMETERS}
    for chat, response, message in (
        ("auto", "auto", {"type": "auto"}),
        ("required", "required", {"type": "any"}),
        (NAMED, {"type": "function", "name": "weather"}, {"type": "tool", "name": "weather"}),
    ):
        expected = await grammar_of(router, tools=[TOOL], tool_choice=chat, response_format=JSON_SCHEMA)
        for path, fields in (
            ("/v1/responses", {"input": "hi", "tools": [response_tool], "tool_choice": response, "text": text_format}),
            (
                "/v1/messages",
                {"max_tokens": 99, "tools": [message_tool], "tool_choice": message, "output_config": message_format},
            ),
        ):
            assert await grammar_of(router, path, **fields) == expected, path


async def test_a_structural_tag_is_of_the_whole_output(router: Router) -> None:
    tag = {"format": {"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}}
    grammar = await grammar_of(router, tools=[TOOL], structural_tag=tag)
    assert allows(grammar, "<a>x</a>") and not allows(grammar, CALL)


async def test_errors_name_the_tool_or_the_format(router: Router) -> None:
    broken = {"name": "broken", "strict": True, "parameters": {"properties": {"a": {"$ref": "#/$defs/missing"}}}}
    tools = [TOOL, {"type": "function", "function": broken}]
    bad_format = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "string", "pattern": "("}}}
    for fields, param, said in (
        ({"tools": tools, "response_format": JSON_SCHEMA}, "tools", "'broken'"),
        ({"tools": [TOOL], "response_format": bad_format}, "response_format.json_schema.schema", ""),
    ):
        answer = await router.post("/v1/chat/completions", messages=HELLO, **fields)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"].startswith(param.split(".")[0]) and said in error["message"], error


async def test_a_model_whose_calls_are_not_known_says_so(plain_text: TextService) -> None:
    async with running_router(plain_text) as router:
        answer = await router.post("/v1/chat/completions", messages=HELLO, tools=[TOOL], response_format=JSON_SCHEMA)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, "tools", "unsupported_parameter")
        assert "--tool-parser" in error["message"]


QUOTED = json.dumps({"legs": 4, "said": CALL})


@pytest.mark.parametrize("output", [GOOD, QUOTED, CALL, f"{CALL}\n{NOW}", THINKING + GOOD, THINKING + CALL])
async def test_streams_say_what_whole_answers_say(router: Router, output: str) -> None:
    router.answers(output)
    fields: dict[str, Any] = {"messages": HELLO, "tools": [TOOL, OTHER], "response_format": JSON_SCHEMA}
    (choice,) = (await router.post("/v1/chat/completions", **fields)).json()["choices"]
    message, text = choice["message"], output.removeprefix(THINKING)
    is_text = text.startswith("{")
    assert message["content"] == (text if is_text else None)
    calls = message.get("tool_calls", [])
    num_calls = 0 if is_text else text.count("<tool_call>")
    assert [call["function"]["name"] for call in calls] == ["weather", "now"][:num_calls]
    assert choice["finish_reason"] == ("stop" if is_text else "tool_calls")
    chunks = await router.events("/v1/chat/completions", **fields)
    deltas = [each["choices"][0]["delta"] for each in chunks if each["choices"]]
    assert "".join(delta.get("content") or "" for delta in deltas) == (message["content"] or "")
    arguments = ["" for _ in calls]
    for delta in deltas:
        for part in delta.get("tool_calls") or []:
            arguments[part["index"]] += part["function"].get("arguments") or ""
    assert arguments == [call["function"]["arguments"] for call in calls]


class Animal(BaseModel):
    legs: int


class Weather(BaseModel):
    city: str


@pytest.mark.parametrize("stream", [False, True])
async def test_openais_package_parses_both(router: Router, stream: bool) -> None:
    fields: dict[str, Any] = {"model": "test-model", "messages": HELLO, "response_format": Animal}
    fields["tools"] = [openai.pydantic_function_tool(Weather, name="weather")]

    async def message() -> Any:
        if not stream:
            return (await router.openai.chat.completions.parse(**fields)).choices[0].message
        async with router.openai.chat.completions.stream(**fields) as events:
            return (await events.get_final_completion()).choices[0].message

    router.answers(GOOD)
    assert (await message()).parsed == Animal(legs=4)
    router.answers(CALL)
    called = await message()
    assert called.parsed is None
    assert called.tool_calls[0].function.parsed_arguments == Weather(city='Zürich "🦦"')


async def test_openais_package_parses_responses(router: Router) -> None:
    fields: dict[str, Any] = {"model": "test-model", "input": "hi", "text_format": Animal}
    fields["tools"] = [openai.pydantic_function_tool(Weather, name="weather")["function"] | {"type": "function"}]
    router.answers(GOOD)
    assert (await router.openai.responses.parse(**fields)).output_parsed == Animal(legs=4)
    router.answers(CALL)
    (call,) = (await router.openai.responses.parse(**fields)).output
    assert call.type == "function_call" and call.parsed_arguments == {"city": 'Zürich "🦦"'}
