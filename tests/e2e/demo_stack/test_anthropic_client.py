"""Anthropic's client against the demo model behind the whole system."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.stack import Stack
from tests.fakes.waiting import PATIENCE_S

anthropic = pytest.importorskip("anthropic", reason="the package anthropic is not installed")

QUESTION = "What is the meaning of otter?"


@pytest.fixture(scope="module")
def client(demo_stack: Stack) -> Iterator[Any]:
    with anthropic.Anthropic(
        base_url=demo_stack.base_url, api_key="none", max_retries=0, timeout=2 * PATIENCE_S
    ) as opened:
        yield opened


def test_messages_are_the_chat_completions_of_the_same_conversation(client: Any, demo_stack: Stack) -> None:
    messages = [{"role": "user", "content": QUESTION}]
    body: dict[str, Any] = {"model": demo_stack.model, "messages": messages, "max_tokens": 40}
    chat = demo_stack.http.post("/v1/chat/completions", json={**body, "temperature": 0}).raise_for_status().json()
    plain = client.messages.create(**body, extra_body={"temperature": 0})
    assert [block.text for block in plain.content] == [chat["choices"][0]["message"]["content"]]
    assert plain.usage.output_tokens == chat["usage"]["completion_tokens"]
    assert plain.usage.input_tokens + plain.usage.cache_read_input_tokens == chat["usage"]["prompt_tokens"]
    with client.messages.stream(**body, extra_body={"temperature": 0}) as stream:
        assert "".join(stream.text_stream) == plain.content[0].text
        whole = stream.get_final_message()
    assert (whole.stop_reason, whole.usage.output_tokens) == (plain.stop_reason, plain.usage.output_tokens)
