"""Several conversations in one request, and answers that begin with the message that they continue."""

from __future__ import annotations

from typing import Any

import pytest

from kvrelay.text.service import TextService
from tests.component.router.rig import MODEL, Router, running_router
from tests.component.router.tools import THINKING
from tests.fakes.scripted_dispatcher import Script

BATCH, CHAT = "/v1/chat/completions/batch", "/v1/chat/completions"
NAMES = ("otter", "heron 東", "🦦")
CONVERSATIONS: list[Any] = [[{"role": "user", "content": name}] for name in NAMES]
CONTINUED: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False, "echo": True}


def prompt_of(name: str) -> str:
    return f"<|im_start|>user\n{name}<|im_end|>\n<|im_start|>assistant\n"


async def test_each_conversation_is_a_choice(router: Router) -> None:
    def script(request: Any, sequence: int) -> Script:
        (name,) = (name for name in NAMES if request.prompt_ids == router.tokens(prompt_of(name)))
        return Script([*router.tokens(f"This is {name}."), *router.tokens("<|im_end|>")])

    router.dispatcher.script = script
    answer = await router.post(BATCH, messages=CONVERSATIONS, return_token_ids=True, logprobs=True, top_logprobs=1)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert body["object"] == "chat.completion" and body["model"] == MODEL
    texts = [(each["index"], each["message"]["content"], each["finish_reason"]) for each in body["choices"]]
    assert texts == [(index, f"This is {name}.", "stop") for index, name in enumerate(NAMES)]
    for choice, name in zip(body["choices"], NAMES, strict=True):
        assert choice["token_ids"] == router.tokens(f"This is {name}.<|im_end|>")
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    prompts = [request.prompt_ids for request in router.dispatcher.requests]
    assert prompts == [router.tokens(prompt_of(name)) for name in NAMES]
    assert body["usage"]["prompt_tokens"] == sum(map(len, prompts))


async def test_reasoning_is_apart_in_each(tools_text: TextService) -> None:
    async with running_router(tools_text) as router:
        router.answers(THINKING + "An otter.")
        choices = (await router.post(BATCH, messages=CONVERSATIONS)).json()["choices"]
        messages = [(each["message"]["reasoning_content"], each["message"]["content"]) for each in choices]
        assert messages == [("Hm 🦦", "An otter.")] * len(NAMES)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": CONVERSATIONS[0]}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages"),
        ({"messages": "x"}, "messages"),
        ({"messages": CONVERSATIONS * 400}, "messages"),
        ({"stream": True}, "stream"),
        ({"n": 2}, "n"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
async def test_what_is_no_batch_is_refused(router: Router, fields: dict[str, Any], param: str) -> None:
    answer = await router.post(BATCH, **{"messages": CONVERSATIONS, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert not router.dispatcher.requests


async def test_an_error_names_the_conversation(router: Router) -> None:
    answer = await router.post(BATCH, messages=[*CONVERSATIONS, [{"role": "otter", "content": "x"}]])
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith("Conversation 3: ")


@pytest.mark.parametrize("content", ["An otter", [{"type": "text", "text": "An "}, {"type": "text", "text": "otter"}]])
@pytest.mark.parametrize("name", ["text", "tools_text"])
async def test_a_continued_answer_begins_with_its_message(
    content: Any, name: str, request: pytest.FixtureRequest
) -> None:
    async with running_router(request.getfixturevalue(name)) as router:
        router.answers(" swims.")
        messages = [*CONVERSATIONS[0], {"role": "assistant", "content": content}]
        answer = await router.post(CHAT, messages=messages, **CONTINUED)
        assert answer.json()["choices"][0]["message"]["content"] == "An otter swims."
        stream = await router.openai.chat.completions.create(
            model=MODEL, messages=messages, stream=True, extra_body=CONTINUED
        )
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "An otter swims."
        batch = await router.post(BATCH, messages=[messages, *CONVERSATIONS[1:2]], echo=True)
        contents = [each["message"]["content"] for each in batch.json()["choices"]]
        assert contents == ["An otter swims.", " swims."]
        plain = await router.post(CHAT, messages=messages, **{**CONTINUED, "echo": False})
        assert plain.json()["choices"][0]["message"]["content"] == " swims."


async def test_nothing_is_echoed_behind_a_users_message(router: Router) -> None:
    answer = await router.post(CHAT, messages=CONVERSATIONS[0], echo=True)
    assert answer.json()["choices"][0]["message"]["content"] == "An otter is a mammal."
