"""Chat completions, as the stock client sees them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.component.router.rig import MODEL, Router
from tests.fakes.scripted_dispatcher import Script

HELLO: list[Any] = [{"role": "user", "content": "What is an otter?"}]
PROMPT = "<|im_start|>user\nWhat is an otter?<|im_end|>\n<|im_start|>assistant\n"


async def test_a_plain_answer(router: Router) -> None:
    answer = await router.openai.chat.completions.create(model=MODEL, messages=HELLO)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "An otter is a mammal."
    assert answer.choices[0].finish_reason == "stop"
    (request,) = router.dispatcher.requests
    assert request.prompt_ids == router.tokens(PROMPT)
    assert request.sampling.max_tokens == 512 - len(request.prompt_ids)


async def test_a_stream_begins_with_the_role_and_ends_with_a_reason(router: Router) -> None:
    stream = await router.openai.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
    chunks = [chunk async for chunk in stream]
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join([chunk.choices[0].delta.content or "" for chunk in chunks]) == "An otter is a mammal."
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]


async def test_several_choices(router: Router) -> None:
    texts = ["one", "two", "three"]
    router.dispatcher.script = lambda request, sequence: Script([*router.tokens(texts[sequence]), 2])
    plain = await router.openai.chat.completions.create(model=MODEL, messages=HELLO, n=3)
    assert [choice.message.content for choice in plain.choices] == texts
    seen = ["", "", ""]
    async for chunk in await router.openai.chat.completions.create(model=MODEL, messages=HELLO, n=3, stream=True):
        for choice in chunk.choices:
            seen[choice.index] += choice.delta.content or ""
    assert seen == texts


async def test_usage_and_cached_tokens(router: Router) -> None:
    stream = await router.openai.chat.completions.create(
        model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = [chunk async for chunk in stream]
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks)
    plain = await router.openai.chat.completions.create(model=MODEL, messages=HELLO)
    assert last.choices == [] and last.usage is not None and last.usage == plain.usage
    assert last.usage.prompt_tokens_details is not None
    assert last.usage.prompt_tokens_details.cached_tokens == 16


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(router: Router, stream: bool) -> None:
    router.answers("é 🦦")
    options: dict[str, Any] = {"model": MODEL, "messages": HELLO, "logprobs": True, "top_logprobs": 2}
    if stream:
        chunks = [chunk async for chunk in await router.openai.chat.completions.create(**options, stream=True)]
        content = [each for c in chunks if c.choices[0].logprobs for each in c.choices[0].logprobs.content or []]
    else:
        answer = await router.openai.chat.completions.create(**options)
        assert answer.choices[0].logprobs is not None
        content = answer.choices[0].logprobs.content or []
    assert b"".join([bytes(each.bytes or []) for each in content[:-1]]).decode() == "é 🦦"
    assert content[-1].token == "<|im_end|>"
    assert {each.logprob for each in content} == {-0.5}
    assert [len(each.top_logprobs) for each in content] == [2] * len(content)
    assert content[0].top_logprobs[0].token == content[0].token


@pytest.mark.parametrize("stop", [None, " swallows"])
async def test_a_chunk_of_a_stream_with_logprobs_has_one_token_with_text(router: Router, stop: str | None) -> None:
    """guidance takes the content for the text of a chunk's only token, and of several tokens their texts."""
    router.answers("An otter swims, é 🦦 swal")
    asked: dict[str, Any] = {"model": MODEL, "messages": HELLO, "logprobs": True, "stop": stop}
    choices = [chunk.choices[0] async for chunk in await router.openai.chat.completions.create(**asked, stream=True)]
    scored = [choice for choice in choices if choice.logprobs is not None and choice.logprobs.content]
    assert all(len(choice.logprobs.content or []) == 1 for choice in scored if choice.logprobs and choice.delta.content)
    assert "".join(choice.delta.content or "" for choice in scored) == "An otter swims, é 🦦 swal"
    tokens = [each for choice in scored if choice.logprobs for each in choice.logprobs.content or []]
    whole = await router.openai.chat.completions.create(**asked)
    assert whole.choices[0].logprobs is not None and tokens == whole.choices[0].logprobs.content
    assert tokens[-1].token == "<|im_end|>" and choices[-1].finish_reason == "stop"


async def test_logprobs_without_alternatives(router: Router) -> None:
    answer = await router.openai.chat.completions.create(model=MODEL, messages=HELLO, logprobs=True)
    assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.content
    assert answer.choices[0].logprobs.content[0].top_logprobs == []


async def test_max_completion_tokens_wins(router: Router) -> None:
    await router.openai.chat.completions.create(model=MODEL, messages=HELLO, max_completion_tokens=3, max_tokens=7)
    assert router.dispatcher.requests[0].sampling.max_tokens == 3


@pytest.mark.parametrize(
    ("messages", "options", "expected"),
    [
        (
            [{"role": "system", "content": "Be brief."}, *HELLO],
            {},
            "<|im_start|>system\nBe brief.<|im_end|>\n" + PROMPT,
        ),
        (
            [{"role": "developer", "content": "Be brief.", "name": "me"}, *HELLO],
            {},
            "<|im_start|>system\nBe brief.<|im_end|>\n" + PROMPT,
        ),
        ([{"role": "user", "content": [{"type": "text", "text": "What is an otter?"}]}], {}, PROMPT),
        (HELLO, {"add_generation_prompt": False}, PROMPT.removesuffix("<|im_start|>assistant\n")),
        (
            [*HELLO, {"role": "assistant", "content": "An otter"}],
            {"continue_final_message": True},
            PROMPT + "An otter",
        ),
        (HELLO, {"chat_template_kwargs": {"enable_thinking": False}}, PROMPT),
    ],
)
async def test_messages_become_the_prompt(
    router: Router, messages: list[Any], options: dict[str, Any], expected: str
) -> None:
    answer = await router.post("/v1/chat/completions", messages=messages, **options)
    assert answer.status_code == 200, answer.text
    assert router.dispatcher.requests[0].prompt_ids == router.tokens(expected)
    tokenized = await router.post("/tokenize", messages=messages, **options)
    assert tokenized.json()["tokens"] == router.tokens(expected)


@pytest.mark.parametrize(
    "harmless",
    [
        {"response_format": {"type": "text"}},
        {"tools": [], "tool_choice": "auto"},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"modalities": ["text"], "store": True, "metadata": {"a": "b"}, "user": "me", "service_tier": "auto"},
        {"parallel_tool_calls": True, "safety_identifier": "x", "prompt_cache_key": "y"},
        {"something_new": {"nested": [1]}},
        {"temperature": None, "top_p": None, "n": None, "stop": None, "logit_bias": None, "seed": None},
        {"top_k": -1, "max_tokens": None, "stream": None, "stream_options": None, "thinking_token_budget": -1},
    ],
)
async def test_fields_that_ask_for_nothing_are_taken(router: Router, harmless: dict[str, Any]) -> None:
    answer = await router.post("/v1/chat/completions", messages=HELLO, **harmless)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == "An otter is a mammal."
