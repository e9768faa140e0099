"""Chat completions whose prompt is tokens, in place of messages."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.text.service import TextService
from tests.component.router.rig import MODEL, Router
from tests.component.router.tools import ARGUMENTS, CALL, HELLO, THINKING, TOOL

CHAT = "/v1/chat/completions"


@pytest.fixture
def text(tools_text: TextService) -> TextService:
    """Of the router."""
    return tools_text


async def prompt_of(router: Router, **fields: Any) -> list[int]:
    answer = await router.http.post("/tokenize", json={"messages": HELLO, **fields})
    tokens: list[int] = answer.json()["tokens"]
    return tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("messages", [[], None])
async def test_the_worker_gets_these_tokens(router: Router, messages: Any, stream: bool) -> None:
    router.answers(f"{THINKING}It rains.")
    tokens = await prompt_of(router)
    body = {"prompt_token_ids": tokens, "messages": messages, "return_token_ids": True, "stream": stream}
    answer = await router.post(CHAT, **body)
    assert answer.status_code == 200
    if not stream:
        assert answer.json()["prompt_token_ids"] == tokens
        assert answer.json()["usage"]["prompt_tokens"] == len(tokens)
        whole = await router.post(CHAT, messages=HELLO)
        assert answer.json()["choices"][0]["message"] == whole.json()["choices"][0]["message"]
    assert all(request.prompt_ids == tokens for request in router.dispatcher.requests)


async def test_a_body_without_messages(router: Router) -> None:
    answer = await router.http.post(CHAT, json={"model": MODEL, "prompt_token_ids": [5, 6]})
    assert answer.status_code == 200 and router.dispatcher.requests[0].prompt_ids == [5, 6]


async def test_calls_are_found_in_the_output(router: Router) -> None:
    router.answers(CALL)
    tokens = await prompt_of(router, tools=[TOOL])
    answer = await router.post(CHAT, prompt_token_ids=tokens, messages=[], tools=[TOOL], tool_choice="required")
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == ARGUMENTS
    assert router.dispatcher.requests[0].sampling.grammar is not None


async def test_they_can_be_truncated(router: Router) -> None:
    for side, kept in (("left", [7, 8]), ("right", [5, 6])):
        fields: dict[str, Any] = {"truncate_prompt_tokens": 2, "truncation_side": side}
        assert (await router.post(CHAT, prompt_token_ids=[5, 6, 7, 8], messages=[], **fields)).status_code == 200
        assert router.dispatcher.requests[-1].prompt_ids == kept


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": HELLO}, "prompt_token_ids", "invalid_value"),
        ({"add_generation_prompt": True}, "add_generation_prompt", "invalid_value"),
        ({"continue_final_message": True}, "continue_final_message", "invalid_value"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "invalid_value"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "invalid_value"),
        ({"add_special_tokens": True}, "add_special_tokens", "invalid_value"),
        ({"echo": True}, "echo", "invalid_value"),
        ({"prompt_token_ids": []}, "messages", "invalid_value"),
        ({"prompt_token_ids": "5 6"}, "prompt_token_ids", "invalid_type"),
        ({"prompt_token_ids": [5, True]}, "prompt_token_ids[1]", "invalid_type"),
        ({"prompt_token_ids": [[5]]}, "prompt_token_ids[0]", "invalid_type"),
        ({"prompt_token_ids": [-1]}, "prompt_token_ids[0]", "invalid_value"),
        ({"prompt_token_ids": [10**6]}, "prompt_token_ids", "invalid_value"),
        ({"prompt_token_ids": [5] * 513}, "prompt_token_ids", "context_length_exceeded"),
        ({"prompt_token_ids": [5] * 100_000}, "prompt_token_ids", "context_length_exceeded"),
        ({"prompt_token_ids": [5] * 100_000 + ["x"]}, "prompt_token_ids[100000]", "invalid_type"),
    ],
)
async def test_what_does_not_fit(router: Router, fields: dict[str, Any], param: str, code: str) -> None:
    answer = await router.post(CHAT, **{"prompt_token_ids": [5, 6], "messages": [], **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code), error
    assert not router.dispatcher.requests


async def test_batches_have_messages(router: Router) -> None:
    answer = await router.post(f"{CHAT}/batch", messages=[HELLO], prompt_token_ids=[5])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_token_ids")
