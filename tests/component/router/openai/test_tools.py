"""Tool calls and reasoning in chat completions, as the stock client sees them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrelay.protocol.sampling import FinishReason
from kvrelay.text.service import TextService
from tests.component.router.rig import MODEL, Router
from tests.component.router.tools import ARGUMENTS, CALL, HELLO, THINKING, TOOL
from tests.fakes.scripted_dispatcher import Script


@pytest.fixture
def text(tools_text: TextService) -> TextService:
    """Of the router."""
    return tools_text


def options(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HELLO, "tools": [TOOL], **fields}


async def test_a_call(router: Router) -> None:
    router.answers(f"{THINKING}I look. {CALL}\n{CALL}")
    answer = await router.openai.chat.completions.create(**options())
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "I look."
    message = choice.message.model_dump()
    assert message["reasoning_content"] == message["reasoning"] == "Hm 🦦"
    first, second = choice.message.tool_calls or []
    assert first.type == "function" and first.id != second.id
    assert (first.function.name, first.function.arguments) == ("weather", ARGUMENTS)


async def test_a_stream_says_what_the_whole_answer_says(router: Router) -> None:
    router.answers(f"{THINKING}I look. {CALL}\n{CALL}")
    chunks = [chunk async for chunk in await router.openai.chat.completions.create(**options(stream=True))]
    deltas = [chunk.choices[0].delta.model_dump(exclude_unset=True) for chunk in chunks]
    for name in ("reasoning_content", "reasoning"):
        assert "".join([each.get(name, "") for each in deltas]) == "Hm 🦦"
    assert "".join([each.get("content") or "" for each in deltas]) == "I look."
    calls: dict[int, Any] = {}
    for call in [call for each in deltas for call in each.get("tool_calls", [])]:
        if "id" in call:
            assert call["index"] not in calls and call["type"] == "function"
            calls[call["index"]] = {"name": call["function"]["name"], "arguments": ""}
        calls[call["index"]]["arguments"] += call["function"]["arguments"]
    assert calls == {index: {"name": "weather", "arguments": ARGUMENTS} for index in (0, 1)}
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "tool_calls"


async def test_only_the_first_call_if_they_must_not_be_parallel(router: Router) -> None:
    router.answers(CALL + CALL)
    answer = await router.openai.chat.completions.create(**options(parallel_tool_calls=False))
    assert len(answer.choices[0].message.tool_calls or []) == 1


@pytest.mark.parametrize("fields", [{"tools": None}, {"tool_choice": "none"}])
async def test_without_tools_a_call_is_text(router: Router, fields: dict[str, Any]) -> None:
    router.answers(CALL)
    answer = await router.post("/v1/chat/completions", **options(**fields))
    message = answer.json()["choices"][0]["message"]
    assert message["content"] == CALL and "tool_calls" not in message
    assert router.dispatcher.requests[0].prompt_ids == router.tokens(
        "<|im_start|>user\nWeather in Zürich?<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_reasoning_can_be_left_out(router: Router) -> None:
    router.answers(f"{THINKING}It rains.")
    answer = (await router.post("/v1/chat/completions", **options(include_reasoning=False))).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "It rains.", "refusal": None}
    streamed = await router.http.post("/v1/chat/completions", json=options(include_reasoning=False, stream=True))
    assert "Hm" not in streamed.text and "reasoning" not in streamed.text


@pytest.mark.parametrize("per_delta", [1, 1000])
async def test_reasoning_can_be_a_part_of_the_content(router: Router, per_delta: int) -> None:
    router.answers(f"{THINKING}It rains.{CALL}", per_delta=per_delta)
    joined = options(separate_reasoning=False)
    answer = (await router.post("/v1/chat/completions", **joined)).json()
    message = answer["choices"][0]["message"]
    assert message["content"] == f"{THINKING}It rains." and "reasoning_content" not in message
    assert message["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    chunks = [
        chunk
        async for chunk in await router.openai.chat.completions.create(
            model=MODEL,
            messages=joined["messages"],
            tools=joined["tools"],
            stream=True,
            extra_body={"separate_reasoning": False},
        )
    ]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == message["content"]


@pytest.mark.parametrize("fields", [{}, {"response_format": {"type": "json_object"}}])
async def test_a_call_that_joined_reasoning_quotes_is_none(router: Router, fields: dict[str, Any]) -> None:
    output = f"<think>\nNot {CALL}.\n</think>\n\n" + "{}"
    router.answers(output, per_delta=3)
    joined = options(separate_reasoning=False, **fields)
    (choice,) = (await router.post("/v1/chat/completions", **joined)).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (output, "stop")
    chunks = await router.events("/v1/chat/completions", **joined)
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == output


async def test_hidden_reasoning_is_no_part_of_the_content(router: Router) -> None:
    router.answers(f"{THINKING}It rains.")
    fields = options(include_reasoning=False, separate_reasoning=False)
    answer = (await router.post("/v1/chat/completions", **fields)).json()
    assert answer["choices"][0]["message"]["content"] == "It rains."


async def test_several_choices_are_parsed_apart(router: Router) -> None:
    texts = [CALL, f"{THINKING}It rains.", "It is sunny."]
    router.dispatcher.script = lambda request, sequence: Script([*router.tokens(texts[sequence]), 2])
    answer = await router.openai.chat.completions.create(**options(n=3))
    assert [choice.finish_reason for choice in answer.choices] == ["tool_calls", "stop", "stop"]
    assert [choice.message.content for choice in answer.choices] == [None, "It rains.", "It is sunny."]


async def test_a_call_that_is_cut_ends_with_length(router: Router) -> None:
    tokens = router.tokens(CALL)[:-30]
    router.dispatcher.script = lambda request, sequence: Script(tokens, FinishReason.LENGTH)
    answer = await router.openai.chat.completions.create(**options())
    (call,) = answer.choices[0].message.tool_calls or []
    assert answer.choices[0].finish_reason == "length" and ARGUMENTS.startswith(call.function.arguments)


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_and_logprobs_are_those_of_all_tokens(router: Router, stream: bool) -> None:
    router.answers(f"{THINKING}{CALL}")
    fields = options(logprobs=True, stream=stream, extra_body={"return_token_ids": True})
    if stream:
        chunks = [chunk.model_dump() async for chunk in await router.openai.chat.completions.create(**fields)]
        found = [chunk["choices"][0] for chunk in chunks[1:]]
    else:
        found = [(await router.openai.chat.completions.create(**fields)).model_dump()["choices"][0]]
    ids = [token for each in found for token in each["token_ids"]]
    assert ids == [*router.tokens(f"{THINKING}{CALL}"), *router.tokens("<|im_end|>")]
    assert sum(len(each["logprobs"]["content"]) for each in found) == len(ids)


async def test_stop_strings_are_searched_in_the_content_alone(router: Router) -> None:
    router.answers(f"{THINKING}I look. {CALL}")
    answer = await router.openai.chat.completions.create(**options(stop=["Zürich", "Hm"]))
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.arguments == ARGUMENTS and answer.choices[0].finish_reason == "tool_calls"
    answer = await router.openai.chat.completions.create(**options(stop=["look"]))
    (choice,) = answer.choices
    assert choice.message.content == "I " and not choice.message.tool_calls
    assert choice.finish_reason == "stop" and choice.model_dump()["stop_reason"] == "look"


async def test_tools_and_calls_reach_the_template(router: Router) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    history = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    history += [{"role": "tool", "tool_call_id": "c1", "content": "rain"}]
    answer = await router.post("/v1/chat/completions", **options(messages=history))
    assert answer.status_code == 200, answer.text
    prompt = router.text.tokenizer.decode(router.dispatcher.requests[0].prompt_ids, skip_special_tokens=False)
    assert json.dumps(TOOL, ensure_ascii=False) in prompt and '[Zürich "🦦"]' in prompt and "rain" in prompt


async def test_unusual_schemas_are_taken(router: Router) -> None:
    """Earlier drafts, OpenAPI, keywords of others, and `null` for what is not set."""
    schema: dict[str, Any] = {
        "type": "object",
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": None,
        "properties": {
            "type": {"type": "string", "format": "date", "nullable": True, "default": None, "minLength": 1.0},
            "items": {"type": "array", "items": [{"type": "integer"}, True], "additionalItems": False},
            "a": True,
            "b": {},
            "c": {"enum": [None, 1, "x"], "description": None, "exclusiveMinimum": True, "required": None},
            "d": {"$ref": "#/definitions/e"},
        },
        "definitions": {"e": {"anyOf": [{"type": "null"}, {"const": {"type": "strnig"}}]}},
        "required": [],
        "additionalProperties": {"type": "number", "x-unit": "m"},
    }
    nothing: dict[str, Any] = {"type": "object", "properties": None, "required": None}
    tools = [
        {"type": "function", "function": {"name": f"f{number}", "parameters": parameters}}
        for number, parameters in enumerate((schema, nothing, None))
    ]
    for body in ({"tools": tools, "tool_choice": "none"}, {"tools": tools[1:], "tool_choice": "required"}):
        answer = await router.http.post("/v1/chat/completions", json=options(**body))
        assert answer.status_code == 200, answer.text


async def test_calls_of_different_turns_may_have_one_id(router: Router) -> None:
    call = {"id": "functions.weather:0", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
    turn: list[Any] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "rain"},
    ]
    nameless: list[Any] = [{**turn[0], "tool_calls": [{**call, "id": ""}] * 2}, {**turn[1], "tool_call_id": ""}]
    for messages in ([*turn, *turn], nameless):
        answer = await router.http.post("/v1/chat/completions", json=options(messages=[*HELLO, *messages]))
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("bad", "param", "said"),
    [
        ({"tools": {}}, "tools", "list"),
        ({"tools": [7]}, "tools", "tool 0"),
        ({"tools": [{"type": "function"}]}, "tools", "'function'"),
        ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools", "web_search"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools", "no name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "letters"),
        ({"tools": [TOOL, TOOL]}, "tools", "'weather'"),
        ({"tools": [{"function": {"name": "f", "strict": 1}}]}, "tools", "strict"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools", "'f'"),
        ({"tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools", "object"),
        ({"tools": [{"function": {"name": "f", "parameters": {"properties": {"a": 1}}}}]}, "tools", "'a'"),
        ({"tools": [{"function": {"name": "f", "parameters": {"required": "a"}}}]}, "tools", "required"),
        *(
            ({"tools": [{"function": {"name": "f", "parameters": {"properties": {"a": part}}}}]}, "tools", said)
            for part, said in (
                ({"type": "strnig"}, "'a', are no JSON schema: Invalid enum value 'strnig'"),
                ({"items": {"anyOf": [{"type": ["string", "any"]}]}}, "$.items.anyOf[0].type[1]"),
                ({"properties": {"b": {"required": True}}}, "required"),
                ({"$defs": {"b": {"minLength": -1}}}, "minLength"),
                ({"enum": ["x" * 999] * 200}, "at most 131072 are allowed"),
            )
        ),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"anyOf": []}}}], "tool_choice": "none"},
            "tools",
            "anyOf",
        ),
        ({"tools": [{"function": {"name": "f", "parameters": {"$defs": {"é": 7}}}}]}, "tools", "$defs 'é'"),
        ({"tools": [{"function": {"name": "f", "description": "x" * (1 << 20)}}]}, "tools", "bytes"),
        ({"tools": [{"function": {"name": f"f{n}"}} for n in range(1025)]}, "tools", "1024"),
        ({"tool_choice": "always"}, "tool_choice", "'always'"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "'g'"),
        ({"tool_choice": "required", "tools": []}, "tool_choice", "'tools'"),
        ({"tool_choice": 7}, "tool_choice", "required"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", ""),
        ({"messages": [*HELLO, {"role": "tool", "content": "x"}]}, "messages", "message 1"),
        (
            {
                "messages": [
                    *HELLO,
                    {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f"}}]},
                    {"role": "tool", "tool_call_id": "c2", "content": "x"},
                ]
            },
            "messages",
            "message 2",
        ),
        (
            {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f"}}] * 2}]},
            "messages",
            "same id",
        ),
    ],
)
async def test_bad_input_is_refused_before_anything_is_queued(
    router: Router, bad: dict[str, Any], param: str, said: str
) -> None:
    answer = await router.http.post("/v1/chat/completions", json=options(**bad))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and said in error["message"], error
    assert router.dispatcher.requests == []
