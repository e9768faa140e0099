"""Calls that must be made, and calls of strict tools: the grammar that workers get, and what is refused."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvrelay.protocol.sampling import FinishReason, Grammar, GrammarKind
from kvrelay.text.service import TextService
from tests.component.router.rig import Router, running_router
from tests.component.router.tools import CALL, HELLO, PARAMETERS, THINKING, TOOL

NAMED = {"type": "function", "function": {"name": "weather"}}
OTHER: Any = {"type": "function", "function": {"name": "now"}}
NO_SUCH = {"$ref": "#/$defs/missing"}
BROKEN: Any = {"type": "function", "function": {"name": "broken", "parameters": {"properties": {"a": NO_SUCH}}}}
ALLOWED: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}
BROKEN_CHOICE = {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [NAMED]}}
TAG: Any = {"format": {"type": "const_string", "value": "a"}}
STRICT: Any = {"type": "function", "function": {**TOOL["function"], "strict": True}}


@pytest.fixture
async def router(tools_text: TextService) -> AsyncIterator[Router]:
    async with running_router(tools_text) as running:
        running.answers(CALL)
        yield running


async def grammar_of(router: Router, path: str = "/v1/chat/completions", **fields: Any) -> Grammar | None:
    """The grammar that a worker gets for this request."""
    answer = await router.post(path, **fields)
    assert answer.status_code == 200, answer.text
    return router.dispatcher.requests[-1].sampling.grammar


def text_of(grammar: Grammar | None) -> str:
    assert grammar is not None and grammar.kind is GrammarKind.STRUCTURAL_TAG
    return grammar.text


async def test_required_and_named_calls_are_of_the_tools_that_may_be_called(router: Router) -> None:
    fields: dict[str, Any] = {"messages": HELLO, "tools": [TOOL, OTHER]}
    required = text_of(await grammar_of(router, **fields, tool_choice="required"))
    named = text_of(await grammar_of(router, **fields, tool_choice=NAMED))
    assert "weather" in required and "now" in required
    assert "weather" in named and "now" not in named
    assert json.dumps(PARAMETERS["properties"], separators=(",", ":")) in named


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*tools]}}


async def test_allowed_tools_are_called_and_all_are_shown(router: Router) -> None:
    fields: dict[str, Any] = {"messages": HELLO, "tools": [TOOL, OTHER]}
    required = await grammar_of(router, **fields, tool_choice=allowed("required", NAMED))
    assert required == await grammar_of(router, **fields, tool_choice=NAMED)
    auto = text_of(await grammar_of(router, **fields, tool_choice=allowed("auto", NAMED, NAMED)))
    assert '"triggered_tags"' in auto and "weather" in auto and "now" not in auto
    both = text_of(await grammar_of(router, **fields, tool_choice=allowed("auto", NAMED, OTHER)))
    assert "weather" in both and "now" in both
    assert await grammar_of(router, **fields) is None  # the same prompt, which all of them have
    assert len({tuple(request.prompt_ids) for request in router.dispatcher.requests}) == 1


async def test_allowed_tools_of_responses(router: Router) -> None:
    now = {"type": "function", "name": "now"}
    tools = [{"type": "function", "name": "weather", "parameters": PARAMETERS}, now]
    named = [{"type": "function", "name": "weather"}]
    fields: dict[str, Any] = {"input": "hi", "tools": tools}
    for mode in ("auto", "required"):
        choice = {"type": "allowed_tools", "mode": mode, "tools": named}
        text = text_of(await grammar_of(router, "/v1/responses", **fields, tool_choice=choice))
        assert "weather" in text and "now" not in text
    for wrong in ({**choice, "mode": "all"}, {**choice, "tools": None}, {**choice, "tools": [{"type": "function"}]}):
        answer = await router.post("/v1/responses", **fields, tool_choice=wrong)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tool_choice", answer.text


async def test_parallel_calls(router: Router) -> None:
    fields: dict[str, Any] = {"messages": HELLO, "tools": [TOOL], "tool_choice": "required"}
    assert '"stop_after_first":false' in text_of(await grammar_of(router, **fields))
    assert '"stop_after_first":true' in text_of(await grammar_of(router, **fields, parallel_tool_calls=False))


async def test_auto_has_a_grammar_if_a_tool_is_strict(router: Router) -> None:
    fields: dict[str, Any] = {"messages": HELLO}
    assert await grammar_of(router, **fields, tools=[TOOL]) is None
    assert await grammar_of(router, **fields, tools=[STRICT], tool_choice="none") is None
    assert '"triggered_tags"' in text_of(await grammar_of(router, **fields, tools=[STRICT, OTHER]))


async def test_the_grammar_begins_where_the_reasoning_of_the_prompt_ends(router: Router) -> None:
    fields: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required"}
    opened = [*HELLO, {"role": "assistant", "content": "<think>Hm"}]
    more: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    assert '"begin":"<think>"' in text_of(await grammar_of(router, messages=HELLO, **fields))
    assert '"begin":""' in text_of(await grammar_of(router, messages=opened, **fields, **more))


async def test_the_other_apis_ask_for_the_same(router: Router) -> None:
    fields: dict[str, Any] = {"tools": [TOOL], "messages": HELLO}
    expected = await grammar_of(router, **fields, tool_choice="required")
    anthropic = {"messages": HELLO, "max_tokens": 99, "tools": [{"name": "weather", "input_schema": PARAMETERS}]}
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        assert await grammar_of(router, "/v1/messages", **anthropic, tool_choice=choice) == expected
    response = {"input": "hi", "tools": [{"type": "function", "name": "weather", "parameters": PARAMETERS}]}
    for named in ("required", {"type": "function", "name": "weather"}):
        assert await grammar_of(router, "/v1/responses", **response, tool_choice=named) == expected


@pytest.mark.parametrize("stream", [False, True])
async def test_a_required_call_ends_with_tool_calls(router: Router, stream: bool) -> None:
    fields: Any = {"model": "test-model", "messages": HELLO, "tools": [TOOL], "tool_choice": NAMED}
    if stream:
        async with router.openai.chat.completions.stream(**fields) as events:
            answer: Any = await events.get_final_completion()
    else:
        answer = await router.openai.chat.completions.create(**fields)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1


@pytest.mark.parametrize("tool_choice", ["required", NAMED])
@pytest.mark.parametrize("num_chars", [1, 11, 22])
async def test_a_required_call_that_is_cut_before_its_name_is_no_content(
    router: Router, num_chars: int, tool_choice: Any
) -> None:
    router.answers(f"{THINKING}{CALL[:num_chars]}", finish=FinishReason.LENGTH)
    fields: dict[str, Any] = {"messages": HELLO, "tools": [TOOL], "tool_choice": tool_choice}
    (choice,) = (await router.post("/v1/chat/completions", **fields)).json()["choices"]
    message = choice["message"]
    assert (choice["finish_reason"], message["content"], message["reasoning"]) == ("length", None, "Hm 🦦")
    assert "tool_calls" not in message
    chunks = await router.events("/v1/chat/completions", **fields)
    assert not any(chunk["choices"][0]["delta"].get("content") for chunk in chunks)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "length"


@pytest.mark.parametrize(
    ("bad", "param", "said"),
    [
        ({"tools": [TOOL, BROKEN], "tool_choice": "required"}, "tools", "'broken'"),
        ({"tools": [TOOL, {**BROKEN, "function": {**BROKEN["function"], "strict": True}}]}, "tools", "'broken'"),
        ({"structural_tag": TAG, "tool_choice": "required"}, "structural_tag", "required call and a structural tag"),
        ({"tools": [STRICT], "structural_tag": TAG}, "structural_tag", "strict tools and a structural tag"),
        ({"guided_regex": "a", "tools": [{"function": {"name": f"f{n}"}} for n in range(101)]}, "tools", "at most 100"),
        ({"tools": [STRICT], "guided_regex": "a" * 131_000}, "tools", "at most 131072"),
        ({"tool_choice": BROKEN_CHOICE}, "tool_choice", "mode"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "allowed_tools"),
        ({"tool_choice": {**ALLOWED, "allowed_tools": {"mode": "auto", "tools": []}}}, "tool_choice", "1 to 1024"),
        ({"tool_choice": {**ALLOWED, "allowed_tools": {"mode": "auto", "tools": [TOOL, 7]}}}, "tool_choice", "[1]"),
        ({"tools": [OTHER], "tool_choice": ALLOWED}, "tool_choice", "'weather'"),
        ({"tool_choice": "required", "use_beam_search": True, "n": 2}, "use_beam_search", "beam search"),
        (
            {"tools": [{"function": {"name": f"f{n}"}} for n in range(101)], "tool_choice": "required"},
            "tools",
            "at most 100",
        ),
    ],
)
async def test_what_cannot_be_constrained_is_refused_before_anything_is_queued(
    router: Router, bad: dict[str, Any], param: str, said: str
) -> None:
    answer = await router.post("/v1/chat/completions", **{"messages": HELLO, "tools": [TOOL], **bad})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param and said in error["message"], error
    assert router.dispatcher.requests == []


async def test_a_tool_that_is_not_called_is_not_compiled(router: Router) -> None:
    fields: dict[str, Any] = {"messages": HELLO, "tools": [TOOL, BROKEN]}
    assert await grammar_of(router, **fields, tool_choice=NAMED) is not None
    assert await grammar_of(router, **fields) is None
