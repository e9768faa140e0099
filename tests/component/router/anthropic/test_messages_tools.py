"""Tool calls and reasoning in Anthropic's messages."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from anthropic import AsyncAnthropic

from kvrelay.text.service import TextService
from kvrelay_router.anthropic import messages_request
from kvrelay_router.anthropic.messages_request import PromptFields
from tests.component.router.rig import MODEL, Router
from tests.component.router.tools import ARGUMENTS, CALL, PARAMETERS, THINKING

TOOL = {"name": "weather", "description": "Looks.", "input_schema": PARAMETERS}
HELLO = [{"role": "user", "content": "Weather in Zürich?"}]
BODY: dict[str, Any] = {"messages": HELLO, "max_tokens": 300, "tools": [TOOL], "thinking": {"type": "enabled"}}
USE = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
RESULT = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "rain"}]}
FORMAT = {"type": "json_schema", "schema": {"type": "object"}}


@pytest.fixture
def text(tools_text: TextService) -> TextService:
    """Of the router."""
    return tools_text


async def created(router: Router, **body: Any) -> dict[str, Any]:
    answer = await router.post("/v1/messages", **{**BODY, **body})
    assert answer.status_code == 200, answer.text
    message: dict[str, Any] = answer.json()
    return message


async def streamed(router: Router, **body: Any) -> dict[str, Any]:
    """The message that the stock client puts together from the events."""
    client = AsyncAnthropic(base_url=router.url, api_key="none")
    async with client, client.messages.stream(**{"model": MODEL, **BODY, **body}) as stream:
        return (await stream.get_final_message()).model_dump(exclude_unset=True)


def bare(message: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from answer to answer."""
    left_out = ("id", "signature")
    blocks = [{name: block[name] for name in block if name not in left_out} for block in message["content"]]
    return {**{name: message[name] for name in message if name not in left_out}, "content": blocks}


@pytest.mark.parametrize("get", [created, streamed])
async def test_thoughts_text_and_calls_are_blocks(router: Router, get: Any) -> None:
    router.answers(f"{THINKING}I look. {CALL}\n{CALL}")
    message = bare(await get(router))
    call = {"type": "tool_use", "name": "weather", "input": json.loads(ARGUMENTS)}
    assert message["content"] == [
        {"type": "thinking", "thinking": "Hm 🦦"},
        {"type": "text", "text": "I look."},
        call,
        call,
    ]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)


async def test_ids_of_calls_differ_and_results_refer_to_them(router: Router) -> None:
    router.answers(f"{CALL}\n{CALL}")
    first, second = (await created(router))["content"]
    assert first["id"] != second["id"] and all(each["id"].startswith("toolu_") for each in (first, second))
    results = [{"type": "tool_result", "tool_use_id": each["id"], "content": "sunny"} for each in (first, second)]
    turns = [{"role": "assistant", "content": [first, second]}, {"role": "user", "content": results}]
    await created(router, messages=[*HELLO, *turns])
    prompt = router.text.tokenizer.backend.decode(router.dispatcher.requests[-1].prompt_ids)
    assert prompt.count("sunny") == 2


@pytest.mark.parametrize("get", [created, streamed])
@pytest.mark.parametrize("own", [None, "functions.weather:0", "a1B2c3D4e"])
async def test_ids_have_anthropics_form_and_templates_get_the_models_own(
    router: Router, monkeypatch: pytest.MonkeyPatch, get: Any, own: str | None
) -> None:
    if own is not None:
        monkeypatch.setattr("kvrelay.text.output_parsing.parser_base.new_call_id", lambda: own)
    router.answers(CALL)
    (call,) = (await get(router))["content"]
    assert re.fullmatch("toolu_[0-9a-f]{24}" if own is None else f"toolu_.*{own}", call["id"])
    turn = [{"role": "assistant", "content": [call]}, result_of(call["id"])]
    shown = messages_request.chat_messages(PromptFields(model=MODEL, messages=[*HELLO, *turn]))
    template_id = own or call["id"]
    assert (shown[1]["tool_calls"][0]["id"], shown[2]["tool_call_id"]) == (template_id, template_id)
    await created(router, messages=[*HELLO, *turn])


def result_of(call_id: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call_id, "content": "rain"}]}


async def test_an_id_may_come_again_in_a_later_turn(router: Router) -> None:
    turn = [{"role": "assistant", "content": [USE]}, RESULT]
    await created(router, messages=[*HELLO, *turn, *turn])


async def test_thoughts_are_hidden_unless_they_were_asked_for(router: Router) -> None:
    router.answers(f"{THINKING}Plain.")
    for thinking in (None, {"type": "disabled"}):
        assert [block["type"] for block in (await created(router, thinking=thinking))["content"]] == ["text"]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"tools": [TOOL, TOOL]}, "weather"),
        ({"tools": [{**TOOL, "name": ""}]}, "tools.0"),
        ({"tools": [{**TOOL, "input_schema": {"type": "array"}}]}, "object"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tool_choice": {"type": "tool", "name": "other"}}, "other"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": None, "tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [], "tool_choice": {"type": "tool", "name": "weather"}}, "tool_choice"),
        ({"tools": {}}, "list"),
        ({"output_config": {"format": {**FORMAT, "schema": {"type": "otter"}}}}, "otter"),
        ({"tools": [{"input_schema": {"type": "object"}}]}, "tools.0"),
        ({"tools": [{**TOOL, "input_schema": {"type": "object", "properties": {"a": 1}}}]}, "'a'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1"}]}]}, "messages"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [USE, USE]}]}, "messages.1.content.1.id"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [USE]}, *[RESULT] * 2]}, "has a result already"),
        ({"tools": [{**TOOL, "input_schema": {"properties": {"a": {"items": {"type": "x"}}}}}]}, "'x'"),
        ({"messages": [{"role": "user", "content": [{"type": "otter", "text": "x"}]}]}, "otter"),
    ],
)
async def test_bad_tools_are_refused(router: Router, body: dict[str, Any], says: str) -> None:
    answer = await router.post("/v1/messages", **{**BODY, **body})
    error = answer.json()
    assert (answer.status_code, error["error"]["type"]) == (400, "invalid_request_error"), error
    assert says in error["error"]["message"]
    assert router.dispatcher.requests == []
