"""Answers and events are of the types of OpenAI's and Anthropic's packages, as clients in typed languages need them."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from kvrelay.text.service import TextService
from tests.component.router.rig import Router
from tests.component.router.tools import CALL, HELLO, PARAMETERS, THINKING, TOOL

OUTPUTS = (f"{THINKING}I look. {CALL}\n{CALL}", f"{CALL}", f"{THINKING}Plain.", "")
RESPONSE_TOOL = {"type": "function", "strict": False, **TOOL["function"]}
MESSAGE_TOOL = {"name": "weather", "input_schema": PARAMETERS}


@pytest.fixture
def text(tools_text: TextService) -> TextService:
    """Of the router."""
    return tools_text


async def events_of(router: Router, path: str, **body: Any) -> list[Any]:
    async with router.http.stream("POST", path, json={"model": "test-model", "stream": True, **body}) as answer:
        lines = [line async for line in answer.aiter_lines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@cache
def adapter(wanted: Any) -> TypeAdapter[Any]:
    """Takes seconds for the events of responses."""
    return TypeAdapter(wanted)


def check(wanted: Any, value: Any) -> None:
    """Raises pydantic's error. The types allow more fields."""
    adapter(wanted).validate_python(value)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("logprobs", [False, True])
async def test_chats(router: Router, output: str, logprobs: bool) -> None:
    router.answers(output)
    body: dict[str, Any] = {"messages": HELLO, "tools": [TOOL], "logprobs": logprobs}
    check(ChatCompletion, (await router.post("/v1/chat/completions", **body)).json())
    options = {"include_usage": True, "continuous_usage_stats": True}
    for event in await events_of(router, "/v1/chat/completions", **body, stream_options=options):
        check(ChatCompletionChunk, event)


@pytest.mark.parametrize("logprobs", [None, 2])
async def test_completions(router: Router, logprobs: int | None) -> None:
    body = {"prompt": "An otter", "logprobs": logprobs}
    check(Completion, (await router.post("/v1/completions", **body)).json())
    *_, last = await events_of(router, "/v1/completions", **body)  # the type has no events before the last one
    check(Completion, last)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("more", [{}, {"top_logprobs": 2}, {"max_output_tokens": 8}, {"reasoning": {"effort": "low"}}])
async def test_responses(router: Router, output: str, more: dict[str, Any]) -> None:
    router.answers(output)
    body: dict[str, Any] = {"input": HELLO, "tools": [RESPONSE_TOOL], **more}
    whole = (await router.post("/v1/responses", **body)).json()
    check(Response, whole)
    check(Response, (await router.http.get(f"/v1/responses/{whole['id']}")).json())
    for event in await events_of(router, "/v1/responses", **body):
        check(ResponseStreamEvent, event)


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("max_tokens", [8, 300])
async def test_messages(router: Router, output: str, max_tokens: int) -> None:
    router.answers(output)
    thinking = {"type": "enabled", "budget_tokens": 1024}
    body: dict[str, Any] = {"messages": HELLO, "tools": [MESSAGE_TOOL], "max_tokens": max_tokens, "thinking": thinking}
    check(Message, (await router.post("/v1/messages", **body)).json())
    for event in await events_of(router, "/v1/messages", **body):
        if event["type"] != "ping":
            check(RawMessageStreamEvent, event)


async def test_counts_and_models(router: Router) -> None:
    check(MessageTokensCount, (await router.post("/v1/messages/count_tokens", messages=HELLO)).json())
    models = (await router.http.get("/v1/models")).json()
    for model in models["data"]:
        check(Model, model)
