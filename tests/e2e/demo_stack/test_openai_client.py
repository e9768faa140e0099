"""The stock OpenAI client against the demo model behind the whole system."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from tests.e2e.conftest import DEMO_MODEL
from tests.fakes.stack import Stack
from tests.fakes.waiting import PATIENCE_S

MULTI_BYTE = "🦦 otter, カワウソ, кот, ½ é ..."
EVERY_TOKEN = {"ignore_eos": True, "skip_special_tokens": False}
HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is a river?"}]


@pytest.fixture(scope="module")
def stack(demo_stack: Stack) -> Stack:
    return demo_stack


@pytest.fixture(scope="module", autouse=True)
def num_failed_before(demo_stack: Stack) -> int:
    num_failed: int = demo_stack.fleet()["requests"]["failed"]
    return num_failed


@pytest.fixture(scope="module")
def client(stack: Stack) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{stack.base_url}/v1", api_key="none", max_retries=0, timeout=2 * PATIENCE_S) as opened:
        yield opened


def async_client(stack: Stack) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{stack.base_url}/v1", api_key="none", max_retries=0, timeout=2 * PATIENCE_S)


def complete(client: OpenAI, stack: Stack, **parameters: Any) -> Completion:
    values: dict[str, Any] = {"model": stack.model, "prompt": "An otter is", "max_tokens": 12} | parameters
    answer: Completion = client.completions.create(**values)
    return answer


def streamed(client: OpenAI, stack: Stack, **parameters: Any) -> list[Completion]:
    values: dict[str, Any] = {"model": stack.model, "prompt": "An otter is", "max_tokens": 12} | parameters
    return list(client.completions.create(**values, stream=True))


def text_of(chunks: list[Completion], index: int = 0) -> str:
    return "".join(choice.text for chunk in chunks for choice in chunk.choices if choice.index == index)


def glosses() -> dict[str, str]:
    rows = [line.split("\t") for line in (DEMO_MODEL / "glosses.tsv").read_text().splitlines()]
    return {word: gloss for word, _, gloss in rows}


def test_the_demo_model_knows_its_words(client: OpenAI, stack: Stack) -> None:
    known = glosses()
    for word in ("otter", "river", "ability"):
        answer = client.chat.completions.create(
            model=stack.model,
            messages=[{"role": "user", "content": f"What is the meaning of {word}?"}],
            temperature=0,
            max_tokens=100,
        )
        assert answer.choices[0].message.content == known[word]
        assert answer.choices[0].finish_reason == "stop"


def test_a_chat_is_the_same_streamed_or_not_and_counts_its_tokens(client: OpenAI, stack: Stack) -> None:
    parameters: dict[str, Any] = {"model": stack.model, "messages": HELLO, "temperature": 0, "max_tokens": 16}
    plain: ChatCompletion = client.chat.completions.create(**parameters)
    chunks = list(client.chat.completions.create(**parameters, stream=True, stream_options={"include_usage": True}))
    assert plain.object == "chat.completion"
    assert plain.choices[0].message.role == "assistant"
    assert plain.choices[0].message.content
    *head, last = chunks
    assert "".join(c.choices[0].delta.content or "" for c in head) == plain.choices[0].message.content
    assert head[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in head] == [*[None] * (len(head) - 1), plain.choices[0].finish_reason]
    assert all(c.usage is None for c in head)
    assert last.choices == []
    assert plain.usage is not None
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (
        plain.usage.prompt_tokens,
        plain.usage.completion_tokens,
    )
    assert plain.usage.total_tokens == plain.usage.prompt_tokens + plain.usage.completion_tokens
    assert len({c.id for c in chunks}) == 1


def test_a_stop_string_ends_the_text_wherever_it_falls_among_tokens(client: OpenAI, stack: Stack) -> None:
    long = {"temperature": 0, "max_tokens": 40, "extra_body": EVERY_TOKEN}
    whole = complete(client, stack, logprobs=0, **long).choices[0]
    assert whole.logprobs is not None
    offsets = whole.logprobs.text_offset or []
    seams = [offset for offset in offsets[1:] if 0 < offset < len(whole.text) - 1]
    assert len(seams) > 10
    for seam in seams[::5]:
        stop = whole.text[seam - 1 : seam + 2]  # the end of one token and the beginning of the next
        expected = whole.text[: whole.text.index(stop)]
        plain = complete(client, stack, stop=["never comes", stop], **long).choices[0]
        assert (plain.text, plain.finish_reason) == (expected, "stop"), f"stop {stop!r}"
        chunks = streamed(client, stack, stop=stop, **long)
        assert text_of(chunks) == expected
        assert chunks[-1].choices[0].finish_reason == "stop"
    stack.wait_until_clean()


def test_several_choices_differ_when_drawn_and_agree_when_greedy(client: OpenAI, stack: Stack) -> None:
    drawn = complete(client, stack, n=3, temperature=1.5, seed=7, max_tokens=16, extra_body={"ignore_eos": True})
    assert [choice.index for choice in drawn.choices] == [0, 1, 2]
    assert len({choice.text for choice in drawn.choices}) == 3
    chunks = streamed(client, stack, n=3, temperature=1.5, seed=7, max_tokens=16, extra_body={"ignore_eos": True})
    assert [text_of(chunks, index) for index in range(3)] == [choice.text for choice in drawn.choices]
    greedy = complete(client, stack, n=3, temperature=0)
    assert len({choice.text for choice in greedy.choices}) == 1
    assert greedy.usage is not None
    assert drawn.usage is not None
    assert drawn.usage.completion_tokens == 3 * 16
    assert drawn.usage.prompt_tokens == greedy.usage.prompt_tokens


def test_a_seed_gives_the_same_text_alone_streamed_and_among_others(client: OpenAI, stack: Stack) -> None:
    parameters: dict[str, Any] = {"temperature": 1.2, "seed": 1234, "max_tokens": 24}
    parameters["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
    alone = complete(client, stack, **parameters).choices[0]
    assert text_of(streamed(client, stack, **parameters)) == alone.text
    assert complete(client, stack, **parameters | {"seed": 1235}).choices[0].text != alone.text

    async def among_others() -> str:
        async with async_client(stack) as many:
            values: dict[str, Any] = {"model": stack.model, "prompt": "An otter is"} | parameters
            others = [
                asyncio.create_task(many.completions.create(**values | {"seed": n, "prompt": f"{n} rivers"}))
                for n in range(30)
            ]
            answer: Completion = await many.completions.create(**values)
            await asyncio.gather(*others)
            return answer.choices[0].text

    assert asyncio.run(among_others()) == alone.text


def test_every_seed_of_64_bits_gives_a_text_of_its_own(client: OpenAI, stack: Stack) -> None:
    seeds = [0, -1, 2**63 - 1, -(2**63), -(2**63) + 1, 1 << 32, -(1 << 32)]
    parameters: dict[str, Any] = {"temperature": 1.5, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    texts = [complete(client, stack, **parameters, seed=seed).choices[0].text for seed in seeds]
    assert len(set(texts)) == len(seeds)
    assert complete(client, stack, **parameters, seed=-1).choices[0].text == texts[1]
    for beyond in (2**63, -(2**63) - 1):
        with pytest.raises(BadRequestError, match="seed"):
            complete(client, stack, **parameters, seed=beyond)


@pytest.mark.parametrize("seed", range(4))
def test_broken_characters_come_out_the_same_streamed_or_not(client: OpenAI, stack: Stack, seed: int) -> None:
    """Single bytes are made likely, so that the text is full of characters that are never completed."""
    byte_ids = set(stack.http.post("/tokenize", json={"prompt": "🦦カ№Җé½"}).json()["tokens"])
    parameters: dict[str, Any] = {"prompt": MULTI_BYTE, "temperature": 2, "seed": seed, "max_tokens": 40}
    parameters |= {"logit_bias": {str(token): 12 for token in byte_ids}, "extra_body": {"ignore_eos": True}}
    plain = complete(client, stack, **parameters).choices[0].text
    assert "\ufffd" in plain
    assert text_of(streamed(client, stack, **parameters)) == plain
    with_logprobs = streamed(client, stack, **parameters, logprobs=1)
    assert text_of(with_logprobs) == plain
    assert text_of(streamed(client, stack, **parameters, stop=["never comes"])) == plain


def test_nothing_is_left_after_all_of_this(stack: Stack, num_failed_before: int) -> None:
    stack.wait_until_clean()
    assert stack.fleet()["requests"]["running"] == 0
    assert stack.fleet()["requests"]["failed"] == num_failed_before
