"""Function calls and reasoning in the Responses API, as the stock client sees them."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.text.service import TextService
from tests.component.router.rig import MODEL, Router
from tests.component.router.tools import ARGUMENTS, CALL, PARAMETERS, THINKING

TOOL: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": False}
BODY: dict[str, Any] = {"model": MODEL, "input": "Weather in Zürich?", "tools": [TOOL]}


@pytest.fixture
def text(tools_text: TextService) -> TextService:
    """Of the router."""
    return tools_text


def bare(items: list[Any]) -> list[dict[str, Any]]:
    """Items without what differs from answer to answer."""
    dumped = [item if isinstance(item, dict) else item.model_dump(exclude_unset=True) for item in items]
    return [{name: item[name] for name in item if name not in ("id", "call_id")} for item in dumped]


async def test_reasoning_text_and_calls_are_items(router: Router) -> None:
    router.answers(f"{THINKING}I look. {CALL}\n{CALL}")
    response = await router.openai.responses.create(**BODY)
    part = {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}
    call = {"type": "function_call", "status": "completed", "name": "weather", "arguments": ARGUMENTS}
    thought = {"type": "reasoning_text", "text": "Hm 🦦"}
    assert bare(response.output) == [
        {"type": "reasoning", "summary": [], "status": "completed", "content": [thought]},
        {"type": "message", "role": "assistant", "status": "completed", "content": [part]},
        call,
        call,
    ]
    assert len({item.id for item in response.output}) == 4


async def test_a_stream_says_what_the_whole_answer_says(router: Router) -> None:
    for output in (f"{THINKING}I look. {CALL}\n{CALL}", CALL, f"{THINKING}Plain.", "<tool_call>\nno\n</tool_call>", ""):
        router.answers(output)
        whole = await router.openai.responses.create(**BODY)
        events = [event async for event in await router.openai.responses.create(**BODY, stream=True)]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        last = events[-1]
        assert last.type == "response.completed"
        assert bare(last.response.output) == bare(whole.output)
        done = [event for event in events if event.type == "response.output_item.done"]
        assert [event.item for event in done] == last.response.output
        assert [event.output_index for event in done] == list(range(len(done)))
        texts = dict.fromkeys(range(len(done)), "")
        for event in events:
            if event.type.endswith(".delta"):
                texts[event.output_index] += event.delta
            elif event.type in ("response.output_text.done", "response.reasoning_text.done"):
                assert event.text == texts[event.output_index]
            elif event.type == "response.function_call_arguments.done":
                assert event.arguments == texts[event.output_index] == ARGUMENTS


async def test_a_result_continues_a_stored_response(router: Router) -> None:
    router.answers(f"{THINKING}{CALL}")
    first = await router.openai.responses.create(**BODY)
    call = first.output[-1]
    assert call.type == "function_call"
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    await router.openai.responses.create(**{**BODY, "input": [output], "previous_response_id": first.id})
    prompt = router.text.tokenizer.backend.decode(router.dispatcher.requests[-1].prompt_ids)
    assert "sunny" in prompt and 'Zürich "🦦"' in prompt
    refused = await router.post("/v1/responses", input=[{**output, "call_id": "other"}], previous_response_id=first.id)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "input[0].call_id"


async def test_a_call_of_a_function_in_a_namespace_names_both(router: Router) -> None:
    """Codex sends its tools for agents so."""
    router.answers(CALL)
    space = {"type": "namespace", "name": "sky", "description": "Looks up.", "tools": [TOOL]}
    other = {**TOOL, "name": "now"}
    body: dict[str, Any] = {**BODY, "tools": [other, space], "tool_choice": {"type": "function", "name": "weather"}}
    whole = await router.openai.responses.create(**body)
    (call,) = whole.output
    assert call.type == "function_call" and (call.namespace, call.name) == ("sky", "weather")
    async with router.openai.responses.stream(**body) as stream:
        events = [event async for event in stream]
    added = [event.item for event in events if event.type == "response.output_item.added"]
    assert [(item.namespace, item.name) for item in added if item.type == "function_call"] == [("sky", "weather")]
    answered = [*whole.model_dump(exclude_unset=True)["output"]]
    answered.append({"type": "function_call_output", "call_id": call.call_id, "output": "sunny"})
    await router.openai.responses.create(**{**body, "input": answered})


@pytest.mark.parametrize(
    ("tool", "param"),
    [
        ({"type": "namespace", "tools": [TOOL]}, "tools[0].name"),
        ({"type": "namespace", "name": "sky"}, "tools[0].tools"),
        ({"type": "namespace", "name": "sky", "tools": [{"type": "custom", "name": "now"}]}, "tools[0].tools[0].type"),
        ({"type": "namespace", "name": "sky", "tools": [{"type": "function"}]}, "tools[0].tools[0].name"),
        ({"type": "web_search"}, "tools[0].type"),
    ],
)
async def test_tools_that_cannot_be_offered_are_named(router: Router, tool: dict[str, Any], param: str) -> None:
    refused = await router.post("/v1/responses", **{**BODY, "tools": [tool]})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == param


async def test_a_format_beside_tools_that_cannot_be_followed_is_named(router: Router) -> None:
    text_format = {"type": "json_schema", "name": "x", "schema": {"type": "string", "pattern": "("}}
    body = {**BODY, "text": {"format": text_format}}
    refused = await router.post("/v1/responses", **body)
    error = refused.json()["error"]
    assert refused.status_code == 400 and error["param"].startswith("text.format"), error


async def test_texts_around_a_call_have_scores_of_their_own(router: Router) -> None:
    router.answers(f"{THINKING}I look. {CALL}\n{CALL}Then é.")
    stream = await router.openai.responses.create(**BODY, stream=True, top_logprobs=2)
    events = [event.model_dump(exclude={"item_id"}) async for event in stream]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    (last,) = [event for event in events if event["type"] == "response.completed"]
    messages = [item for item in last["response"]["output"] if item["type"] == "message"]
    assert [item["content"][0]["text"] for item in messages] == ["I look.", "Then é."]
    assert all(item["content"][0]["logprobs"] for item in messages)
    added = [event["part"]["text"] for event in events if event["type"] == "response.content_part.added"]
    assert set(added) == {""}
