"""Required calls of a model whose way of calling is not known: general JSON, which becomes calls in every API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from kvrelay.protocol.sampling import FinishReason
from kvrelay.text.service import TextService
from tests.component.router.anthropic.test_messages_tools import streamed
from tests.component.router.openai.test_tools_beside_format import allows
from tests.component.router.rig import MODEL, Router, running_router
from tests.component.router.tools import HELLO, PARAMETERS, THINKING, TOOL, sampling_of
from tests.fakes.text_model import CHATML, write_text_model

NAMED: Any = {"type": "function", "function": {"name": "weather"}}
OTHER: Any = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
STRICT: Any = {"type": "function", "function": {**TOOL["function"], "strict": True}}
ARGUMENTS = '{"city": "Zürich 🦦"}'
ONE = f'[{{"name": "weather", "parameters": {ARGUMENTS}}}]'
TWO = f'[{{"name": "weather", "parameters": {ARGUMENTS}}}, {{"name": "now", "parameters": {{}}}}]'
MESSAGE_TOOLS = [{"name": "weather", "input_schema": PARAMETERS}, {"name": "now", "input_schema": {"type": "object"}}]
RESPONSE_TOOLS = [{"type": "function", **TOOL["function"]}, {"type": "function", **OTHER["function"]}]
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, TextService]]:
    """Of a model without anything, and of one that reasons."""
    templates = {"plain": CHATML, "thinks": CHATML + "{# </think> #}"}
    services = {
        name: TextService.load(str(write_text_model(tmp_path_factory.mktemp(name), template)), max_grammar_cpu_s=60.0)
        for name, template in templates.items()
    }
    yield services
    for service in services.values():
        service.close()


@pytest.fixture(params=["plain", "thinks"])
async def router(texts: dict[str, TextService], request: pytest.FixtureRequest) -> AsyncIterator[Router]:
    async with running_router(texts[request.param]) as running:
        yield running


async def grammar_of(router: Router, path: str = CHAT, **fields: Any) -> Any:
    return (await sampling_of(router, path, **fields)).grammar


async def test_grammars_are_of_a_list_or_of_the_arguments(router: Router) -> None:
    for tools in ([TOOL, OTHER], [STRICT, OTHER]):
        required = await grammar_of(router, tools=tools, tool_choice="required")
        for text in (ONE, TWO):
            assert allows(required, text)
        for text in (
            "[]",
            ARGUMENTS,
            "Zürich",
            ONE.replace("city", "town"),
            ONE.replace("weather", "other"),
            ONE[1:-1],
        ):
            assert not allows(required, text), text
        single = await grammar_of(router, tools=tools, tool_choice="required", parallel_tool_calls=False)
        assert allows(single, ONE) and not allows(single, TWO)
        for parallel in (True, False):
            named = await grammar_of(router, tools=tools, tool_choice=NAMED, parallel_tool_calls=parallel)
            assert allows(named, ARGUMENTS)
            for text in (ONE, ARGUMENTS * 2, "{}", '{"city": 7}'):
                assert not allows(named, text), text
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED, {**OTHER}]}}
    assert allows(await grammar_of(router, tools=[TOOL, OTHER], tool_choice=some), TWO)


async def test_the_other_apis_ask_for_the_same(router: Router) -> None:
    for chat, response, message in (
        ("required", "required", {"type": "any"}),
        (NAMED, {"type": "function", "name": "weather"}, {"type": "tool", "name": "weather"}),
    ):
        expected = await grammar_of(router, tools=[TOOL, OTHER], tool_choice=chat)
        fields = {"input": "hi", "tools": RESPONSE_TOOLS, "tool_choice": response}
        assert await grammar_of(router, RESPONSES, **fields) == expected
        more = {"max_tokens": 99, "tools": MESSAGE_TOOLS, "tool_choice": message}
        assert allows(await grammar_of(router, MESSAGES, **more), ONE if chat == "required" else ARGUMENTS)


@pytest.mark.parametrize(
    ("choice", "output", "names"),
    [("required", ONE, ["weather"]), ("required", TWO, ["weather", "now"]), (NAMED, ARGUMENTS, ["weather"])],
)
@pytest.mark.parametrize("per_delta", [1, 1000])
async def test_calls_of_chats(router: Router, choice: Any, output: str, names: list[str], per_delta: int) -> None:
    router.answers(f"\n{output}", per_delta=per_delta)
    fields: Any = {"model": MODEL, "messages": HELLO, "tools": [TOOL, OTHER], "tool_choice": choice}
    whole = (await router.openai.chat.completions.create(**fields)).choices[0]
    async with router.openai.chat.completions.stream(**fields) as stream:
        together = (await stream.get_final_completion()).choices[0]
    for each in (whole, together):
        calls = [(call.function.name, call.function.arguments) for call in each.message.tool_calls or []]
        assert calls == [("weather", ARGUMENTS), ("now", "{}")][: len(names)]
        assert (each.finish_reason, each.message.content or None) == ("tool_calls", None)
    fields["parallel_tool_calls"] = False
    whole = (await router.openai.chat.completions.create(**fields)).choices[0]
    assert len(whole.message.tool_calls or []) == 1


async def test_arguments_stream_as_they_come(router: Router) -> None:
    router.answers(ONE)
    chunks = await router.events(CHAT, messages=HELLO, tools=[TOOL, OTHER], tool_choice="required")
    assert sum("tool_calls" in chunk["choices"][0]["delta"] for chunk in chunks) > 3


@pytest.mark.parametrize("is_named", [False, True])
async def test_calls_of_responses_and_messages(router: Router, is_named: bool) -> None:
    router.answers(ARGUMENTS if is_named else TWO)
    names = ["weather"] if is_named else ["weather", "now"]
    chosen: Any = {"type": "function", "name": "weather"} if is_named else "required"
    body: Any = {"input": "hi", "tools": RESPONSE_TOOLS, "tool_choice": chosen}
    whole = (await router.post(RESPONSES, **body)).json()
    assert [(item["type"], item["name"]) for item in whole["output"]] == [("function_call", name) for name in names]
    assert whole["output"][0]["arguments"] == ARGUMENTS
    last = (await router.typed_events(RESPONSES, **body))[-1]
    assert [item["arguments"] for item in last["response"]["output"]] == [item["arguments"] for item in whole["output"]]
    kind: Any = {"type": "tool", "name": "weather"} if is_named else {"type": "any"}
    more: Any = {"max_tokens": 99, "messages": HELLO, "tools": MESSAGE_TOOLS, "tool_choice": kind}
    message = (await router.post(MESSAGES, **more)).json()
    for each in (message, await streamed(router, **more)):
        assert each["stop_reason"] == "tool_use"
        assert [(block["name"], block["input"]) for block in each["content"]] == [
            ("weather", json.loads(ARGUMENTS)),
            ("now", {}),
        ][: len(names)]


async def test_calls_follow_the_reasoning(texts: dict[str, TextService]) -> None:
    async with running_router(texts["thinks"]) as router:
        router.answers(f"{THINKING}{ONE}")
        fields: dict[str, Any] = {"messages": HELLO, "tools": [TOOL], "tool_choice": "required"}
        message = (await router.post(CHAT, **fields)).json()["choices"][0]["message"]
        assert message["reasoning"] == "Hm 🦦" and message["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
        assert allows(await grammar_of(router, **fields), f"{THINKING}{ONE}")


async def test_a_cut_call(router: Router) -> None:
    fields: dict[str, Any] = {"messages": HELLO, "tools": [TOOL]}
    for output, choice, expected in (
        (ONE[:5], "required", None),
        (ONE[:-8], "required", ARGUMENTS[:-6]),
        ("", NAMED, None),
    ):
        router.answers(output, finish=FinishReason.LENGTH)
        (choice_,) = (await router.post(CHAT, **fields, tool_choice=choice)).json()["choices"]
        assert (choice_["finish_reason"], choice_["message"]["content"] or None) == ("length", None)
        calls = choice_["message"].get("tool_calls")
        assert (calls[0]["function"]["arguments"] if calls else None) == expected


class Weather(BaseModel):
    city: str


async def test_openais_package_gets_a_typed_object(router: Router) -> None:
    """As clients for structured output ask for it."""
    router.answers(ARGUMENTS)
    tool = openai.pydantic_function_tool(Weather, name="weather")
    answer = await router.openai.chat.completions.parse(model=MODEL, messages=HELLO, tools=[tool], tool_choice=NAMED)
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == Weather(city="Zürich 🦦")


async def test_what_stays_refused(router: Router) -> None:
    broken = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"$ref": "#/$defs/b"}}}}}
    for fields, param, said in (
        ({"tools": [TOOL]}, "tools", "--tool-parser"),
        ({"tools": [STRICT]}, "tools", '"required"'),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, "tools", "--tool-parser"),
        ({"tools": [broken], "tool_choice": "required"}, "tools", "'f'"),
        ({"tools": [TOOL], "tool_choice": "required", "use_beam_search": True, "n": 2}, "use_beam_search", "beam"),
    ):
        answer = await router.post(CHAT, messages=HELLO, **fields)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["param"] == param and said in error["message"]
    assert router.dispatcher.requests == []
