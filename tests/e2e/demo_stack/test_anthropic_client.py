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


def test_the_second_turn_finds_the_first_in_the_cache(client: Any, demo_stack: Stack) -> None:
    def turn(number: int, *more: Any) -> Any:
        header = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={number:05x};"}
        system = [header, {"type": "text", "text": "You know many words and what they mean. " * 20}]
        messages = [{"role": "user", "content": QUESTION}, *more]
        return client.messages.create(model=demo_stack.model, system=system, messages=messages, max_tokens=8)

    first = turn(1)
    answer = {"role": "assistant", "content": first.content[0].text}
    second = turn(2, answer, {"role": "user", "content": "And of river?"})
    prompt = first.usage.input_tokens + first.usage.cache_read_input_tokens
    assert prompt - second.usage.cache_read_input_tokens < 64


def test_errors_are_those_of_the_api(client: Any, demo_stack: Stack) -> None:
    hello = [{"role": "user", "content": "hi"}]
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.create(model="other", messages=hello, max_tokens=8)
    assert caught.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError, match="context"):
        client.messages.create(
            model=demo_stack.model, messages=[{"role": "user", "content": "otter " * 9000}], max_tokens=8
        )
