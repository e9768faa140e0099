"""Whatever a body holds, the answer is right or refused, and never a failure of the server."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from kvrelay.text.request.completion_request import CompletionRequest
from kvrelay.text.request.parsing import CHAT, COMPLETION
from kvrelay_router.openai.chat_request import ChatRequest
from kvrelay_router.openai.select import SelectChat, SelectText
from tests.component.router.one_connection import OneConnection, one_connection
from tests.component.router.rig import MODEL, Router

ODD_VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 0.5, -0.0, 1e308, 2**31, 2**63, -(2**63), 2**64 - 1),
    *("", "x", "🦦", "\x00", "\ufffd", "1", "null", "x" * 5000),
    *([], [None], [[]], [0], [1, 2], ["x"], [[1], ["x"]], [{}], [-1], [399], [400], [True], [1.5]),
    *({}, {"1": 1}, {"x": 1}, {"type": "text"}, {"type": []}, {"role": "user"}, {"include_usage": True}),
    *([{"role": "user", "content": "x"}], [{"role": "assistant", "content": None, "tool_calls": [{}]}]),
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]}],
    [{"role": "user", "content": [{"type": "text", "text": 1}]}],
]

BODIES: dict[str, tuple[list[str], dict[str, Any]]] = {
    "/v1/completions": ([*CompletionRequest.model_fields, *COMPLETION], {"prompt": "x"}),
    "/v1/chat/completions": (
        [*ChatRequest.model_fields, *CHAT, "tools"],
        {"messages": [{"role": "user", "content": "x"}]},
    ),
    "/v1/select": ([*SelectText.model_fields, *SelectChat.model_fields], {"prompt": "x", "choices": [" y", " z"]}),
    "/v1/select#messages": (
        [*SelectChat.model_fields],
        {"messages": [{"role": "user", "content": "x"}], "choices": [" y", " z"]},
    ),
    "/tokenize": ([*ChatRequest.model_fields, "prompt", "return_token_strs"], {}),
    "/detokenize": (["tokens", "skip_special_tokens"], {"tokens": [5]}),
}


@pytest.mark.everyday(1)
@pytest.mark.parametrize("path", BODIES)
async def test_every_field_with_every_odd_value(router: Router, path: str) -> None:
    fields, base = BODIES[path]
    async with one_connection(router.server.port) as client:
        for field in dict.fromkeys(fields):
            for value in ODD_VALUES:
                await check(client, path, {"model": MODEL, **base, field: value})


@pytest.mark.parametrize("path", BODIES)
async def test_several_odd_values_at_once(router: Router, path: str) -> None:
    fields, base = BODIES[path]
    draw = random.Random(path)
    async with one_connection(router.server.port) as client:
        for _ in range(500):
            odd = {draw.choice(fields): draw.choice(ODD_VALUES) for _ in range(draw.randint(2, 5))}
            await check(client, path, {"model": MODEL, **base, **odd})


async def check(client: OneConnection, path: str, body: dict[str, Any]) -> None:
    """A refusal says why; an answer that is taken ends as it should."""
    path = path.partition("#")[0]
    answer = await client.post(path, body)
    if answer.status != 200:
        assert 400 <= answer.status < 500, (body, answer.text)
        error = json.loads(answer.text)["error"]
        assert error["message"] and error["type"] == "invalid_request_error", (body, answer.text)
        return
    assert "error" not in answer.text, body
    if answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
        *_, last, _ = [event for event in answer.text.split("\n\n") if "finish_reason" in event or "[DONE]" in event]
        assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] in ("stop", "length")
    elif path == "/v1/select":
        assert len(json.loads(answer.text)["scores"]) == len(body["choices"])
    elif path.startswith("/v1/"):
        assert all(choice["finish_reason"] in ("stop", "length") for choice in json.loads(answer.text)["choices"])
