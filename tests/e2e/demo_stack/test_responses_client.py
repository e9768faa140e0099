"""The Responses API of the stock OpenAI client against the demo model behind the whole system."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.fakes.stack import Stack
from tests.fakes.waiting import PATIENCE_S

QUESTION = "What is the meaning of otter?"


@pytest.fixture(scope="module")
def client(demo_stack: Stack) -> Iterator[OpenAI]:
    url = f"{demo_stack.base_url}/v1"
    with OpenAI(base_url=url, api_key="none", max_retries=0, timeout=2 * PATIENCE_S) as opened:
        yield opened


def test_responses_are_the_chat_completions_of_the_same_conversation(client: OpenAI, demo_stack: Stack) -> None:
    chat = client.chat.completions.create(
        model=demo_stack.model, messages=[{"role": "user", "content": QUESTION}], temperature=0, max_tokens=40
    )
    plain = client.responses.create(model=demo_stack.model, input=QUESTION, temperature=0, max_output_tokens=40)
    assert plain.output_text == chat.choices[0].message.content
    assert chat.usage is not None and plain.usage is not None
    assert plain.usage.input_tokens == chat.usage.prompt_tokens
    assert plain.usage.output_tokens == chat.usage.completion_tokens
    with client.responses.stream(model=demo_stack.model, input=QUESTION, temperature=0, max_output_tokens=40) as stream:
        text = "".join([event.delta for event in stream if event.type == "response.output_text.delta"])
        whole = stream.get_final_response()
    assert text == whole.output_text == plain.output_text
    assert whole.usage is not None and whole.usage.output_tokens == plain.usage.output_tokens
