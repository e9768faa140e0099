"""Values that can be read and are nested too deeply to be written are refused before anything is submitted."""

from __future__ import annotations

from typing import Any

import pytest

from tests.component.router.rig import Router


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


DEEP = nested(300)
HELLO = [{"role": "user", "content": "Hello"}]
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": DEEP}}

BODIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "tools of a chat": ("/v1/chat/completions", {"messages": HELLO, "tools": [FUNCTION]}, "tools"),
    "tools of a message": (
        "/v1/messages",
        {"messages": HELLO, "max_tokens": 9, "tools": [{"name": "f", "input_schema": DEEP}]},
        "tools",
    ),
    "tools of a response": ("/v1/responses", {"input": "Hello", "tools": [{"x": DEEP}]}, "tools"),
    "the text of a response": ("/v1/responses", {"input": "Hello", "text": {"x": DEEP}}, "text"),
    "the choice of a tool": ("/v1/responses", {"input": "Hello", "tool_choice": DEEP}, "tool_choice"),
    "an input item": ("/v1/responses", {"input": [{**HELLO[0], "x": DEEP}]}, "input[0]"),
}


@pytest.mark.parametrize("name", list(BODIES))
async def test_too_deep(router: Router, name: str) -> None:
    path, body, param = BODIES[name]
    answer = await router.post(path, **body)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert param in message and "nested too deeply" in message
    assert not router.dispatcher.requests


async def test_what_a_response_repeats_has_a_maximum_size(router: Router) -> None:
    answer = await router.post("/v1/responses", input="Hello", text={"x": "a" * (1 << 20)})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "text"
    assert not router.dispatcher.requests
