"""Clients see the same answer however many of its tokens arrive together: a busy router takes several at a time."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic import AsyncAnthropic

from kvrelay.text.service import TextService
from tests.component.router.rig import MODEL, Router
from tests.component.router.tools import CALL, HELLO, PARAMETERS, THINKING, TOOL

OUTPUTS = (f"{THINKING}I look. {CALL}\n{CALL}", CALL, f"{THINKING}It rains.", "")
PER_DELTA = (1, 7, 1000)


@pytest.fixture
def text(tools_text: TextService) -> TextService:
    """Of the router."""
    return tools_text


def without_deltas(kinds: list[str]) -> list[str]:
    """Deltas may be split in any way. Anthropic's client tells of each in an event of its own, too."""
    return [kind for kind in kinds if not kind.endswith("delta") and kind not in ("text", "input_json")]


async def chat(router: Router) -> Any:
    asked: Any = {"model": MODEL, "messages": HELLO, "tools": [TOOL]}
    async with router.openai.chat.completions.stream(**asked) as stream:
        done = [event.to_dict() async for event in stream if event.type.endswith(".done")]
        message = (await stream.get_final_completion()).choices[0]
    calls = [[call.function.name, call.function.arguments] for call in message.message.tool_calls or []]
    return done, message.finish_reason, message.message.content, calls


async def responses(router: Router) -> Any:
    tool: Any = {"type": "function", "strict": False, **TOOL["function"]}
    async with router.openai.responses.stream(model=MODEL, input=HELLO, tools=[tool]) as stream:
        kinds = without_deltas([event.type async for event in stream])
        output = (await stream.get_final_response()).output
    return kinds, [item.model_dump(exclude={"id", "call_id"}) for item in output]


async def messages(router: Router) -> Any:
    tools: Any = [{"name": "weather", "input_schema": PARAMETERS}]
    client = AsyncAnthropic(base_url=str(router.http.base_url), api_key="none")
    async with client, client.messages.stream(model=MODEL, max_tokens=300, messages=HELLO, tools=tools) as stream:
        kinds = without_deltas([event.type async for event in stream])
        message = await stream.get_final_message()
    return kinds, message.stop_reason, [block.model_dump(exclude={"id"}) for block in message.content]


@pytest.mark.parametrize("output", OUTPUTS, ids=["calls", "call", "text", "nothing"])
@pytest.mark.parametrize("stream", [chat, responses, messages])
async def test_streams_of_the_stock_clients(router: Router, stream: Any, output: str) -> None:
    found = []
    for per_delta in PER_DELTA:
        router.answers(output, per_delta=per_delta)
        found.append(await stream(router))
    assert found[1:] == found[:-1]
