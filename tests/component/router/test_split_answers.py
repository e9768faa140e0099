"""Clients see the same answer in one piece and streamed, however many of its tokens arrive together."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic import AsyncAnthropic

from kvrelay.text.service import TextService
from tests.component.router.rig import MODEL, Router
from tests.component.router.tools import CALL, HELLO, PARAMETERS, THINKING, TOOL

OUTPUTS = (
    f"{THINKING}I look. {CALL}\n{CALL}",
    CALL,
    f"{THINKING}It rains.",
    "<tool_call>\nno call\n</tool_call> x",
    "",
)
PER_DELTA = (1, 7, 1000)
ENABLED = {"type": "enabled", "budget_tokens": 1024}


@pytest.fixture
def text(tools_text: TextService) -> TextService:
    """Of the router."""
    return tools_text


def without_deltas(kinds: list[str]) -> list[str]:
    """Deltas may be split in any way. Anthropic's client tells of each in an event of its own, too."""
    return [kind for kind in kinds if not kind.endswith("delta") and kind not in ("text", "input_json", "thinking")]


async def chat(router: Router) -> Any:
    asked: Any = {"model": MODEL, "messages": HELLO, "tools": [TOOL]}
    whole = (await router.openai.chat.completions.create(**asked)).choices[0]
    found = []
    scored: Any = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    for fields in (asked, asked | scored):
        async with router.openai.chat.completions.stream(**fields) as stream:
            done = [event.to_dict() async for event in stream if event.type.endswith(".done")]
            choice = (await stream.get_final_completion()).choices[0]
        assert _bare_choice(choice) == _bare_choice(whole)
        reported = [each for each in done if each["type"] == "tool_calls.function.arguments.done"]
        assert [(each["name"], each["arguments"]) for each in reported] == _bare_choice(whole)[2]
        found.append([each["type"] for each in done])
    return found


def _bare_choice(choice: Any) -> tuple[str, str, list[tuple[str, str]]]:
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    return choice.finish_reason, choice.message.content or "", calls


async def responses(router: Router) -> Any:
    tool: Any = {"type": "function", "strict": False, **TOOL["function"]}
    asked: Any = {"model": MODEL, "input": HELLO, "tools": [tool]}
    whole = (await router.openai.responses.create(**asked)).output
    async with router.openai.responses.stream(**asked) as stream:
        kinds = without_deltas([event.type async for event in stream])
        output = (await stream.get_final_response()).output
    assert [_bare_item(item) for item in output] == [_bare_item(item) for item in whole]
    return kinds


def _bare_item(item: Any) -> Any:
    """Without what differs from answer to answer, and what the client parses."""
    own: Any = dict.fromkeys(("id", "call_id", "parsed_arguments"), True)
    return item.model_dump(exclude=own | {"content": {"__all__": {"parsed"}}})


async def messages(router: Router) -> Any:
    tools: Any = [{"name": "weather", "input_schema": PARAMETERS}]
    client = AsyncAnthropic(base_url=str(router.http.base_url), api_key="none")
    asked: Any = {"model": MODEL, "max_tokens": 2000, "messages": HELLO, "tools": tools, "thinking": ENABLED}
    async with client:
        whole = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            kinds = without_deltas([event.type async for event in stream])
            message = await stream.get_final_message()
    assert _bare_message(message) == _bare_message(whole)
    return kinds


def _bare_message(message: Any) -> Any:
    blocks = [block.model_dump(exclude={"id", "signature"}, exclude_unset=True) for block in message.content]
    return message.stop_reason, message.usage.output_tokens, blocks


@pytest.mark.parametrize("output", OUTPUTS, ids=["calls", "call", "text", "no call", "nothing"])
@pytest.mark.parametrize("stream", [chat, responses, messages])
async def test_streams_of_the_stock_clients(router: Router, stream: Any, output: str) -> None:
    found = []
    for per_delta in PER_DELTA:
        router.answers(output, per_delta=per_delta)
        found.append(await stream(router))
    assert found[1:] == found[:-1]
